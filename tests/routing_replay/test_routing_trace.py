"""The trace and its form on the wire.

Letters: S tokens, L MoE layers, K experts a token, E experts.
"""

from __future__ import annotations

import base64

import numpy as np
import pytest
import torch
from torch import Tensor

from routing_replay.ids import id_dtype
from routing_replay.trace import RoutingTrace
from tests.support.refusals import Facts, refuses

LAYERS, ALL_LAYERS, K, E = (1, 2, 4), 5, 4, 16


def random_ids(rows: int, num_layers: int, *, num_experts: int = E, seed: int = 0) -> Tensor:
    """[rows, L, K] int64, distinct in a row."""
    g = torch.Generator().manual_seed(seed)
    return torch.rand(rows, num_layers, num_experts, generator=g).argsort(-1)[..., :K]


def make(rows: int = 6, **kwargs: int) -> RoutingTrace:
    ids = random_ids(rows, len(LAYERS), **kwargs)
    experts = kwargs.get("num_experts", E)
    return RoutingTrace(experts=ids.to(id_dtype(experts)), layers=LAYERS, num_experts=experts)


def payload(ids: np.ndarray) -> str:
    """What SGLang sends: base64 of little-endian int32 [rows, all layers, K]."""
    return base64.b64encode(ids.astype("<i4").tobytes()).decode()


def read(wire: str, *, rows: int = 6) -> RoutingTrace:
    return RoutingTrace.from_wire(
        wire, tokens=torch.arange(rows + 1), num_layers=ALL_LAYERS, layers=LAYERS, top_k=K, num_experts=E
    )


def test_wire_bytes_written_by_hand() -> None:
    """One row, two layers, two experts, the first layer dense: the eight bytes of each number as SGLang lays them."""
    wire = base64.b64encode(bytes([0] * 8 + [3, 0, 0, 0, 1, 0, 0, 0])).decode()
    t = RoutingTrace.from_wire(wire, tokens=torch.arange(2), num_layers=2, layers=(1,), top_k=2, num_experts=4)
    assert t.experts.tolist() == [[[3, 1]]] and t.experts.dtype is torch.uint8
    assert t.to_wire(num_layers=2) == wire


@pytest.mark.parametrize("num_experts", [256, 257, 384])
def test_round_trip(num_experts: int) -> None:
    """Writing and reading is the identity, order within a row included; 257 experts need two bytes."""
    t = make(num_experts=num_experts)
    shape = {"num_layers": ALL_LAYERS, "layers": LAYERS, "top_k": K, "num_experts": num_experts}
    back = RoutingTrace.from_wire(t.to_wire(num_layers=ALL_LAYERS), tokens=torch.arange(7), **shape)
    assert torch.equal(back.experts, t.experts) and back.layers == LAYERS
    assert back.experts.element_size() == (1 if num_experts == 256 else 2)


def test_dense_layers_are_zero() -> None:
    """As SGLang 0.5.23 sends them. All layers rotated by one put another layer's ids there, or leave an MoE layer
    without ids; only here would that show."""
    ids = np.zeros((6, ALL_LAYERS, K), dtype="<i4")
    ids[:, list(LAYERS)] = make().experts.numpy()
    assert torch.equal(read(payload(ids)).experts, make().experts)
    turned = ids.copy()
    turned[:, [0, 1]] = ids[:, [1, 0]]
    with refuses(ValueError, 0, 0):
        read(payload(turned))
    ids[2, 3, 1] = 255
    with refuses(ValueError, 3, 2, "[0, 255, 0, 0]"):
        read(payload(ids))


@pytest.mark.parametrize("rows", [5, 7, 8])
def test_other_lengths_are_refused(rows: int) -> None:
    """A row that is missing or stands twice would shift every later one: silent, and the worst mismatch there is. One
    too many is no row of the last token: SGLang 0.5.23 sends none."""
    ids = np.zeros((rows, ALL_LAYERS, K), dtype="<i4") + np.arange(K)
    with refuses(ValueError, 6, "routed_experts", 5):
        read(payload(ids))


@pytest.mark.parametrize(
    ("value", "facts"), [(E, ("0..15",)), (-1, ("[-1, 8, 2, 3]",)), (None, (2, 3, "[8, 8, 2, 3]"))]
)
def test_impossible_ids_are_refused(value: int | None, facts: Facts) -> None:
    """Expert 16 of 16, the sentinel of a missing row, and an expert twice (None: copied from its neighbour)."""
    ids = np.zeros((6, ALL_LAYERS, K), dtype="<i4")
    ids[:, list(LAYERS)] = make().experts.numpy()
    ids[3, 2, 0] = ids[3, 2, 1] if value is None else value
    with refuses(ValueError, *facts):
        read(payload(ids))


def test_what_is_not_base64_is_refused() -> None:
    """An error page, or JSON."""
    with refuses(ValueError, "base64"):
        read("[[1, 2]]")


def test_check_names_row_and_layer() -> None:
    """The layer by its global number."""
    t = make()
    t.experts[3, 1] = torch.tensor([1, 2, 2, 3])
    with refuses(ValueError, 2, 3):
        t.check()
    t.experts[3, 1] = torch.tensor([1, 2, 99, 3])
    with refuses(ValueError, 2, 3, "0..15"):
        t.check()


def test_a_trace_checks_its_own_shape() -> None:
    """Layers, id type and order are what everything else relies on."""
    ids = random_ids(6, 3).to(torch.uint8)
    with refuses(ValueError, 2, "(6, 3, 4)"):
        RoutingTrace(experts=ids, layers=(1, 2), num_experts=E)
    with refuses(ValueError, "torch.uint8"):
        RoutingTrace(experts=ids.to(torch.int16), layers=LAYERS, num_experts=E)
    with refuses(ValueError, "(2, 1, 4)"):
        RoutingTrace(experts=ids, layers=(2, 1, 4), num_experts=E)
    with refuses(ValueError, 40000):
        id_dtype(40000)


def test_concat_joins_rows_and_refuses_other_models() -> None:
    """A pack has the rows of its samples in their order."""
    a, b = make(2), make(3, seed=1)
    both = RoutingTrace.concat([a, b])
    assert len(both) == 5 and torch.equal(both.experts[2:], b.experts)
    other = RoutingTrace(experts=b.experts, layers=(1, 2, 3), num_experts=E)
    with refuses(ValueError, "(1, 2, 4)", "(1, 2, 3)", 16):
        RoutingTrace.concat([a, other])
