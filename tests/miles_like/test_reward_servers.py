"""Rewards that a server computes: what is sent, what is read, and what becomes of a sample when the server fails.

Against servers on loopback. The forms are those of SGLang 0.5.23 (entrypoints/http_server.py: /classify;
entrypoints/openai/serving_classify.py and serving_chat.py). Not covered: a real reward model; TLS,
which is in test_server_url.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_samples import sample

from miles_like.reward_config import RewardConfig
from miles_like.rewards.load import make_reward
from miles_like.types import Prompt, Sample, Score, Unscored
from tests.fakes import FakeServer

PROMPT = Prompt(
    id="p",
    token_ids=(0, 1),
    answer="4",
    text="<user>2+2?<assistant>",
    source="sums",
    messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}),
    meta={"level": 2, "tags": ["a"]},
)
TINY = Path(__file__).parents[2] / "configs" / "tiny"


class Scoring(FakeServer):
    """Replies to any endpoint with `reply`, or with what it makes of the body."""

    def __init__(self, reply: Any) -> None:
        super().__init__()
        self.reply = reply

    def _answer(self, endpoint: str, body: Any) -> tuple[int, Any]:
        reply = self.reply(body) if callable(self.reply) else self.reply
        return 200, json.dumps(reply).encode()


def asked(name: str, server: FakeServer, *samples: Sample, path: str = "", **options: Any) -> list[Score | Unscored]:
    """Of one sample, or those given; retries wait for nothing."""
    more = {k: options.pop(k) for k in ("timeout_s", "retries", "concurrency") if k in options}
    config = RewardConfig.model_validate(
        {"name": name, "retry_wait_s": 0, name: {"url": server.url + path, **options}} | more
    )

    async def run() -> list[Score | Unscored]:
        reward = make_reward(config)
        given = samples or (sample(text="It is 4."),)
        try:
            return list(await reward([PROMPT] * len(given), given))
        finally:
            await reward.close()

    return asyncio.run(asyncio.wait_for(run(), 30))


def said(text: str | None, finish: str = "stop") -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}]}


@pytest.mark.parametrize(
    ("reply", "want"),
    [
        (0.5, Score(value=0.5)),
        (True, Score(value=1.0)),
        ({"score": 1, "form": 0.5, "why": "x"}, Score(value=1.0, parts={"form": 0.5})),
        (None, Unscored(reason="the reward function returned None")),
        ({"score": None, "reason": "no sandbox"}, Unscored(reason="no sandbox")),
    ],
)
def test_a_remote_reward(reply: Any, want: Any) -> None:
    with Scoring(reply) as server:
        assert asked("remote", server, path="/score", retries=0) == [want]
    ((endpoint, body),) = server.calls
    assert endpoint == "/score" and body == {
        "prompt": "<user>2+2?<assistant>",
        "response": "It is 4.",
        "label": "4",
        "id": "p",
        "source": "sums",
        "index": 0,
        "finish": "stop",
        "metadata": {"level": 2, "tags": ["a"]},
    }


@pytest.mark.parametrize("fault", ["http_500", "reset"])
@pytest.mark.parametrize("name", ["remote", "reward_model", "judge"])
def test_a_server_that_fails_is_asked_again_and_then_the_sample_is_given_up(name: str, fault: str) -> None:
    path = {"remote": "/score", "reward_model": "/classify", "judge": "/v1/chat/completions"}[name]
    reply = {"remote": 1.0, "reward_model": {"embedding": [1.0]}, "judge": said("Score: 10")}[name]
    with Scoring(reply) as server:
        url = path if name == "remote" else ""
        faults = iter([fault, fault, "none"])
        server.fault[path] = lambda body: next(faults)
        assert [o.value for o in asked(name, server, path=url)] == [1.0] and len(server.calls) == 3
        server.fault[path] = fault
        (found,) = asked(name, server, path=url)
        assert isinstance(found, Unscored) and len(server.calls) == 6
        assert found.reason.startswith("HTTP 500 from http" if fault == "http_500" else "no reply from http")


def test_a_server_that_hangs_or_is_not_there_gives_the_sample_up() -> None:
    with Scoring(1.0) as server:
        server.fault["/score"] = "hang"
        found = asked("remote", server, path="/score", timeout_s=0.2, retries=0)
        assert found == [Unscored(reason="no reward within 0.2 s")]
    (gone,) = asked("remote", server, path="/score", retries=0)
    assert isinstance(gone, Unscored) and gone.reason == f"no reply from {server.url}/score: ConnectError"


@pytest.mark.parametrize(
    ("fault", "why"), [("http_400", "answered HTTP 400: .*the request is wrong"), ("html", "which is no JSON")]
)
def test_a_wrong_request_ends_the_run(fault: str, why: str) -> None:
    """Every further sample would fail alike; the sentence has the server's own words."""
    with Scoring(1.0) as server:
        server.fault["/score"] = fault
        with pytest.raises(RuntimeError, match=rf"prompt 'p', sample 0 failed: ValueError: http.*/score .*{why}"):
            asked("remote", server, path="/score")
        assert len(server.calls) == 1


def test_a_reply_that_is_no_reward_ends_the_run() -> None:
    with Scoring("good") as server, pytest.raises(RuntimeError, match="it is 'good', want a number"):
        asked("remote", server)


def test_a_key_is_sent_and_stays_out_of_the_configuration(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    with Scoring(1.0) as server:
        heads: list[str | None] = []
        serve = server._serve
        server._serve = lambda h, body: (heads.append(h.headers.get("Authorization")), serve(h, body))  # type: ignore[method-assign]
        asked("remote", server, key_file=str(key))
    assert heads == ["Bearer secret"]
    with pytest.raises(ValueError, match="key_file /no/key: No such file or directory"):
        asked("remote", server, key_file="/no/key")


def test_no_more_requests_at_once_than_allowed() -> None:
    """The server counts who is in it."""
    inside, most = 0, 0

    def count(body: Any) -> float:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        import time

        time.sleep(0.02)
        inside -= 1
        return float(body["index"])

    with Scoring(count) as server:
        found = asked("remote", server, *(sample(index=i, text="x") for i in range(12)), concurrency=3)
    assert [o.value for o in found] == list(range(12)) and most <= 3


# reward model


@pytest.mark.parametrize(
    ("options", "endpoint", "body", "reply"),
    [
        ({}, "/classify", {"text": "<user>2+2?<assistant>It is 4."}, {"embedding": [-1.5], "meta_info": {}}),
        ({"send": "tokens"}, "/classify", {"input_ids": [0, 1, 2, 3, 4]}, {"embedding": [-1.5]}),
        ({"output": 1}, "/classify", {"text": "<user>2+2?<assistant>It is 4."}, {"embedding": [0.25, -1.5]}),
        (
            {"api": "v1/classify", "model": "rm", "output": 1},
            "/v1/classify",
            {"model": "rm", "input": "<user>2+2?<assistant>It is 4."},
            {"object": "list", "data": [{"index": 0, "label": "x", "probs": [2.5, -1.5], "num_classes": 2}]},
        ),
    ],
)
def test_a_reward_model(options: dict[str, Any], endpoint: str, body: Any, reply: Any) -> None:
    with Scoring(reply) as server:
        assert asked("reward_model", server, **options) == [Score(value=-1.5)]
    assert server.calls == [(endpoint, body)]


def test_a_reward_model_reads_the_conversation_by_its_own_template() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    want = tokenizer.apply_chat_template(
        [*PROMPT.messages, {"role": "assistant", "content": "It is 4."}], tokenize=False
    )
    with Scoring({"embedding": [2.0]}) as server:
        assert asked("reward_model", server, send="chat", tokenizer=str(TINY)) == [Score(value=2.0)]
    assert server.calls == [("/classify", {"text": want})] and "Be brief." in want


@pytest.mark.parametrize(
    ("options", "reply", "why"),
    [
        ({}, {"embedding": [1.0, 2.0]}, "the model has 2 outputs: say which with reward.reward_model.output"),
        ({"output": 2}, {"embedding": [1.0]}, "output = 2 of a model with 1 outputs"),
        ({}, {"embedding": None}, "the model's outputs are None, want numbers: check url and api"),
        ({}, {"embedding": ["yes"]}, r"outputs are \['yes'\], want numbers"),
        ({}, {"text": "hello"}, "without embedding: check url and api"),
        ({"api": "v1/classify", "model": "m"}, {"data": [{"probs": [1.0]}]}, "is 1 whatever the response: set reward"),
        ({"api": "v1/classify", "model": "m"}, {"data": []}, "without data.0.probs"),
    ],
)
def test_a_server_of_another_model_ends_the_run(options: dict[str, Any], reply: Any, why: str) -> None:
    with Scoring(reply) as server, pytest.raises(RuntimeError, match=why):
        asked("reward_model", server, **options)


# judge


@pytest.mark.parametrize(
    ("reply", "want"),
    [
        (said("Good.\nScore: 8"), Score(value=0.8, parts={"score": 8.0})),
        (said("Score: 2? No.\n**Score:** 7.5"), Score(value=0.75, parts={"score": 7.5})),
        (said("score : 0"), Score(value=0.0, parts={"score": 0.0})),
        (said("I like it"), Unscored(reason="the judgement has no score")),
        (said(None), Unscored(reason="the judgement has no score")),
        (said("Score: 11"), Unscored(reason="the judgement's score is out of bounds")),
        (said("Score: -1"), Unscored(reason="the judgement's score is out of bounds")),
        (said("Score: 1", "length"), Unscored(reason="the judgement was cut off")),
        (said("Score: 1", "abort"), Unscored(reason="the judgement was cut off")),
    ],
)
def test_a_judge(reply: Any, want: Any) -> None:
    """What cannot be read is no bad response; 1 may have become 10."""
    with Scoring(reply) as server:
        assert asked("judge", server, retries=0) == [want]


def test_what_a_judge_is_asked() -> None:
    """In one pass: what a response says in braces is the response's, and is not filled in."""
    tricky = dataclasses.replace(sample(), text="{answer} {prompt} 4")
    options = {
        "template": "{prompt}|{answer}|{response}|{other}",
        "system": "You judge.",
        "model": "m",
        "max_tokens": 9,
    }
    with Scoring(said("Score: 10")) as server:
        asked("judge", server, tricky, **options)
    assert server.calls == [
        (
            "/v1/chat/completions",
            {
                "model": "m",
                "messages": [
                    {"role": "system", "content": "You judge."},
                    {"role": "user", "content": "2+2?|4|{answer} {prompt} 4|{other}"},
                ],
                "temperature": 0.0,
                "max_tokens": 9,
            },
        )
    ]


def test_a_judge_of_other_words_and_bounds() -> None:
    with Scoring(said("<grade>-1</grade>")) as server:
        found = asked("judge", server, pattern=r"<grade>(-?\d)</grade>", low=-3, high=1)
    assert found == [Score(value=0.5, parts={"score": -1.0})]


def test_a_judge_that_changes_its_mind_is_asked_again() -> None:
    """With a temperature above 0 the next judgement may be readable."""
    replies = iter([said("hm"), said("Score: 5")])
    with Scoring(lambda body: next(replies)) as server:
        assert asked("judge", server, temperature=1.0) == [Score(value=0.5, parts={"score": 5.0})]


@pytest.mark.parametrize("reply", [{"error": "no such model"}, [], {"choices": []}, 3])
def test_what_is_no_chat_completion_ends_the_run(reply: Any) -> None:
    with Scoring(reply) as server, pytest.raises(RuntimeError, match="no chat completion: check its url"):
        asked("judge", server)


def test_parts_of_several_kinds_are_one_reward() -> None:
    """As the configuration has them; the judge fails for one sample, which is then without a reward."""
    judged: Callable[[Any], Any] = lambda body: said("?" if "It is 5" in str(body) else "Score: 5")  # noqa: E731
    with Scoring(judged) as server:
        config = RewardConfig.model_validate(
            {
                "parts": {"gsm8k": 1.0, "judge": 0.5, "length": 0.0},
                "retries": 0,
                "judge": {"url": server.url},
                "length": {"target": 1, "limit": 5},
            }
        )

        async def run() -> list[Score | Unscored]:
            reward = make_reward(config)
            given = [sample(index=i, text=f"It is {4 + i}.", response_len=3) for i in range(2)]
            try:
                return list(await reward([PROMPT] * 2, given))
            finally:
                await reward.close()

        right, unread = asyncio.run(run())
    assert unread == Unscored(reason="judge: the judgement has no score")
    assert isinstance(right, Score) and math.isclose(right.value, 1.25)
    assert right.parts == {"gsm8k": 1.0, "judge": 0.5, "judge/score": 5.0, "length": -0.5, "length/tokens": 3.0}
