"""Messages are the bytes of rectangles of tensors, whichever dtype and shape these have, and requests have bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.wire.reshard.messages import MessageHash, byte_rows, packed, unpack
from rollout.wire.reshard.requests import JoinSlices, PlanSlices, Segment
from tests.support.refusals import refuses

TENSORS = {
    "a matrix": torch.randn(6, 5).bfloat16(),
    "a vector": torch.arange(7, dtype=torch.int64),
    "codes": torch.randn(4, 8).to(torch.float8_e4m3fn),
    "a number": torch.tensor(2.5),
}
PLAN: dict[str, Any] = {
    "pieces": 1,
    "tensors": [{"name": "w", "dtype": "bfloat16", "shape": [2, 2]}],
    "unsent": [],
    "messages": [[{"piece": 0, "source": 0, "segments": [[0, 0, 2, 0, 4]]}]],
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_is_put_together_of_rectangles_of_its_bytes(kind: str) -> None:
    source = TENSORS[kind]
    target = torch.zeros_like(source)
    rows = len(source) if source.dim() else 1
    width = source.nbytes // rows
    half, side = rows // 2, width // 2
    parts = [(0, half, 0, side), (0, half, side, width - side), (half, rows - half, 0, width)]
    segments = [Segment(0, *part) for part in parts]

    def of(t: Tensor) -> Any:
        return lambda s: byte_rows(t)[s.row : s.row + s.rows, s.byte : s.byte + s.width]

    message = packed(segments, of(source))
    unpack(message, segments, of(target))
    assert message.nbytes == source.nbytes and target.view(-1).view(torch.uint8).equal(
        source.view(-1).view(torch.uint8)
    )


def test_a_hash_is_of_all_messages_in_their_order() -> None:
    def of(*messages: list[int]) -> str:
        found = MessageHash()
        for message in messages:
            found.add(torch.tensor(message, dtype=torch.uint8))
        return found.hex

    assert of([1, 2], [3]) == of([1, 2, 3]) != of([3], [1, 2])


@pytest.mark.parametrize(
    ("field", "value"),
    [("pieces", 0), ("tensors", []), ("messages", []), ("messages", [[{"piece": 0, "source": 0, "segments": [[0]]}]])],
)
def test_the_fields_of_a_plan_have_bounds(field: str, value: object) -> None:
    PlanSlices.from_json(PLAN)
    with refuses(ValueError, "/plan_weight_slices"):
        PlanSlices.from_json(PLAN | {field: value})


@pytest.mark.parametrize(("field", "value"), [("timeout_s", 0.0), ("rank_offset", 0), ("world_size", 1)])
def test_the_fields_of_a_join_of_slices_have_bounds(field: str, value: object) -> None:
    body = {"master_address": "127.0.0.1", "master_port": 20000, "rank_offset": 1, "world_size": 2}
    with refuses(ValueError, field, value):
        JoinSlices.from_json(body | {"group_name": "g", "timeout_s": 1.0, field: value})
