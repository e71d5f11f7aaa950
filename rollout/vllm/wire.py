"""Requests and replies of vLLM 0.32's /inference/v1/generate, to and from the values that all engines share. No I/O.

A request holds one prompt. Every sampling parameter is sent: a field that is missing has a default of vLLM's, such as
16 tokens. A key that a reply lacks raises a ValueError naming key and endpoint; this endpoint has changed between
versions of vLLM.

Letters: S prompt tokens, A index of the first one whose log-prob is requested, C candidates per position, R response
tokens.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pybase64
from numpy.typing import NDArray

from miles_like.types import Finish
from rollout.wire.generate import GenerateReply, GenerateRequest, read_logprobs, read_spans
from rollout.wire.replies import Json, an_object, need
from rollout.wire.scores import PromptScores, PromptTop
from rollout.wire.vllm_endpoints import GENERATE

_CLAMPED = -9999.0  # vLLM sends it in place of -inf and nan, which JSON does not have
_REPLY_ID = "generate-tokens-"  # what vLLM puts before the id of a request
_FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}


def generate_body(request: GenerateRequest) -> Json:
    """The request to sample the one prompt of `request`, or with `logprob_start_len` >= 0 to score it. vLLM does not
    sample no token: a request to score samples one, which is not read."""
    (ids,), (s,) = request.input_ids, request.sampling
    scores = request.logprob_start_len >= 0
    params: Json = {
        "n": request.n,
        "max_tokens": max(1, s.max_new_tokens),
        "temperature": s.temperature,
        "top_p": s.top_p,
        "top_k": s.top_k,
        "min_p": s.min_p,
        "seed": s.sampling_seed,
        "stop_token_ids": list(s.stop_token_ids),
        "ignore_eos": request.ignore_eos,
        "detokenize": False,
        "logprobs": 0,  # of the sampled token alone
    }
    if scores:
        params["prompt_logprobs"] = request.top_logprobs_num
    if request.return_routed_experts:
        params["routed_experts_prompt_start"] = request.routed_experts_start_len
    assert request.rid is not None, "an id distinguishes the reply to another request of the same length"
    return {"request_id": request.rid[0], "token_ids": list(ids), "sampling_params": params}


def sampled_replies(body: object, request: GenerateRequest) -> list[GenerateReply]:
    """The `n` samples of a reply, in order. Raises ValueError for a reply to another request, a missing or repeated
    sample, log-probs of other tokens, and versions that do not cover the tokens."""
    top = an_object(body, GENERATE)
    _check_id(top, request)
    rows = [an_object(row, GENERATE) for row in need(top, "choices", GENERATE)]
    at = {need(row, "index", GENERATE): row for row in rows}
    if len(rows) != request.n or set(at) != set(range(request.n)):
        raise ValueError(f"{GENERATE}: the reply has samples {sorted(at)}, but {request.n} were requested")
    return [_sample(at[i], request) for i in range(request.n)]


def _check_id(top: Mapping[str, Any], request: GenerateRequest) -> None:
    assert request.rid is not None
    if (got := need(top, "request_id", GENERATE)) != _REPLY_ID + request.rid[0]:
        raise ValueError(
            f"{GENERATE}: the reply has request_id {got!r}, which this request did not send: the server, or a "
            "proxy in front of it, mixes up requests"
        )


def _sample(row: Mapping[str, Any], request: GenerateRequest) -> GenerateReply:
    assert request.rid is not None
    reason = need(row, "finish_reason", GENERATE)
    if reason not in _FINISH:
        raise ValueError(f"{GENERATE}: finish_reason {reason!r} is not one of {', '.join(_FINISH)}")
    finish = _FINISH[reason]
    ids = np.asarray(need(row, "token_ids", GENERATE) or [], dtype=np.int64)
    if finish is Finish.LENGTH and len(ids) < request.sampling[0].max_new_tokens:
        raise ValueError(
            f"{GENERATE}: a sample of {len(ids)} tokens ends at a limit, but {request.sampling[0].max_new_tokens} "
            "were requested: the prompt leaves no room in the server's context length; raise "
            "rollout.vllm.max_model_len"
        )
    spans = read_spans(need(row, "weight_versions", GENERATE) or [] if len(ids) else [], len(ids))
    routed = row.get("routed_experts") if request.return_routed_experts else None
    return GenerateReply(
        rid=request.rid[0],
        output_ids=ids,
        logprobs=_logprobs(row, ids),
        finish=finish,
        prompt_tokens=len(request.input_ids[0]),
        weight_version=spans[-1].version if spans else "",
        weight_versions=spans,
        routed_experts=None if routed is None else int32_routes(routed),
    )


def _logprobs(row: Mapping[str, Any], ids: NDArray[np.int64]) -> NDArray[np.float32]:
    if not len(ids):
        return np.zeros(0, np.float32)
    content = need(an_object(need(row, "logprobs", GENERATE), GENERATE), "content", GENERATE)
    entries = [an_object(entry, GENERATE) for entry in content]
    pairs = [(_unclamped(need(e, "logprob", GENERATE)), need(e, "token_id", GENERATE)) for e in entries]
    return read_logprobs(pairs, ids)


def _unclamped(logprob: float) -> float:
    return math.nan if logprob <= _CLAMPED else logprob


def scored_prompt(body: object, request: GenerateRequest) -> PromptScores:
    """The scores of the request's prompt. Raises ValueError if they are missing or of other tokens, or have fewer
    candidates."""
    top = an_object(body, GENERATE)
    _check_id(top, request)
    ids, start, wanted = request.input_ids[0], request.logprob_start_len, request.top_logprobs_num
    rows = need(top, "prompt_logprobs", GENERATE) or []
    if len(rows) != len(ids):
        raise ValueError(f"{GENERATE}: prompt_logprobs has {len(rows)} tokens, but {len(ids)} were sent")
    own, likeliest = [], []
    for token, row in zip(ids[start + 1 :], rows[start + 1 :], strict=True):
        entries = {int(key): an_object(entry, GENERATE) for key, entry in an_object(row, GENERATE).items()}
        if token not in entries:
            raise ValueError(f"{GENERATE}: prompt_logprobs has no entry for token {token} at its position")
        own.append((_unclamped(need(entries[token], "logprob", GENERATE)), token))
        ranked = sorted(entries, key=lambda t, of=entries: int(need(of[t], "rank", GENERATE)))  # type: ignore[misc]
        likeliest.append([(need(entries[t], "logprob", GENERATE), t) for t in ranked[:wanted]])
    (choice,) = need(top, "choices", GENERATE)
    routed = an_object(choice, GENERATE).get("routed_experts")
    return PromptScores(
        logprobs=read_logprobs(own, np.asarray(ids[start + 1 :], np.int64)),
        top=_top(likeliest, wanted) if wanted else None,
        routed_experts=None if routed is None else int32_routes(routed),
    )


def _top(rows: Sequence[Sequence[tuple[float, int]]], wanted: int) -> PromptTop:
    if any(len(row) != wanted for row in rows):
        raise ValueError(
            f"{GENERATE}: prompt_logprobs has {min(map(len, rows))} candidates at a position, but {wanted} were "
            "requested: raise the server's --max-logprobs, or lower distillation.top_k if it exceeds the "
            "vocabulary"
        )
    if not rows:
        return PromptTop.empty(wanted)
    return PromptTop(
        np.array([[t for _, t in row] for row in rows], np.int64),
        np.array([[p for p, _ in row] for row in rows], np.float32),
    )


def int32_routes(payload: str) -> str:
    """vLLM's routes, base64 of a .npy [rows, layers, K], in the form that RoutingTrace reads: base64 of int32. Raises
    ValueError for anything else than such an array."""
    try:
        ids = np.load(io.BytesIO(pybase64.b64decode(payload, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as e:
        raise ValueError(f"{GENERATE}: routed_experts is not a valid .npy array: {e}") from None
    if not isinstance(ids, np.ndarray) or ids.ndim != 3 or ids.dtype.kind not in "ui":
        shown = f"{getattr(ids, 'dtype', type(ids).__name__)} {list(getattr(ids, 'shape', ()))}"
        raise ValueError(f"{GENERATE}: routed_experts is {shown}, expected integers [rows, layers, experts per token]")
    return pybase64.b64encode_as_string(np.ascontiguousarray(ids, "<i4").tobytes())
