"""python -m miles_like.nodes.joined ADDRESS NODES SECONDS: wait until so many nodes are in a Ray cluster.

Scripts of `miles-like launch` run it before the run, so that a node which does not come is a sentence with its own
limit. A head that does not answer is asked again until then: on a busy machine it may end while it starts, and is then
started again. Status 0 when all are there, 1 after the limit.
"""

from __future__ import annotations

import sys
import time

from miles_like.nodes.members import living_nodes
from miles_like.nodes.session import NoClusterError, start_ray, stop_ray

_LOOK_EVERY_S = 1.0


def wait_until_joined(count: int, timeout_s: float) -> str | None:
    """One sentence on the nodes that are there when the limit passes; None when `count` are. For a process that has
    joined the cluster."""
    until = time.monotonic() + timeout_s
    while len(found := living_nodes()) < count:
        if time.monotonic() >= until:
            there = ", ".join(f"{node.host} ({node.address})" for node in found)
            return f"{len(found)} of {count} nodes are in the Ray cluster after {timeout_s:g} s: {there}"
        time.sleep(_LOOK_EVERY_S)
    return None


def join(address: str, until: float) -> None:
    """As `start_ray`, whose NoClusterError is raised at `until` by the monotonic clock."""
    while True:
        try:
            return start_ray(address)
        except NoClusterError:
            if time.monotonic() >= until:
                raise
            stop_ray()
            time.sleep(_LOOK_EVERY_S)


def main(address: str, count: int, timeout_s: float) -> int:
    try:
        join(address, time.monotonic() + timeout_s)
        missing = wait_until_joined(count, timeout_s)
    except (ValueError, RuntimeError) as e:
        missing = str(e)
    finally:
        stop_ray()
    print(f"miles-like: {missing}" if missing else f"miles-like: {count} nodes are in the Ray cluster", flush=True)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
