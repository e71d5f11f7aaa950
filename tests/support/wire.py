"""A cable of tests/support/switch.py that is long or bad: it passes frames on late, or not at all.

python wire.py NEAR FAR [NEAR FAR ...], names of network interfaces: what arrives at one of a pair leaves by the other.
Each line of stdin is a JSON object with the keys of `Quality`, which hold for the frames that arrive after it, and is
answered by a line; the program ends with its stdin. Standard library alone: it starts in 30 ms.

The kernel's netem does the same, where the kernel has it. With PACKET_VNET_HDR a frame comes with the kernel's note on
it: that its checksum is left to the network card, or that the card will cut it into packets. So nothing has to be
switched off at either end, and 500 MB/s pass; but what is lost at once may be 64 KiB of a connection.
"""

from __future__ import annotations

import contextlib
import json
import random
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TypedDict

_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23  # linux/if_packet.h
_ETH_P_ALL = 3
_LARGEST = 1 << 17  # bytes of a frame with its note
_BUFFER = 16 << 20  # bytes that wait in the kernel for this process


class Quality(TypedDict):
    """In each direction."""

    delay_s: float
    loss: float  # share of the frames, drawn independently
    seed: int


def main(names: Sequence[str]) -> None:
    ends = [_opened(name) for name in names]
    leaves = {end: ends[i ^ 1] for i, end in enumerate(ends)}
    late: deque[tuple[float, socket.socket, bytes]] = deque()  # in the order of their time, as long as the delay is one
    quality, drawn = Quality(delay_s=0.0, loss=0.0, seed=0), random.Random(0)
    print("up", flush=True)
    while True:
        wait = max(0.0, late[0][0] - time.monotonic()) if late else None
        ready, _, _ = select.select([sys.stdin, *ends], [], [], wait)
        if sys.stdin in ready:
            if not (line := sys.stdin.readline()):
                return
            quality = json.loads(line)
            drawn = random.Random(quality["seed"])
            print("ok", flush=True)
        for end in ends:
            if end in ready:
                due = time.monotonic() + quality["delay_s"]
                late.extend((due, leaves[end], frame) for frame in _frames(end) if drawn.random() >= quality["loss"])
        while late and late[0][0] <= time.monotonic():
            _, end, frame = late.popleft()
            with contextlib.suppress(OSError):  # the interface is down, or its queue is full: the frame is lost
                end.send(frame)


def _opened(name: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    end.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    end.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    end.bind((name, _ETH_P_ALL))
    end.setblocking(False)
    return end


def _frames(end: socket.socket) -> list[bytes]:
    """What has arrived."""
    found = []
    with contextlib.suppress(OSError):  # nothing more, or the interface has gone down
        while True:
            found.append(end.recv(_LARGEST))
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
