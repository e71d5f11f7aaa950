"""Which ports a stock server binds, that they lie where no outgoing connection takes them, and the message about one in
use. tests/sglang_cpu holds the numbers to SGLang's arithmetic."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest

from rollout.sglang import ports
from rollout.sglang.ports import BLOCK, Port, check_ports, ephemeral_range, first_port, free_blocks, free_port
from tests.support.refusals import refuses

LINUX = (32768, 60999)


@pytest.mark.parametrize(
    ("default", "count", "ranges", "first"),
    [
        (30000, 4, [LINUX], 30000),
        (30000, 4, [LINUX, (30002, 40000)], 29998),  # one node's range begins among them
        (30000, 4, [(15000, 60999)], 14996),
        (20000, 256, [(1024, 50000)], 50001),  # none below
        (62000, 4, [LINUX], 62000),
    ],
)
def test_default_ports_lie_outside_of_every_node_s_ephemeral_range(
    default: int, count: int, ranges: Sequence[tuple[int, int]], first: int
) -> None:
    assert first_port(default, count, ranges) == first


def test_no_room_for_ports_is_an_error() -> None:
    with refuses(ValueError, 1024, 65535, 64, "rollout.port", "rollout.sglang.dist_init_port"):
        first_port(20000, 64, [(1024, 65535)])


def test_free_ports_lie_below_the_ephemeral_range(monkeypatch: pytest.MonkeyPatch) -> None:
    low, high = ephemeral_range()
    assert 0 < low < high < 1 << 16
    monkeypatch.setattr(ports, "ephemeral_range", lambda: LINUX)
    assert all(15000 <= free_port() < LINUX[0] for _ in range(20))
    assert len({free_blocks(2) for _ in range(20)}) > 5
    assert all(20000 <= free_blocks(2) <= LINUX[0] - 2 * BLOCK for _ in range(20))
    monkeypatch.setattr(ports, "ephemeral_range", lambda: (1024, 65000))
    assert free_port() > 0


@pytest.mark.parametrize(
    ("dist_init", "attention_dp", "nnodes", "numbers"),
    [
        (None, False, 1, [30001]),
        (None, True, 1, [30001, *range(30234, 30241)]),
        (20064, False, 1, [30001, 20064]),
        (20064, False, 2, [30001, 20064]),
        (20064, True, 1, [30001, *range(20064, 20071)]),
        (20064, True, 4, [30001, *range(20064, 20071), 20077]),
    ],
)
def test_ports_of_a_stock_server(dist_init: int | None, attention_dp: bool, nnodes: int, numbers: list[int]) -> None:
    found = ports.stock_ports(30001, dist_init, attention_dp=attention_dp, nnodes=nnodes)
    assert [port.number for port in found] == numbers
    assert {port.key for port in found[1:]} <= {"rollout.sglang.dist_init_port" if dist_init else "rollout.port"}
    assert max(numbers) - min(numbers[1:] or numbers) < BLOCK or dist_init


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_port_in_use_is_named_with_its_server_and_node(host: str) -> None:
    """On whichever address another program listens."""
    first = free_blocks(1)
    block = [Port(first + i, "attention data parallelism", "rollout.sglang.dist_init_port") for i in range(7)]
    check_ports(block, "10.0.0.1", "rollout server 3")
    with socket.create_server((host, first + 5)):
        facts = ("rollout server 3", first + 5, socket.gethostname(), "10.0.0.1", "rollout.sglang.dist_init_port")
        with refuses(ValueError, *facts, unrecorded="a free port"):
            check_ports(block, "10.0.0.1", "rollout server 3")
