"""A server joins the group of the client that asks, receives what fits it, and connects to no other host.

What it receives: tests/rollout/publish/test_weights_by_group.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from rollout.embedded.updates import groups
from rollout.embedded.updates.groups import UpdateGroups
from rollout.wire.control import DestroyGroup, InitGroup, UpdateFromDistributed
from tests.support.refusals import refuses
from tests.support.spawn import free_port

MOST = 1 << 20


def init(**changes: Any) -> InitGroup:
    body = {"master_address": "127.0.0.1", "master_port": 20000, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    return InitGroup.from_json(body | changes)


@pytest.mark.parametrize(
    ("address", "client"),
    [("192.168.77.9", "127.0.0.1"), ("192.168.77.9", "192.168.77.8"), ("localhost", "127.0.0.1"), ("::1", "")],
)
def test_the_store_of_a_group_is_where_its_client_is(address: str, client: str) -> None:
    with refuses(ValueError, "master_address", repr(address)):
        UpdateGroups().join(init(master_address=address), client)


def test_a_group_of_gpus_is_not_joined() -> None:
    with refuses(ValueError, "backend", "'nccl'", "'gloo'"):
        UpdateGroups().join(init(backend="nccl"), "127.0.0.1")


@pytest.mark.parametrize(
    ("field", "value"),
    [("master_port", 0), ("rank_offset", 0), ("world_size", 1), ("backend", "mpi"), ("group_name", "")],
)
def test_the_fields_of_a_join_have_bounds(field: str, value: object) -> None:
    with refuses(ValueError, field, repr(value) if isinstance(value, str) else value):
        init(**{field: value})


def test_a_store_that_is_not_there_ends_the_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next request is served."""
    monkeypatch.setattr(groups, "_CONNECT_S", 0.2)
    member, port = UpdateGroups(), free_port()
    for _ in range(2):
        with refuses(ValueError, port, unrecorded="torch's words"):
            member.join(init(master_port=port), "127.0.0.1")


def test_a_broadcast_is_received_by_members_and_within_bounds() -> None:
    def body(**changes: Any) -> UpdateFromDistributed:
        whole = {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[4, 4]], "load_format": "flattened_bucket"}
        return UpdateFromDistributed.from_json(whole | {"group_name": "g"} | changes)

    member = UpdateGroups()
    with refuses(ValueError, "'g'"):
        member.receive(body(), MOST)
    with refuses(ValueError, "load_format", "flattened_bucket"):
        member.receive(body(load_format=None), MOST)
    with refuses(ValueError, 1, 2, "dtypes"):
        member.receive(body(dtypes=["bfloat16", "uint8"]), MOST)
    with refuses(ValueError, "'complex64'"):
        member.receive(body(dtypes=["complex64"]), MOST)
    with refuses(ValueError, f"{MOST:,}", f"{2 * MOST * 4:,}", "--bucket-bytes"):
        member.receive(body(shapes=[[MOST, 4]]), MOST)
    with refuses(ValueError):
        member.leave(DestroyGroup(group_name="g"))
