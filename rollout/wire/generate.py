"""Requests and replies of SGLang 0.5.23's /generate as typed values. No I/O.

A key that a request lacks has SGLang's default. A key that a reply lacks raises a ValueError naming key and endpoint: a
missing log-prob or expert id must not go unnoticed into training.

Letters: P prompts in a request, G samples a prompt, R response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from miles_like.types import Finish, SamplingParams
from rollout.wire.bodies import NOT_SERVED, GenerateBody, SamplingBody, read
from rollout.wire.endpoints import GENERATE
from rollout.wire.replies import Json, an_object, need

MIN_TEMPERATURE = 1e-6  # below it SGLang samples greedily

_REPLY_BYTES = 32 << 10  # per reply, without its tokens
_TOKEN_BYTES = 256  # per token of a reply: id, text, log-prob
_OF_NO_TOKENS = {"prompt_tokens": 0, "completion_tokens": 0, "output_token_logprobs": [], "routed_experts": None}
_ROW_VERSIONS = "routed_experts_versions"  # an extension of this project, as the next key
_ROW_WEIGHTS = "routed_experts_weights"


class WireSpan(NamedTuple):
    """Response tokens [start, end) were sampled, or routing rows computed, under weight version `version`."""

    version: str
    start: int
    end: int


RowVersions = str | tuple[WireSpan, ...]  # of routing rows: one version for all rows, or spans of positions


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """`n` samples of each of P prompts. single: one prompt sent as a flat list (its reply for n = 1 is not a list)."""

    input_ids: tuple[tuple[int, ...], ...]  # [P][prompt tokens]
    sampling: tuple[SamplingParams, ...]  # [P]
    n: int = 1
    ignore_eos: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1  # -1: log-probs of the response only
    top_logprobs_num: int = 0  # number of likeliest tokens at each position to return log-probs of
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    return_routed_weights: bool = False  # also return gate weights; an extension
    return_layer_states: bool = False  # also return the residual stream at every layer; an extension
    sample_index: int = 0  # index of the first sample of each prompt; an extension, which stock servers ignore
    rid: tuple[str, ...] | None = None  # [P]
    single: bool = False

    def __post_init__(self) -> None:
        p = len(self.input_ids)
        if p == 0 or not all(self.input_ids):
            raise ValueError(f"{GENERATE}: input_ids is empty: send at least one token of at least one prompt")
        if len(self.sampling) != p:
            raise ValueError(f"{GENERATE}: {len(self.sampling)} sampling_params for {p} prompts")
        if self.rid is not None and len(set(self.rid)) != p:
            raise ValueError(f"{GENERATE}: {len(set(self.rid))} different rids for {p} prompts")
        if self.single and p != 1:
            raise ValueError(f"{GENERATE}: a request of {p} prompts is marked as a single one")
        if self.n < 1:
            raise ValueError(f"{GENERATE}: n = {self.n}, expected at least 1")
        if self.top_logprobs_num < 0:
            raise ValueError(f"{GENERATE}: top_logprobs_num = {self.top_logprobs_num}, expected at least 0")
        if self.sample_index < 0:
            raise ValueError(f"{GENERATE}: sample_index = {self.sample_index}, expected at least 0")
        for s in self.sampling:
            _check_sampling(s)

    @property
    def reply_ids(self) -> list[str]:
        """The ids of the replies, in order; requires `rid`. With n > 1 a stock server uses other ids."""
        assert self.rid is not None
        return [reply_id(rid, i, self.n) for rid in self.rid for i in range(self.n)]

    def to_json(self) -> Json:
        params = [_sampling_to_json(s, self.n, self.ignore_eos) for s in self.sampling]
        out: Json = {
            "input_ids": list(self.input_ids[0]) if self.single else [list(ids) for ids in self.input_ids],
            "sampling_params": params[0] if self.single else params,
            "return_logprob": self.return_logprob,
            "logprob_start_len": self.logprob_start_len,
            "return_routed_experts": self.return_routed_experts,
            "routed_experts_start_len": self.routed_experts_start_len,
        }
        if self.top_logprobs_num:
            out["top_logprobs_num"] = self.top_logprobs_num
        if self.return_routed_weights:
            out["return_routed_weights"] = True
        if self.return_layer_states:
            out["return_layer_states"] = True
        if self.sample_index:
            out["sample_index"] = self.sample_index
        if self.rid is not None:
            out["rid"] = self.rid[0] if self.single else list(self.rid)
        return out

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> GenerateRequest:
        """Read a request as SGLang does: unknown top-level keys are ignored. Raises ValueError for a field with a wrong
        type or out of bounds (`rollout/wire/bodies.py`), for an unknown key of `sampling_params`, and for a key that
        would change SGLang's reply and is not supported (docs/sampling.md)."""
        for key in NOT_SERVED:
            if body.get(key):
                raise ValueError(f"{GENERATE}: {key} is not supported: remove it")
        b = read(GenerateBody, body, GENERATE)
        if b.input_ids is None:
            raise ValueError(f"{GENERATE}: input_ids is missing: prompts are token ids here, not text")
        single = not isinstance(b.input_ids[0], list)
        prompts = cast(list[list[int]], [b.input_ids] if single else b.input_ids)
        given = b.sampling_params or SamplingBody()
        bodies = given if isinstance(given, list) else [given]
        extras = {(s.n or 1, bool(s.ignore_eos)) for s in bodies}
        if len(extras) != 1:
            raise ValueError(f"{GENERATE}: n and ignore_eos must be the same for every prompt of a request")
        n, ignore_eos = extras.pop()
        sampling = tuple(map(_sampling_of, bodies))
        return cls(
            input_ids=tuple(map(tuple, prompts)),
            sampling=sampling if isinstance(given, list) else sampling * len(prompts),
            n=n,
            ignore_eos=ignore_eos,
            return_logprob=bool(b.return_logprob),
            logprob_start_len=-1 if b.logprob_start_len is None else b.logprob_start_len,
            top_logprobs_num=b.top_logprobs_num or 0,
            return_routed_experts=bool(b.return_routed_experts),
            routed_experts_start_len=b.routed_experts_start_len or 0,
            return_routed_weights=bool(b.return_routed_weights),
            return_layer_states=bool(b.return_layer_states),
            sample_index=b.sample_index or 0,
            rid=None if b.rid is None else (b.rid,) if isinstance(b.rid, str) else tuple(b.rid),
            single=single,
        )


def _check_sampling(s: SamplingParams) -> None:
    if s.max_new_tokens < 0:
        raise ValueError(f"max_new_tokens = {s.max_new_tokens}, expected at least 0")
    if not (math.isfinite(s.temperature) and s.temperature >= 0):
        raise ValueError(f"temperature = {s.temperature}, expected a finite number of at least 0 (0 is greedy)")
    if not 0 < s.top_p <= 1:
        raise ValueError(f"top_p = {s.top_p}, expected 0 < top_p <= 1")
    if s.top_k < 1 and s.top_k != -1:
        raise ValueError(f"top_k = {s.top_k}, expected -1 (whole vocabulary) or at least 1")
    if not 0 <= s.min_p <= 1:
        raise ValueError(f"min_p = {s.min_p}, expected 0 <= min_p <= 1")


def _sampling_to_json(s: SamplingParams, n: int, ignore_eos: bool) -> Json:
    out: Json = {"max_new_tokens": s.max_new_tokens, "temperature": s.temperature, "top_p": s.top_p, "top_k": s.top_k}
    if s.min_p:
        out["min_p"] = s.min_p
    if s.stop_token_ids:
        out["stop_token_ids"] = list(s.stop_token_ids)
    if s.sampling_seed is not None:
        out["sampling_seed"] = s.sampling_seed
    if n != 1:
        out["n"] = n
    if ignore_eos:
        out["ignore_eos"] = True
    return out


def _sampling_of(s: SamplingBody) -> SamplingParams:
    temperature = 1.0 if s.temperature is None else float(s.temperature)
    return SamplingParams(
        max_new_tokens=s.max_new_tokens,
        # as in SGLang, greedy below 1e-6, where a division would overflow
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        top_p=1.0 if s.top_p is None else float(s.top_p),
        min_p=float(s.min_p or 0.0),
        top_k=-1 if s.top_k is None else s.top_k,
        stop_token_ids=tuple(s.stop_token_ids or ()),
        sampling_seed=s.sampling_seed,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerateReply:
    """One sample. Log-probs are natural logs of softmax(logits / temperature), before top-k and top-p."""

    rid: str
    output_ids: NDArray[np.int64]  # [R], including the stop token
    logprobs: NDArray[np.float32] | None  # [R]; None: not requested
    finish: Finish
    prompt_tokens: int
    weight_version: str  # at the end of the sample
    weight_versions: tuple[WireSpan, ...]  # cover [0, R) without gaps
    matched: int | None = None  # the stop token
    text: str | None = None  # None: a server without a tokenizer
    routed_experts: str | memoryview | None = None  # RoutingTrace.from_wire reads it
    row_versions: RowVersions | None = None  # of `routed_experts`; None: a stock server
    routed_weights: str | None = None  # base64 of fp32 [rows, all layers, K]: gate weights of `routed_experts`
    cached_tokens: int = 0
    num_retractions: int = 0  # times its keys, values and routes were discarded and recomputed
    abort_message: str = ""

    def to_json(self) -> Json:
        ids = self.output_ids.tolist()
        reason: Json = {"type": self.finish.value}
        if self.finish is Finish.STOP:
            reason["matched"] = self.matched
        elif self.finish is Finish.LENGTH:
            reason["length"] = len(ids)
        else:
            reason |= {"message": self.abort_message, "status_code": None, "err_type": None}
        meta: Json = {
            "id": self.rid,
            "finish_reason": reason,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(ids),
            "cached_tokens": self.cached_tokens,
            "num_retractions": self.num_retractions,
            "weight_version": self.weight_version,
            "weight_versions": [s._asdict() for s in self.weight_versions],
        }
        if self.logprobs is not None:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [(p, t, None) for p, t in zip(self.logprobs.tolist(), ids, strict=True)]
            meta["output_token_logprobs_length"] = len(ids)
        if self.routed_experts is not None:
            meta["routed_experts"] = self.routed_experts
        if self.row_versions is not None:
            rows = self.row_versions
            meta[_ROW_VERSIONS] = rows if isinstance(rows, str) else [s._asdict() for s in rows]
        if self.routed_weights is not None:
            meta[_ROW_WEIGHTS] = self.routed_weights
        out: Json = {"output_ids": ids, "meta_info": meta}
        return out if self.text is None else {"text": self.text} | out

    @classmethod
    def from_json(cls, body: object, *, want_logprobs: bool = False) -> GenerateReply:
        """Raises ValueError naming a missing key, and for values that contradict each other.

        A stock server that aborts a request in its queue does not count its prompt. Tokens that such a request has from
        before a retraction come without routes: the reply is read as one without tokens.
        """
        top = an_object(body, GENERATE)
        meta = an_object(need(top, "meta_info", GENERATE), GENERATE)
        reason = an_object(need(meta, "finish_reason", GENERATE), GENERATE)
        kind = need(reason, "type", GENERATE)
        if kind not in set(Finish):
            raise ValueError(f"{GENERATE}: finish_reason {kind!r} is not one of {', '.join(Finish)}")
        if Finish(kind) is Finish.ABORT and "prompt_tokens" not in meta:
            top, meta = {"output_ids": []}, {**meta, **_OF_NO_TOKENS}
        ids = np.asarray(need(top, "output_ids", GENERATE), dtype=np.int64)
        r, matched = len(ids), reason.get("matched")
        if need(meta, "completion_tokens", GENERATE) != r:
            raise ValueError(f"{GENERATE}: {r} output_ids, but completion_tokens = {meta['completion_tokens']}")
        logprobs = None
        if "output_token_logprobs" in meta or (want_logprobs and r):
            logprobs = read_logprobs(need(meta, "output_token_logprobs", GENERATE), ids)
        elif want_logprobs:
            logprobs = np.zeros(0, np.float32)
        version = str(need(meta, "weight_version", GENERATE))
        routed, rows = meta.get("routed_experts"), meta.get(_ROW_VERSIONS)
        return cls(
            rid=str(need(meta, "id", GENERATE)),
            output_ids=ids,
            logprobs=logprobs,
            finish=Finish(kind),
            prompt_tokens=int(need(meta, "prompt_tokens", GENERATE)),
            weight_version=version,
            weight_versions=read_spans(need(meta, "weight_versions", GENERATE) if r else [], r),
            matched=matched if isinstance(matched, int) else None,
            text=top.get("text"),
            routed_experts=routed,
            row_versions=rows if rows is None or isinstance(rows, str) else _wire_spans(rows),
            routed_weights=meta.get(_ROW_WEIGHTS),
            cached_tokens=int(meta.get("cached_tokens") or 0),
            num_retractions=int(
                meta.get("num_retractions", 0) if routed is None else need(meta, "num_retractions", GENERATE)
            ),
            abort_message=str(reason.get("message") or ""),
        )


def reply_id(rid: str, index: int, n: int) -> str:
    """`meta_info.id` of sample `index` of the `n` samples of a prompt."""
    return rid if n == 1 else f"{rid}_{index}"


def check_ids(body: object, ids: Sequence[str]) -> None:
    """Raises ValueError if the ids of the replies in `body` are not `ids`. Only the id distinguishes a reply from one
    to another prompt of the same length."""
    rows = body if isinstance(body, list) else [body]
    for i, (row, want) in enumerate(zip(rows, ids, strict=False)):  # replies_from_json checks the count
        meta = an_object(need(an_object(row, GENERATE), "meta_info", GENERATE), GENERATE)
        if (got := need(meta, "id", GENERATE)) != want:
            what = (
                f"has the id of reply {ids.index(got)}"
                if got in ids
                else f"has id {got!r}, which this request did not send"
            )
            raise ValueError(
                f"{GENERATE}: reply {i} of {len(rows)} {what}: the server, or a proxy in front of it, duplicates "
                "replies, or changes the order or the rid of requests"
            )


def replies_from_json(body: object, *, want: int, want_logprobs: bool) -> list[GenerateReply]:
    """The `want` samples of a reply: an object, or a flat list with the samples of a prompt in a row. Raises ValueError
    for another number of samples."""
    rows = body if isinstance(body, list) else [body]
    if len(rows) != want:
        raise ValueError(f"{GENERATE}: the reply has {len(rows)} samples, but {want} were requested")
    return [GenerateReply.from_json(r, want_logprobs=want_logprobs) for r in rows]


def check_prompts(request: GenerateRequest, vocabulary: int) -> None:
    """Raises ValueError for a prompt with a token outside the vocabulary, by which a stock server ends."""
    for i, ids in enumerate(request.input_ids):
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"prompt {i} of {len(request.input_ids)} has token {low if low < 0 else high}, but the model's "
                f"tokens are 0 to {vocabulary - 1}: use this model's tokenizer, and an environment that uses it"
            )


def check_tokens(replies: Sequence[GenerateReply], request: GenerateRequest, vocabulary: int | None) -> None:
    """Raises ValueError for a reply with more tokens than requested, or with a token outside the vocabulary, which a
    tensor-parallel embedding would silently map to zeros."""
    for i, reply in enumerate(replies):
        asked, got = request.sampling[i // request.n].max_new_tokens, len(reply.output_ids)
        if got > asked:
            raise ValueError(f"{GENERATE}: reply {i} has {got} tokens, but {asked} were requested")
        if not got:
            continue
        low, high = int(reply.output_ids.min()), int(reply.output_ids.max())
        if low < 0 or (vocabulary is not None and high >= vocabulary):
            size = "0 and more" if vocabulary is None else f"0 to {vocabulary - 1}"
            raise ValueError(
                f"{GENERATE}: reply {i} has token {low if low < 0 else high}, but the model's tokens are {size}: "
                "check that the server serves this model"
            )


def reply_bytes(request: GenerateRequest, routes_per_token: int) -> int:
    """Upper bound on the size of the reply to a request."""
    total = 0
    for ids, sampling in zip(request.input_ids, request.sampling, strict=True):
        scored = len(ids) * (1 + request.top_logprobs_num) if request.logprob_start_len >= 0 else 0
        positions = len(ids) + sampling.max_new_tokens
        one = _REPLY_BYTES + _TOKEN_BYTES * (sampling.max_new_tokens + scored)
        total += request.n * (one + positions * routes_per_token * 8)  # base64 of 4 bytes, with a margin
    return 2 * total


def read_logprobs(rows: Sequence[Sequence[Any]], ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Log-probs [R] of rows (log-prob, token, text) for the tokens `ids` [R]. Raises ValueError for rows of other
    tokens and for a log-prob that is not finite."""
    out = np.fromiter(map(itemgetter(0), rows), dtype=np.float32, count=len(rows))
    of = np.fromiter(map(itemgetter(1), rows), dtype=np.int64, count=len(rows))
    if not np.array_equal(of, ids):
        raise ValueError(f"{GENERATE}: the {len(of)} log-probs do not belong to the {len(ids)} tokens of the text")
    if not np.isfinite(out).all():
        raise ValueError(f"{GENERATE}: a log-prob of token {int(of[~np.isfinite(out)][0])} is not finite")
    return out


def _wire_spans(rows: Sequence[Mapping[str, Any]]) -> tuple[WireSpan, ...]:
    return tuple(WireSpan(str(s["version"]), int(s["start"]), int(s["end"])) for s in rows)


def read_spans(rows: Sequence[Mapping[str, Any]], r: int) -> tuple[WireSpan, ...]:
    spans = _wire_spans(rows)
    edges = [0, *(s.end for s in spans)]
    if edges[-1] != r or any(s.start != e for s, e in zip(spans, edges, strict=False)):
        raise ValueError(f"{GENERATE}: weight_versions {list(spans)} do not cover {r} response tokens")
    return spans
