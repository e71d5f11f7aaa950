"""Checks, before training starts, that trainer and rollout servers compute the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_same_bits(
    trainer: str | None, servers: Mapping[str, Mapping[str, Any]], *, tp_shards: tuple[int, int], dtype: str
) -> None:
    """trainer: the fingerprint of the trainer ranks (`quant.exact.selftest`). servers: URL -> reply of /server_info.
    tp_shards: numbers of tensor-parallel and expert-tensor-parallel trainer ranks. dtype: the trainer's parameter
    dtype. Raises ValueError naming a server with other shards, another dtype or another fingerprint."""
    for url, info in servers.items():
        sums, kept = info.get("exact_parts"), info.get("dtype")
        if sums is None or tuple(sums) != tp_shards or kept != dtype:
            raise ValueError(
                f"alignment.deterministic: {url} was started with --exact-parts {sums} --dtype {kept}, but the "
                f"trainer has parts {list(tp_shards)} and computes in {dtype}: start the server with the "
                "trainer's values, or set it to false"
            )
        theirs = info.get("exact_fingerprint")
        if trainer is None or theirs != trainer:
            raise ValueError(
                f"alignment.deterministic: the self-test returns {trainer} on the trainer but {theirs} on {url}, "
                "so their log-probabilities would differ: use the same kind of processor and the same version of "
                "torch for both, or set it to false"
            )
