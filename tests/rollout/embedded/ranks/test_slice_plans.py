"""A server takes the plan of a publisher only if it brings each of its ranks every byte of its slices once: a plan with
a gap would leave old weights in it, one with an overlap would let two trainer ranks write the same bytes.

Stores without values, in this process. What ranks receive: tests/rollout/publish/reshard.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from miles_like.types import WeightRegion
from quant.spec import QuantFormat, QuantSpec
from rollout.embedded.families.registry import architecture_of
from rollout.embedded.model.slices import Slices
from rollout.embedded.model.weights import WeightStore
from rollout.embedded.ranks.slice_plans import layout_of, rank_plans
from rollout.publish.reshard.plan import Encoding, make_plan, other_model
from rollout.publish.reshard.publisher import body_of
from rollout.wire.reshard.requests import PlanSlices
from tests.support.published import FAMILIES
from tests.support.refusals import refuses
from tests.support.resharded import HandShards
from tests.support.tiny_models import random_tensors

MOST = 1 << 30
SPEC = QuantSpec.of(QuantFormat.FP8, block=(8, 8))


class Planned:
    """A plan of two trainer ranks for a server of two."""

    def __init__(self, family: str = "deepseek", ep: int = 1) -> None:
        arch = architecture_of(FAMILIES[family], eos_ids=())
        self.ranks = [Slices(arch=arch, rank=rank, tp=2, ep=ep) for rank in range(2)]
        self.store = WeightStore(arch, SPEC, self.ranks[0])
        shards = [HandShards(random_tensors(FAMILIES[family]), "tp", rank, 2) for rank in range(2)]
        self.regions: list[list[WeightRegion]] = [s.regions for s in shards]
        self.layout, self.encoding = layout_of(self.store, self.ranks, MOST), Encoding(SPEC)
        self.plan = make_plan(self.regions, shards[0].names, [self.layout], self.encoding, 20_000)
        self.body = body_of(self.plan, 0).to_json()

    def check(self, body: dict[str, Any]) -> None:
        rank_plans(self.store, PlanSlices.from_json(body), self.ranks, MOST)


@pytest.fixture(scope="module")
def planned() -> Planned:
    return Planned()


@pytest.fixture
def body(planned: Planned) -> dict[str, Any]:
    return deepcopy(planned.body)


def test_a_plan_of_the_same_model_is_taken(planned: Planned) -> None:
    """Each rank gets its share of the bytes, in pieces of about the size asked for."""
    assert other_model(planned.layout, planned.regions, planned.encoding) == ""
    plans = rank_plans(planned.store, PlanSlices.from_json(planned.body), planned.ranks, MOST)
    for plan, server in zip(plans, planned.plan.servers[0].messages, strict=True):
        held = sum(h.dtype.itemsize * _elements(h.shape) for h in plan.held.values())
        assert held == sum(s.nbytes for _, _, segments in server for s in segments)
        sizes = [sum(s.nbytes for m in ones for s in m.segments) for ones in plan.messages.values()]
        assert len(sizes) > 2 and max(sizes) <= 20_000


def _elements(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


def test_a_gap_and_an_overlap_are_refused(planned: Planned, body: dict[str, Any]) -> None:
    message = body["messages"][1][0]
    segment = message["segments"][0]
    name = body["tensors"][segment[0]]["name"]
    for changed in ([segment[0], segment[1], segment[2] - 1, *segment[3:]], [*segment[:4], segment[4] - 1]):
        message["segments"][0] = changed
        with refuses(ValueError, "rank 1", name):
            planned.check(body)
    message["segments"] = [segment, *message["segments"][1:], segment]
    with refuses(ValueError, "rank 1", name):
        planned.check(body)


def test_what_a_rank_does_not_hold_is_refused(planned: Planned, body: dict[str, Any]) -> None:
    message = body["messages"][0][0]
    message["segments"].append([len(body["tensors"]), 0, 1, 0, 1])
    with refuses(ValueError, "rank 0"):
        planned.check(body)


def test_a_tensor_is_in_one_piece(planned: Planned, body: dict[str, Any]) -> None:
    """Of which both trainer ranks send columns: a message of one of them comes later."""
    tensors = [{s[0] for s in message["segments"]} for message in body["messages"][0]]
    one, other = next(
        (a, b) for a in range(len(tensors)) for b in range(a + 1, len(tensors)) if tensors[a] & tensors[b]
    )
    assert body["messages"][0][one]["piece"] == body["messages"][0][other]["piece"] < body["pieces"] - 1
    body["messages"][0][other]["piece"] += 1
    name = body["tensors"][min(tensors[one] & tensors[other])]["name"]
    with refuses(ValueError, "rank 0", name, "two pieces"):
        planned.check(body)


def test_tensors_of_another_model_are_refused(planned: Planned, body: dict[str, Any]) -> None:
    shape = body["tensors"][0]["shape"]
    body["tensors"][0]["shape"] = [n + 1 for n in shape]
    with refuses(ValueError, body["tensors"][0]["name"]):
        planned.check(body)
    body["tensors"][0]["shape"] = shape
    with refuses(ValueError, "model.layers.9.mlp.gate.weight"):
        planned.check(body | {"unsent": ["model.layers.9.mlp.gate.weight"]})
    with refuses(ValueError, body["tensors"][-1]["name"]):
        planned.check(body | {"tensors": body["tensors"][:-1]})
    with refuses(ValueError, 1, 2):
        planned.check(body | {"messages": body["messages"][:1]})
    with refuses(ValueError, "--bucket-bytes", "100"):
        rank_plans(planned.store, PlanSlices.from_json(planned.body), planned.ranks, 100)


def test_a_server_of_another_model_or_format_is_seen_in_its_layout(planned: Planned) -> None:
    other = Planned("qwen_moe")
    assert "a server of the run's model" in other_model(other.layout, planned.regions, planned.encoding)
    assert "a server of the run's model" in other_model(planned.layout, planned.regions, Encoding(None))


def test_equal_copies_are_sent_once_and_in_equal_shares(planned: Planned) -> None:
    """Both trainer ranks hold norms and routers; each sends some."""
    sent = [sum(s.nbytes for piece in p.sends for send in piece for s in send.segments) for p in planned.plan.sources]
    assert max(sent) < 1.2 * min(sent)
