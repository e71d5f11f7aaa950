"""Log-probabilities of prompt tokens in a reply to /generate, which scores a given text.

In SGLang 0.5.23, `input_token_logprobs` has an entry [log-prob, token, text] for each prompt token from
`logprob_start_len` on. The first log-prob is null, because that token has no predecessor in the range.
`input_top_logprobs` has a list of such entries for each of these positions, the likeliest tokens in descending order,
and null for the first. Both are computed from the raw logits: a prompt is scored at temperature 1, whatever the
request's temperature is.

Letters: S prompt tokens, A index of the first one whose log-prob is requested, C candidates per position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout.wire.endpoints import GENERATE
from rollout.wire.generate import read_logprobs
from rollout.wire.replies import Json, an_object, need


class PromptTop(NamedTuple):
    """The likeliest tokens at each position, in descending order."""

    ids: NDArray[np.int64]  # [S-1-A, C]
    logprobs: NDArray[np.float32]  # [S-1-A, C]

    @classmethod
    def empty(cls, top: int) -> PromptTop:
        return cls(np.zeros((0, top), np.int64), np.zeros((0, top), np.float32))

    @classmethod
    def joined(cls, parts: Sequence[PromptTop]) -> PromptTop | None:
        """The concatenation over the chunks of a prefill; None without chunks."""
        return cls(*map(np.concatenate, zip(*parts, strict=True))) if parts else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptScores:
    """Scores of the S-1-A prompt tokens A+1 .. S-1."""

    logprobs: NDArray[np.float32]  # [S-1-A] natural log, of raw logits
    top: PromptTop | None  # None: not requested
    routed_experts: str | memoryview | None  # RoutingTrace.from_wire reads it


def prompt_entries(logprobs: Sequence[float], tokens: Sequence[int], top: PromptTop | None) -> Json:
    """The keys of `meta_info` for the prompt tokens A..S-1; `logprobs` lacks that of token A. With A = S the lists are
    empty, as in SGLang if `logprob_start_len` is the prompt's length."""
    first = [None] if len(tokens) else []
    own = [(p, t, None) for p, t in zip([*first, *logprobs], tokens, strict=True)]
    if top is None:
        return {"input_token_logprobs": own}
    rows = zip(top.logprobs.tolist(), top.ids.tolist(), strict=True)
    likeliest = [*first, *([(p, t, None) for p, t in zip(*row, strict=True)] for row in rows)]
    return {"input_token_logprobs": own, "input_top_logprobs": likeliest, "output_top_logprobs": []}


def prompt_scores(body: object, tokens: NDArray[np.int64], *, start: int = 0, top: int = 0) -> PromptScores:
    """The scores in the reply to a prompt of `tokens` [S] sent with `logprob_start_len` = `start` and
    `top_logprobs_num` = `top`. Raises ValueError if they are missing or of other tokens, or have fewer candidates."""
    meta = an_object(need(an_object(body, GENERATE), "meta_info", GENERATE), GENERATE)
    rows, tokens = need(meta, "input_token_logprobs", GENERATE), tokens[start:]
    if len(rows) != len(tokens):
        raise ValueError(f"{GENERATE}: input_token_logprobs has {len(rows)} tokens, but {len(tokens)} were requested")
    # stock SGLang reports token 0 for the vocabulary's last token, as it does for an image; the log-prob is right
    reported = tokens[1:].copy()
    reported[[i for i, row in enumerate(rows[1:]) if row[1] == 0]] = 0
    return PromptScores(
        logprobs=read_logprobs(rows[1:], reported),
        top=_top(need(meta, "input_top_logprobs", GENERATE), len(rows), top) if top else None,
        routed_experts=meta.get("routed_experts"),
    )


def _top(rows: Sequence[Any], places: int, top: int) -> PromptTop:
    if len(rows) != places or any(row is None or len(row) != top for row in rows[1:]):
        counts = sorted({0 if row is None else len(row) for row in rows[1:]})
        raise ValueError(
            f"{GENERATE}: input_top_logprobs has {len(rows)} positions of {counts} candidates, expected {places} "
            f"of {top}: lower distillation.top_k if it exceeds the server's vocabulary"
        )
    shape = (places - 1, top)
    ids = np.array([[entry[1] for entry in row] for row in rows[1:]], np.int64).reshape(shape)
    values = np.array([[entry[0] for entry in row] for row in rows[1:]], np.float32).reshape(shape)
    if not np.isfinite(values).all():
        raise ValueError(f"{GENERATE}: a log-prob among the {top} most likely tokens of a position is not finite")
    return PromptTop(ids, values)
