"""Tape and recorder: right rows for each key, every row exactly once, and a message that names each violation.

Letters: L MoE layers, K experts a token, E experts.
"""

from __future__ import annotations

import torch

from routing_replay.replay import FedRows, RoutingRecorder, RoutingReplayer
from routing_replay.trace import RoutingTrace
from tests.support.refusals import refuses

LAYERS, K, E = (1, 2), 4, 16


def make(rows: int) -> RoutingTrace:
    g = torch.Generator().manual_seed(rows)
    ids = torch.rand(rows, len(LAYERS), E, generator=g).argsort(-1)[..., :K]
    return RoutingTrace(experts=ids.to(torch.uint8), layers=LAYERS, num_experts=E)


# samples of 2, 3 and of 6 tokens; the last row of micro-batch 1 is padding
FED = (
    FedRows(samples=("a/0", "a/1"), ends=torch.tensor([0, 2, 5]), tokens=torch.arange(5)),
    FedRows(samples=("b/0",), ends=torch.tensor([0, 6]), tokens=torch.tensor([0, 1, 2, 3, 4, 5, -1])),
)
ZERO, ONE = (0, "a/0", "a/1"), (1, "b/0")  # micro-batch, samples


def loaded(*, expect_recompute: bool = False) -> RoutingReplayer:
    tape = RoutingReplayer(expect_recompute=expect_recompute)
    tape.load(0, make(5), FED[0])
    tape.load(1, make(7), FED[1])
    return tape


def forward(tape: RoutingReplayer) -> None:
    for micro in (0, 1):
        for layer in LAYERS:
            tape.topk(micro, layer)


def test_each_key_has_its_rows() -> None:
    """Rows of that micro-batch and that layer, order kept, as the int64 that gather takes; any order of asking."""
    tape = loaded()
    for micro, layer in ((1, 2), (0, 1), (1, 1), (0, 2)):
        ids = tape.topk(micro, layer, rows=(5, 7)[micro])
        assert ids.dtype is torch.int64
        assert torch.equal(ids, make((5, 7)[micro]).experts[:, LAYERS.index(layer)].long())
    tape.assert_drained()


def test_recomputation_gets_the_same_rows_once_more() -> None:
    """The backward pass must route as the forward pass did, or the gradient is of another function."""
    tape = loaded(expect_recompute=True)
    first = tape.topk(0, 1)
    assert torch.equal(tape.topk(0, 1, recompute=True), first)
    with refuses(ValueError, *ZERO, 1):
        tape.topk(0, 1, recompute=True)


def test_asked_twice() -> None:
    """A second forward pass over the same rows means that the step is not what was planned."""
    tape = loaded()
    tape.topk(0, 1)
    with refuses(ValueError, *ZERO, 1):
        tape.topk(0, 1)


def test_never_loaded() -> None:
    """Micro-batches are numbered differently on the two sides."""
    with refuses(ValueError, 2, 1, *ZERO, *ONE):
        loaded().topk(2, 1)


def test_a_layer_of_another_stage() -> None:
    """An ordinal in place of the global number."""
    with refuses(ValueError, *ZERO, 0, "[1, 2]"):
        loaded().topk(0, 0)


def test_other_rows() -> None:
    """A slice that the tokens had and the trace had not."""
    with refuses(ValueError, *ONE, 2, 5, 7, "b/0", 5):
        loaded().topk(1, 2, rows=5)


def test_unexpected_and_early_recomputation() -> None:
    """Either the configuration lies, or a backward pass runs without its forward pass."""
    with refuses(ValueError, *ZERO, 1):
        loaded().topk(0, 1, recompute=True)
    with refuses(ValueError, *ZERO, 1):
        loaded(expect_recompute=True).topk(0, 1, recompute=True)


def test_loaded_twice() -> None:
    """Two micro-batches under one number would hide each other's rows."""
    with refuses(ValueError, *ZERO):
        loaded().load(0, make(5), FED[0])


def test_a_refusal_uses_nothing_up() -> None:
    """Otherwise the error that follows would be named instead of the cause."""
    tape = loaded()
    with refuses(ValueError, "a/0", "a/1", "a/1"):
        tape.topk(0, 1, rows=4)
    forward(tape)
    tape.assert_drained()


def test_rows_left_over_are_named() -> None:
    """A layer that routed by itself although it should not have."""
    tape = loaded()
    tape.topk(0, 1)
    with refuses(ValueError, 3, 4, *ZERO, 2, *ONE, 1):
        tape.assert_drained()


def test_recomputation_left_over_is_named() -> None:
    """Activations that should have been recomputed were kept, or recomputed without the tape."""
    tape = loaded(expect_recompute=True)
    forward(tape)
    with refuses(ValueError, 4, 4, *ZERO, 1):
        tape.assert_drained()
    for micro in (0, 1):
        for layer in LAYERS:
            tape.topk(micro, layer, recompute=True)
    tape.assert_drained()


def recorded(recorder: RoutingRecorder, *, skip: tuple[int, int] | None = None) -> RoutingRecorder:
    """Micro-batches of 5 and 7 rows, layers in the order in which a pipeline may come by."""
    for layer in reversed(LAYERS):
        for micro, rows in ((0, 5), (1, 7)):
            if (micro, layer) != skip:
                recorder.record(micro, layer, make(rows).experts[:, LAYERS.index(layer)].long())
    return recorder


def test_what_is_recorded_is_what_a_tape_replays() -> None:
    """Keyed, not listed: the order of recording does not matter; ids are stored in the small type."""
    tape = RoutingReplayer()
    for micro, own in enumerate(recorded(RoutingRecorder(LAYERS, E, FED)).routes()):
        trace = own.trace
        assert own.fed is FED[micro] and trace.experts.dtype is torch.uint8 and trace.weights is None
        tape.load(micro, trace)
    for micro, rows in ((0, 5), (1, 7)):
        for layer in LAYERS:
            assert torch.equal(tape.topk(micro, layer), make(rows).experts[:, LAYERS.index(layer)].long())
    tape.assert_drained()


def test_rows_are_the_same_only_of_the_same_samples_each_of_its_length() -> None:
    """As many tokens of the same samples, one longer and one shorter than before: every row after is another's."""
    one, rows = FED[0], torch.arange(5)
    assert one.same(FedRows(samples=("a/0", "a/1"), ends=torch.tensor([0, 2, 5]), tokens=rows))
    assert not one.same(FedRows(samples=("a/0", "a/1"), ends=torch.tensor([0, 3, 5]), tokens=rows))
    assert not one.same(FedRows(samples=("a/1", "a/0"), ends=torch.tensor([0, 2, 5]), tokens=rows))
    assert not one.same(FedRows(samples=("a/0", "a/1"), ends=torch.tensor([0, 2, 5]), tokens=rows.flip(0)))
    assert not one.same(FED[1])


def test_gates_are_those_of_the_recorded_experts_in_their_order() -> None:
    """Of probabilities over all experts; a tape gives each key its own, beside its ids."""
    recorder, tape = recorded(RoutingRecorder(LAYERS, E, FED, gates=True)), RoutingReplayer()
    for layer in LAYERS:
        for micro, rows in ((0, 5), (1, 7)):
            recorder.record_gates(micro, layer, (100 * layer + torch.arange(E)).float().expand(rows, E))
    for micro, own in enumerate(recorder.routes()):
        tape.load(micro, own.trace)
        for layer in LAYERS:
            tape.topk(micro, layer)
            ids, gates = tape.gates(micro, layer)
            assert torch.equal(gates, (100 * layer + ids).float())


def test_a_key_recorded_twice_or_of_another_layer() -> None:
    """Two passes in one record, or an ordinal in place of the global number."""
    recorder = recorded(RoutingRecorder(LAYERS, E, FED))
    with refuses(ValueError, *ONE, 2):
        recorder.record(1, 2, make(7).experts[:, 1])
    with refuses(ValueError, *ZERO, 0, "[1, 2]"):
        recorder.record(0, 0, make(5).experts[:, 0])


def test_an_incomplete_record_is_named() -> None:
    """A router that was not asked, a micro-batch too many or of other rows, gates that were never recorded."""
    with refuses(ValueError, 3, 4, *ONE, 2):
        recorded(RoutingRecorder(LAYERS, E, FED), skip=(1, 2)).routes()
    with refuses(ValueError, 1, 2, 0, 0):
        recorded(RoutingRecorder(LAYERS, E, FED[:1]))
    with refuses(ValueError, *ONE, 2, 5, 7):
        RoutingRecorder(LAYERS, E, FED).record(1, 2, make(5).experts[:, 1])
    with refuses(ValueError, 0, 4):
        recorded(RoutingRecorder(LAYERS, E, FED, gates=True)).routes()
    with refuses(ValueError, *ONE, 5, 7):
        RoutingReplayer().load(1, make(5), FED[1])
