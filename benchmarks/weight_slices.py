"""A publication from shards to slices: two trainer ranks, each with half of the experts, to an embedded server of two
tensor-parallel ranks, over gloo. All four are processes of one thread.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from figures import ROOT

from rollout.config import PublishConfig
from rollout.publish.publication import PublishTarget
from rollout.wire import endpoints
from rollout.wire.flat import dtype_of
from rollout.wire.reshard.requests import LayoutReply

sys.path.insert(0, str(ROOT))  # servers and ranks as processes of this machine are the tests' ones
from tests.support.embedded_processes import server_processes
from tests.support.resharded import trainer_ranks
from tests.support.tiny_models import random_tensors, tiny_qwen, write_checkpoint

LIMIT_S = 600.0
VERSIONS = 4  # published; the first one makes the group and does not count


class Resharded(NamedTuple):
    rate: float  # bytes/s, of all ranks of the server together
    pause_s: float
    nbytes: int  # received by both
    of_slices: float  # the same as a share of the bytes of what they keep; of the rank where it is farthest from 1


def resharded(experts: int, hidden: int, width: int) -> Resharded:
    """Publications of a model with one layer of so many experts: medians."""
    hf = tiny_qwen(
        num_hidden_layers=1,
        hidden_size=hidden,
        intermediate_size=width,
        moe_intermediate_size=width,
        num_experts=experts,
    )
    with tempfile.TemporaryDirectory() as where:
        path = write_checkpoint(Path(where, "hf"), hf, random_tensors(hf))
        with trainer_ranks(hf, "ep") as trainer, server_processes(path, 1, "--tp-size", "2") as (server,):
            config = PublishConfig(path="reshard", verify=False)
            trainer.connect(
                PublishTarget(urls=(server.url,), kind="embedded", spec=None, config=config, timeout_s=LIMIT_S)
            )
            found = [trainer.publish(version, version) for version in range(1, VERSIONS + 1)]
            kept = kept_bytes(server.url)
    assert not any(one.error for one in found), found
    shares = [got / want for one in found for got, want in zip(one.received[0], kept, strict=True)]
    assert all(one.received[0] == kept for one in found), (kept, found)
    counted = found[1:]
    return Resharded(
        rate=statistics.median(one.bytes / one.seconds for one in counted),
        pause_s=statistics.median(one.pause_seconds for one in counted),
        nbytes=sum(kept),
        of_slices=max(shares, key=lambda share: abs(share - 1)),
    )


def kept_bytes(url: str) -> list[int]:
    """Of each rank of a server: bytes of the rows that it keeps of the stored tensors."""
    answer: Any = httpx.get(url + endpoints.WEIGHTS_LAYOUT, trust_env=False, timeout=60).json()
    layout = LayoutReply.from_json(answer, endpoints.WEIGHTS_LAYOUT)
    out = [0] * layout.ranks
    for held in layout.tensors:
        row = math.prod(held.shape[1:]) * dtype_of(held.dtype or "bfloat16").itemsize
        for rank, rows in enumerate(layout.rows[held.rows]):
            out[rank] += 0 if rows is None else (rows[1] - rows[0]) * row
    return out
