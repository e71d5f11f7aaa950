"""Tape and recorder: right rows for each key, every row exactly once, every violation by name.

Letters: L MoE layers, K experts a token, E experts.
"""

from __future__ import annotations

import pytest
import torch

from routing_replay.tape import FedRows, ReplayTape, RouteRecorder
from routing_replay.trace import RoutingTrace

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
ZERO, ONE = "micro-batch 0, all positions of samples a/0, a/1", "micro-batch 1, all positions of samples b/0"


def loaded(*, expect_recompute: bool = False) -> ReplayTape:
    tape = ReplayTape(expect_recompute=expect_recompute)
    tape.load(0, make(5), FED[0])
    tape.load(1, make(7), FED[1])
    return tape


def forward(tape: ReplayTape) -> None:
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
    with pytest.raises(ValueError, match=f"^{ZERO}, layer 1: asked twice in the recomputation"):
        tape.topk(0, 1, recompute=True)


def test_asked_twice() -> None:
    """A second forward pass over the same rows means that the step is not what was planned."""
    tape = loaded()
    tape.topk(0, 1)
    with pytest.raises(ValueError, match=f"^{ZERO}, layer 1: asked twice in the forward pass"):
        tape.topk(0, 1)


def test_never_loaded() -> None:
    """Micro-batches are numbered differently on the two sides."""
    with pytest.raises(ValueError, match=f"^micro-batch 2, layer 1: never loaded; loaded are {ZERO}, {ONE}$"):
        loaded().topk(2, 1)


def test_a_layer_of_another_stage() -> None:
    """An ordinal in place of the global number."""
    with pytest.raises(ValueError, match=rf"^{ZERO}, layer 0: no routes.*\[1, 2\]"):
        loaded().topk(0, 0)


def test_other_rows() -> None:
    """A slice that the tokens had and the trace had not."""
    with pytest.raises(
        ValueError, match=f"^{ONE}, layer 2: the router has 5 tokens, the trace 7 rows.*: sample b/0, position 5$"
    ):
        loaded().topk(1, 2, rows=5)


def test_unexpected_and_early_recomputation() -> None:
    """Either the configuration lies, or a backward pass runs without its forward pass."""
    with pytest.raises(ValueError, match=f"^{ZERO}, layer 1: .*not expect"):
        loaded().topk(0, 1, recompute=True)
    with pytest.raises(ValueError, match=f"^{ZERO}, layer 1: recomputed before"):
        loaded(expect_recompute=True).topk(0, 1, recompute=True)


def test_loaded_twice() -> None:
    """Two micro-batches under one number would hide each other's rows."""
    with pytest.raises(ValueError, match=f"{ZERO}: loaded twice"):
        loaded().load(0, make(5), FED[0])


def test_a_refusal_uses_nothing_up() -> None:
    """Otherwise the error that follows would be named instead of the cause."""
    tape = loaded()
    with pytest.raises(ValueError, match="tokens"):
        tape.topk(0, 1, rows=4)
    forward(tape)
    tape.assert_drained()


def test_rows_left_over_are_named() -> None:
    """A layer that routed by itself although it should not have."""
    tape = loaded()
    tape.topk(0, 1)
    with pytest.raises(ValueError, match=rf"3 of 4 .*forward pass: \({ZERO}, layer 2\), \({ONE}, layer 1\)"):
        tape.assert_drained()


def test_recomputation_left_over_is_named() -> None:
    """Activations that should have been recomputed were kept, or recomputed without the tape."""
    tape = loaded(expect_recompute=True)
    forward(tape)
    with pytest.raises(ValueError, match=rf"4 of 4 .*recomputation: \({ZERO}, layer 1\)"):
        tape.assert_drained()
    for micro in (0, 1):
        for layer in LAYERS:
            tape.topk(micro, layer, recompute=True)
    tape.assert_drained()


def recorded(recorder: RouteRecorder, *, skip: tuple[int, int] | None = None) -> RouteRecorder:
    """Micro-batches of 5 and 7 rows, layers in the order in which a pipeline may come by."""
    for layer in reversed(LAYERS):
        for micro, rows in ((0, 5), (1, 7)):
            if (micro, layer) != skip:
                recorder.record(micro, layer, make(rows).experts[:, LAYERS.index(layer)].long())
    return recorder


def test_what_is_recorded_is_what_a_tape_replays() -> None:
    """Keyed, not listed: the order of recording does not matter; ids are stored in the small type."""
    tape = ReplayTape()
    for micro, own in enumerate(recorded(RouteRecorder(LAYERS, E, FED)).routes()):
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
    recorder, tape = recorded(RouteRecorder(LAYERS, E, FED, gates=True)), ReplayTape()
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
    recorder = recorded(RouteRecorder(LAYERS, E, FED))
    with pytest.raises(ValueError, match=f"{ONE}, layer 2: recorded twice"):
        recorder.record(1, 2, make(7).experts[:, 1])
    with pytest.raises(ValueError, match=rf"{ZERO}, layer 0: .* only of layers \[1, 2\]"):
        recorder.record(0, 0, make(5).experts[:, 0])


def test_an_incomplete_record_is_named() -> None:
    """A router that was not asked, a micro-batch too many or of other rows, gates that were never told."""
    with pytest.raises(ValueError, match=rf"3 of 4 routes were recorded.*: \({ONE}, layer 2\)$"):
        recorded(RouteRecorder(LAYERS, E, FED), skip=(1, 2)).routes()
    with pytest.raises(ValueError, match="micro-batch 1, layer 2: recorded are 0 to 0"):
        recorded(RouteRecorder(LAYERS, E, FED[:1]))
    with pytest.raises(ValueError, match=f"{ONE}, layer 2: the router chose for 5 tokens, it was fed 7"):
        RouteRecorder(LAYERS, E, FED).record(1, 2, make(5).experts[:, 1])
    with pytest.raises(ValueError, match="0 of 4 routes were recorded"):
        recorded(RouteRecorder(LAYERS, E, FED, gates=True)).routes()
    with pytest.raises(ValueError, match=f"{ONE}: 5 rows of routes for 7 tokens"):
        ReplayTape().load(1, make(5), FED[1])
