"""Rewards with planted faults, for runs of tests/support/local_run.py: the weight version of an answer says when."""

from __future__ import annotations

import time
from typing import Any

from tests.support.local_run import low_tokens

FROM = 4  # weight version of the first faulty answers
SLOW_AT, SLOW_S = 5, 4.5  # weight version of answers whose scores take so long


def version(sample: Any) -> int:
    return min(span.version for span in sample.versions) if sample.versions else 0


def breaking(prompt: Any, sample: Any) -> float:
    """From version FROM on all answers have the same high reward; those of version SLOW_AT are late."""
    if version(sample) == SLOW_AT and sample.index == 0:
        time.sleep(SLOW_S)
    return low_tokens(prompt, sample) / 2 if version(sample) < FROM else 0.9


def falling(prompt: Any, sample: Any) -> float:
    """Of an evaluation set: lower from version FROM on, for most prompts."""
    return low_tokens(prompt, sample) - (version(sample) >= FROM and not prompt.id.endswith("1"))
