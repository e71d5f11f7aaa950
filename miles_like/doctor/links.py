"""Messages between two nodes by gloo and NCCL: one side of a pair, and which pairs are measured at once."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

SMALL, LARGE = 1 << 10, 8 << 20  # bytes
# limit of a connection and of each message. A side that waits for the other to connect ends after five times gloo's;
# NCCL loads its network plug-in first
LIMIT_S = {"gloo": 3.0, "nccl": 60.0}
STORE_S = 20.0  # limit for both sides to reach the store


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """Of one pair, as its first node measured it."""

    latency_s: float  # of an all-reduce of SMALL bytes
    bytes_per_s: float  # LARGE bytes over the time of their all-reduce


def tournament(number: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs that have every pair of `number` nodes once (the circle method)."""
    places: list[int | None] = [*range(number), *([None] if number % 2 else [])]
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        met = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def ring(number: int) -> list[list[tuple[int, int]]]:
    """Rounds of disjoint pairs in which each node meets the next one, and the last the first."""
    pairs = list(dict.fromkeys((min(k, n), max(k, n)) for k in range(number) if (n := (k + 1) % number) != k))
    rounds: list[list[tuple[int, int]]] = []
    for pair in pairs:
        free = next((r for r in rounds if not {n for met in r for n in met} & set(pair)), None)
        if free is None:
            rounds.append([pair])
        else:
            free.append(pair)
    return rounds


class Linker:
    """One node's side of its pairs. Imports torch once."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None

    def warm(self) -> None:
        """Import what `meet` needs, so that its limit is that of the messages."""
        import torch.distributed  # noqa: F401

    def listen(self, address: str) -> int:
        """Open the port on which the pair's store will be served, on `address` only; return its number."""
        family, *_, found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        if self._listener is not None:
            self._listener.close()
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.bind(found)
        self._listener.listen(8)
        return int(self._listener.getsockname()[1])

    def meet(self, backend: str, side: int, address: str, port: int) -> LinkTimes:
        """Exchange messages with the other side of the pair, over the store at `address`, which side 0 serves.

        The backend chooses its network as that of a rank does: by GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME of this
        process, gloo otherwise by the address of the host name. Raises RuntimeError where the sides do not connect or
        the sums are wrong.
        """
        import torch
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        limit = timedelta(seconds=LIMIT_S[backend])
        listener = None
        if side == 0:
            assert self._listener is not None, "listen comes first"
            listener, self._listener = self._listener.detach(), None
        store = TCPStore(
            address,
            port,
            world_size=2,
            is_master=side == 0,
            timeout=timedelta(seconds=STORE_S),
            master_listen_fd=listener,
        )
        group = _group(backend, PrefixStore(backend, store), side, limit)
        device = "cpu" if backend == "gloo" else "cuda:0"
        latency = self._time(torch, group, SMALL, device, repeats=20)
        large = self._time(torch, group, LARGE, device, repeats=3)
        store.set(f"done{side}", "1")
        store.wait([f"done{1 - side}"])  # the server must not end before the other side has read its last key
        return LinkTimes(latency_s=latency, bytes_per_s=LARGE / large)

    def _time(self, torch: Any, group: Any, nbytes: int, device: str, repeats: int) -> float:
        """Seconds of the fastest all-reduce of `nbytes` bytes."""
        best = float("inf")
        for _ in range(repeats):
            x = torch.ones(nbytes // 4, device=device)
            began = time.perf_counter()
            group.allreduce([x]).wait()
            total = float(x[-1])  # waits for the device too
            best = min(best, time.perf_counter() - began)
            if total != 2.0:
                raise RuntimeError(f"the sum of two ones is {total:g}: messages are corrupted")
        return best


def _group(backend: str, store: Any, side: int, limit: timedelta) -> Any:
    import torch.distributed

    dist: Any = torch.distributed
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, side, 2, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(store, side, 2, options)
