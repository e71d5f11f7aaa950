"""Law: what vLLM 0.32 answers is read as it is meant, and an answer that lacks something or is of another request is
refused.

The answers were recorded from stock vLLM on a CPU (recorded/record.py), from a Qwen3-MoE of 128 tokens. Expert routes,
which it returns on GPUs only, are made here in the form that its source writes. Not covered: other versions of vLLM.
"""

from __future__ import annotations

import base64
import copy
import io
import math
from typing import Any

import numpy as np
import pytest

from miles_like.types import Finish, SamplingParams
from rollout.vllm.wire import generate_body, int32_routes, sampled_replies, scored_prompt
from rollout.wire.generate import GenerateRequest, WireSpan
from tests.support.fake_vllm import recorded
from tests.support.refusals import Facts, refuses

CASES = recorded()
DEFAULTS = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "n": 1, "stop_token_ids": [], "ignore_eos": False}


def request(case: str) -> GenerateRequest:
    """The recorded request as this project holds it."""
    body = CASES[case]["request"]
    given = DEFAULTS | body["sampling_params"]
    return GenerateRequest(
        input_ids=(tuple(body["token_ids"]),),
        sampling=(
            SamplingParams(
                max_new_tokens=given["max_tokens"],
                temperature=given["temperature"],
                stop_token_ids=tuple(given["stop_token_ids"]),
                sampling_seed=given["seed"],
            ),
        ),
        n=given["n"],
        ignore_eos=given["ignore_eos"],
        logprob_start_len=0 if "prompt_logprobs" in given else -1,
        top_logprobs_num=given.get("prompt_logprobs", 0),
        return_logprob=True,
        rid=(body["request_id"],),
    )


@pytest.mark.parametrize("case", ["whole", "two", "hot", "stopped", "scored", "aborted", "two_versions"])
def test_our_requests_are_those_that_were_recorded_with_every_default_in_them(case: str) -> None:
    """The recorder wrote them by hand. vLLM's own default of max_tokens is 16."""
    body = CASES[case]["request"]
    assert generate_body(request(case)) == body | {"sampling_params": DEFAULTS | body["sampling_params"]}


@pytest.mark.parametrize("case", ["whole", "two", "hot", "stopped", "aborted", "two_versions", "frozen"])
def test_every_recorded_sample_is_read(case: str) -> None:
    asked, choices = request(case), CASES[case]["answer"]["choices"]
    replies = sampled_replies(CASES[case]["answer"], asked)
    assert len(replies) == len(choices) == asked.n
    for reply, choice in zip(replies, choices, strict=True):
        assert reply.output_ids.tolist() == choice["token_ids"] and reply.logprobs is not None
        assert (
            reply.finish
            is {"length": Finish.LENGTH, "stop": Finish.STOP, "abort": Finish.ABORT}[choice["finish_reason"]]
        )
        want = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        np.testing.assert_array_equal(reply.logprobs, np.array(want, np.float32))
        assert reply.prompt_tokens == 7 and reply.weight_versions[-1].end == len(choice["token_ids"])


def test_the_token_that_stops_is_part_of_its_sample() -> None:
    (reply,) = sampled_replies(CASES["stopped"]["answer"], request("stopped"))
    assert reply.finish is Finish.STOP and int(reply.output_ids[-1]) in request("stopped").sampling[0].stop_token_ids


def test_spans_tell_which_tokens_are_of_which_weights() -> None:
    (reply,) = sampled_replies(CASES["two_versions"]["answer"], request("two_versions"))
    first, second = reply.weight_versions
    assert (first.version, second.version) == ("0", "1") and first == WireSpan("0", 0, second.start)
    assert second.end == 400 and reply.weight_version == "1"


def test_a_scored_prompt_is_read() -> None:
    """Keyed by token, of which the likeliest are ranked, and the prompt's own is there whatever its rank."""
    asked, rows = request("scored"), CASES["scored"]["answer"]["prompt_logprobs"]
    scores = scored_prompt(CASES["scored"]["answer"], asked)
    own = [row[str(token)]["logprob"] for row, token in zip(rows[1:], asked.input_ids[0][1:], strict=True)]
    np.testing.assert_array_equal(scores.logprobs, np.array(own, np.float32))
    assert scores.top is not None and scores.top.ids.shape == (6, 3)
    for row, ids in zip(rows[1:], scores.top.ids.tolist(), strict=True):
        assert [row[str(i)]["rank"] for i in ids] == [1, 2, 3]
    assert (np.diff(scores.top.logprobs) <= 0).all()


def changed(case: str, change: Any) -> Any:
    answer = copy.deepcopy(CASES[case]["answer"])
    change(answer)
    return answer


def _of_choice(**values: Any) -> Any:
    return lambda answer: answer["choices"][0].update(values)


def _without(key: str) -> Any:
    return lambda answer: answer["choices"][0].pop(key)


def _clamped(answer: Any) -> None:
    answer["choices"][0]["logprobs"]["content"][2]["logprob"] = -9999.0


def _of_another_token(answer: Any) -> None:
    answer["choices"][0]["logprobs"]["content"][2]["token_id"] = 3


def _as_text(answer: Any) -> None:
    """As vLLM 0.31 and what follows OpenAI's schema."""
    for entry in answer["choices"][0]["logprobs"]["content"]:
        entry["token"] = f"token_id:{entry.pop('token_id')}"


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (lambda a: a.update(request_id="generate-tokens-other"), ("request_id", "generate-tokens-other")),
        (lambda a: a["choices"].clear(), ("1", "samples")),
        (lambda a: a["choices"].append(a["choices"][0]), ("0", "1")),
        (_without("token_ids"), ("token_ids",)),
        (_without("weight_versions"), ("weight_versions",)),
        (_without("logprobs"), ("logprobs",)),
        (_without("finish_reason"), ("finish_reason",)),
        (_of_choice(finish_reason="error"), ("finish_reason", "error")),
        (_of_choice(weight_versions=[{"version": "0", "start": 0, "end": 7}]), ("weight_versions", 8)),
        (_of_choice(token_ids=[1, 2, 3]), (8, 3)),
        (_clamped, ("finite", 80)),
        (_of_another_token, ("do not belong", 8)),
        (_as_text, ("token_id",)),
    ],
)
def test_an_answer_that_is_wrong_is_refused(change: Any, facts: Facts) -> None:
    with refuses(ValueError, *facts):
        sampled_replies(changed("whole", change), request("whole"))


def test_a_sample_that_the_context_cut_is_refused() -> None:
    """It would count as one that reached rollout.max_new_tokens."""

    def cut(answer: Any) -> None:
        choice = answer["choices"][0]
        choice.update(token_ids=choice["token_ids"][:3], weight_versions=[{"version": "0", "start": 0, "end": 3}])
        choice["logprobs"]["content"] = choice["logprobs"]["content"][:3]

    with refuses(ValueError, 3, 8, "rollout.vllm.max_model_len"):
        sampled_replies(changed("whole", cut), request("whole"))


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (lambda a: a.update(prompt_logprobs=None), ("prompt_logprobs", 0, 7)),
        (lambda a: a["prompt_logprobs"][3].pop("8"), (8,)),
        (lambda a: a["prompt_logprobs"][3].update({"8": {"logprob": -9999.0, "rank": 9}}), ("finite", 8)),
        (lambda a: [a["prompt_logprobs"][2].pop(k) for k in list(a["prompt_logprobs"][2])[1:]], (1, 3)),
    ],
)
def test_scores_that_are_wrong_are_refused(change: Any, facts: Facts) -> None:
    with refuses(ValueError, *facts):
        scored_prompt(changed("scored", change), request("scored"))


def npy(ids: Any) -> str:
    out = io.BytesIO()
    np.save(out, ids)
    return base64.b64encode(out.getvalue()).decode()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_routes_become_the_form_that_a_trace_reads(dtype: str) -> None:
    ids = np.arange(2 * 3 * 4).reshape(2, 3, 4).astype(dtype)
    assert base64.b64decode(int32_routes(npy(ids))) == ids.astype("<i4").tobytes()


@pytest.mark.parametrize(
    "payload",
    [npy(np.zeros((2, 3))), npy(np.zeros((2, 3, 4))), npy(np.array([{}], dtype=object)), "AAAA", "no base64", ""],
    ids=["flat", "floats", "pickle", "short", "text", "empty"],
)
def test_other_routes_are_refused(payload: str) -> None:
    with refuses(ValueError, "routed_experts"):
        int32_routes(payload)


def test_a_clamped_number_is_no_number() -> None:
    """-9999 stands for -inf and for nan; a mean over either would be wrong without a word."""
    answer = changed("scored", lambda a: a["prompt_logprobs"][1]["6"].update(logprob=-9999.0))
    assert math.isclose(answer["prompt_logprobs"][1]["6"]["logprob"], -9999.0)
    with refuses(ValueError, "finite", 6):
        scored_prompt(answer, request("scored"))
