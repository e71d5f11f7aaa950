"""Whether trainer and rollout servers compute the same bits: asked before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_same_bits(trainer: str | None, servers: Mapping[str, Mapping[str, Any]]) -> None:
    """`trainer`: the fingerprint of its ranks (`quant.exact.selftest`); servers: URL -> /server_info. Raises ValueError
    naming a server that has another one, or none."""
    for url, told in servers.items():
        theirs = told.get("exact_fingerprint")
        if trainer is None or theirs != trainer:
            raise ValueError(
                f"alignment.deterministic: the self-test gives {trainer} on the trainer and {theirs} on {url}, so "
                "their log-probabilities would differ: run both on one kind of processor with one version of torch, or "
                "set it to false"
            )
