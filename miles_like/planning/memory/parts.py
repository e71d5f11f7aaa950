"""Bytes of one GPU by phase of a run and by part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

Part = Literal[
    "parameters",
    "gradients",
    "masters",
    "moments",
    "rounded weights",
    "activations",
    "logits",
    "communication",
    "engine weights",
    "KV cache",
    "engine runtime",
    "CUDA context",
    "NCCL",
    "DeepEP",
    "fragmentation",
]
Phase = Literal["building", "training", "asleep", "publishing", "generating"]
PARTS: tuple[Part, ...] = get_args(Part)
PHASES: tuple[Phase, ...] = get_args(Phase)
Bytes = Mapping[Part, int]

GIB = 1 << 30
MIB = 1 << 20


def added(*several: Bytes) -> dict[Part, int]:
    """The sum by part, in the order of `PARTS`; parts of 0 bytes are left out."""
    return {part: n for part in PARTS if (n := sum(of.get(part, 0) for of in several))}


def total(parts: Bytes) -> int:
    return sum(parts.values())


def largest(several: Iterable[Bytes]) -> Bytes:
    """The entry with the largest sum of bytes; an empty one for no entries."""
    return max(several, key=total, default={})


def gib(nbytes: float) -> str:
    """`113.7`: GiB for people."""
    return f"{nbytes / GIB:,.1f}"
