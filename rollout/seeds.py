"""Sampling seeds derived from the seed of a run."""

from __future__ import annotations

import hashlib


def seed_of(seed: int, prompt_id: str, index: int | None = None) -> int:
    """A sampling seed in [0, 2**31) from the run's seed, the prompt and, if given, the sample's index.

    It is a hash, so neighbouring prompts do not share random streams. It is the same in every process and run.
    """
    key = f"{seed}\0{prompt_id}" if index is None else f"{seed}\0{prompt_id}\0{index}"
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little") & 0x7FFFFFFF
