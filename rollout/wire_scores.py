"""What a reply to /generate says of the prompt itself: a text that was sent to be scored, not to be gone on with.

SGLang 0.5.23's form: `input_token_logprobs` has an entry [log-prob, token, text] for each prompt token from
`logprob_start_len` on, and the first is null, since nothing before it was looked at; `input_top_logprobs` has for each
of these places a list of such entries, the likeliest tokens there, best first, and null for the first. Both are of the
raw logits: a prompt is scored at temperature 1, whatever temperature the request names.

Letters: S prompt tokens, A the first of them whose log-prob is asked for, C candidates a place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout.wire import GENERATE, Json, an_object, need, read_logprobs


class PromptTop(NamedTuple):
    """The likeliest tokens at each place, best first."""

    ids: NDArray[np.int64]  # [S-1-A, C]
    logprobs: NDArray[np.float32]  # [S-1-A, C]

    @classmethod
    def nowhere(cls, top: int) -> PromptTop:
        return cls(np.zeros((0, top), np.int64), np.zeros((0, top), np.float32))

    @classmethod
    def joined(cls, parts: Sequence[PromptTop]) -> PromptTop | None:
        """Of a prompt that was fed in pieces; None: of none."""
        return cls(*map(np.concatenate, zip(*parts, strict=True))) if parts else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptScores:
    """Of tokens A+1 .. S-1 of a prompt, whose number is S-1-A."""

    logprobs: NDArray[np.float32]  # [S-1-A] natural, of raw logits
    top: PromptTop | None  # None: not asked for
    routed_experts: str | None  # RoutingTrace.from_wire reads it


def prompt_entries(logprobs: Sequence[float], tokens: Sequence[int], top: PromptTop | None) -> Json:
    """What `meta_info` holds of the prompt tokens A..S-1: `logprobs` of all but the first. A = S: no entries, as SGLang
    answers `logprob_start_len` = the prompt's length."""
    first = [None] if len(tokens) else []
    own = [(p, t, None) for p, t in zip([*first, *logprobs], tokens, strict=True)]
    if top is None:
        return {"input_token_logprobs": own}
    rows = zip(top.logprobs.tolist(), top.ids.tolist(), strict=True)
    likeliest = [*first, *([(p, t, None) for p, t in zip(*row, strict=True)] for row in rows)]
    return {"input_token_logprobs": own, "input_top_logprobs": likeliest, "output_top_logprobs": []}


def prompt_scores(body: object, tokens: NDArray[np.int64], *, start: int = 0, top: int = 0) -> PromptScores:
    """Of one reply to a prompt of `tokens` [S] that was only scored, with `logprob_start_len` = `start` and
    `top_logprobs_num` = `top`. Raises ValueError for a reply without them, of other tokens, or of fewer candidates."""
    meta = an_object(need(an_object(body, GENERATE), "meta_info", GENERATE), GENERATE)
    rows, tokens = need(meta, "input_token_logprobs", GENERATE), tokens[start:]
    if len(rows) != len(tokens):
        raise ValueError(
            f"{GENERATE}: input_token_logprobs of {len(rows)} tokens for {len(tokens)} that were asked for"
        )
    # stock SGLang names the vocabulary's last token 0 here, as if it stood for an image; its log-probability is right
    named = tokens[1:].copy()
    named[[i for i, row in enumerate(rows[1:]) if row[1] == 0]] = 0
    return PromptScores(
        logprobs=read_logprobs(rows[1:], named),
        top=_top(need(meta, "input_top_logprobs", GENERATE), len(rows), top) if top else None,
        routed_experts=meta.get("routed_experts"),
    )


def _top(rows: Sequence[Any], places: int, top: int) -> PromptTop:
    if len(rows) != places or any(row is None or len(row) != top for row in rows[1:]):
        counts = sorted({0 if row is None else len(row) for row in rows[1:]})
        raise ValueError(
            f"{GENERATE}: input_top_logprobs has {len(rows)} places of {counts} candidates, want {places} of {top}: "
            "is top_k above the server's vocabulary?"
        )
    shape = (places - 1, top)
    ids = np.array([[entry[1] for entry in row] for row in rows[1:]], np.int64).reshape(shape)
    values = np.array([[entry[0] for entry in row] for row in rows[1:]], np.float32).reshape(shape)
    if not np.isfinite(values).all():
        raise ValueError(f"{GENERATE}: a log-prob among the {top} likeliest of a place is not finite")
    return PromptTop(ids, values)
