"""Reads files of another node through Ray, in checksummed blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
import xxhash
from ray.exceptions import RayError

from miles_like.nodes.members import living_nodes
from miles_like.nodes.waits import error_message, on_node

MOST = 64 << 20  # bytes of one answer, which is in the memory of both nodes
_ANSWER_S = 600.0  # time limit for one block


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """The files below `root` on the node with this address; picklable. A reader has one block in flight."""

    address: str
    root: Path

    def reader(self, name: str) -> Callable[[int, int], bytes]:
        """(offset, bytes) -> those bytes of a file, fewer at its end. Raises OSError naming the node when it is not in
        the cluster, does not answer, or cannot read the file."""
        return partial(self.pull, name)

    def pull(self, name: str, offset: int, size: int) -> bytes:
        """As the function that `reader` returns."""
        node = next((n.id for n in living_nodes() if n.address == self.address), None)
        if node is None:
            raise OSError(
                f"{self.root / name} is on node {self.address}, which is not in the Ray cluster: start Ray on it"
            )
        task: Any = ray.remote(num_cpus=0, max_retries=1)(_read)
        ref = task.options(scheduling_strategy=on_node(node)).remote(str(self.root / name), offset, min(size, MOST))
        try:
            data, digest = ray.get(ref, timeout=_ANSWER_S)
        except RayError as e:
            raise OSError(f"node {self.address} did not send {self.root / name}: {error_message(e)}") from None
        if xxhash.xxh3_128_hexdigest(data) != digest:
            raise OSError(
                f"bytes {offset}.. of {self.root / name} were corrupted on the way from node {self.address}: run again"
            )
        return bytes(data)


def _read(path: str, offset: int, size: int) -> tuple[bytes, str]:
    with open(path, "rb", buffering=0) as f:
        f.seek(offset)
        data = f.read(size)
    return data, xxhash.xxh3_128_hexdigest(data)


def own_address() -> str:
    """Address of the node on which this process runs, by which Ray knows it."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
