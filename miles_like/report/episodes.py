"""What the episodes of a step have cost: turns, tool calls, tokens of the policy and of others, seconds.

Letters: G samples a prompt.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from miles_like.types import ENVIRONMENT, SampleGroup, Span

_CALL, _RESULT = "tool_call", "tool_result"  # Span.what
_NO_ERROR = ("", "ok")  # Span.status


def episode_metrics(groups: Sequence[SampleGroup]) -> dict[str, float]:
    """`rollout/turns/...`, `rollout/tokens/...`, `rollout/tool/...` of episodes whose spans have tool calls, and
    `rollout/environment_s/...` where spans have seconds."""
    samples, rows = [s for g in groups for s in g.samples], [of for g in groups for of in g.rows]
    after = sum(max((v.end for v in s.versions), default=0) for s in samples)  # the first loss token and those after it
    sampled = sum(s.response_len for s in samples)
    turns, spans = [sum(s.turns for s in of) for of in rows], [span for s in samples for span in s.spans]
    return {
        **({"rollout/rows/mean": len(samples) / len(rows)} if len(samples) > len(rows) else {}),
        "rollout/turns/mean": statistics.fmean(turns),
        "rollout/turns/max": float(max(turns)),
        "rollout/tokens/policy": float(sampled),
        "rollout/tokens/environment": float(after - sampled),
        **_tools(spans),
        **_seconds(spans),
    }


def _tools(spans: Sequence[Span]) -> dict[str, float]:
    calls = sum(s.what == _CALL for s in spans)
    errors = sum(s.what in (_CALL, _RESULT) and s.status not in _NO_ERROR for s in spans)
    return {"rollout/tool/calls": float(calls), "rollout/tool/errors": float(errors)} if calls else {}


def _seconds(spans: Sequence[Span]) -> dict[str, float]:
    """p99 by the nearest rank, so that it is one of the measured times."""
    turns = [s for s in spans if s.what == "turn"]
    waits, all_s = [s.seconds for s in turns if s.who == ENVIRONMENT], sum(s.seconds for s in turns)
    if not (waits and all_s):
        return {}
    return {
        "rollout/environment_s/mean": statistics.fmean(waits),
        "rollout/environment_s/p99": float(np.quantile(waits, 0.99, method="inverted_cdf")),
        "rollout/environment_s/share": sum(waits) / all_s,
    }
