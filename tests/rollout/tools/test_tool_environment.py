"""Episodes with tools, by the keys of a configuration, against an engine that has its turns from a script.

Not covered: an engine that samples (tests/e2e/test_tools.py).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_like.types import Finish, Prompt, Sample, SamplingParams, Span
from rollout.config import RolloutConfig
from rollout.episodes.runner import make_episode_runner
from rollout.tool_config import ToolConfig
from rollout.tools.load import prompting
from tests.support.chat_templates import end_ids, tokenizer
from tests.support.refusals import refuses
from tests.support.scripted import Script

HERE = Path(__file__)
TOOLS = ToolConfig(functions=(f"{HERE}:add", f"{HERE}:divide"))
CONFIG = RolloutConfig(tools=TOOLS, max_turns=4, max_new_tokens=200, max_episode_tokens=2000)
END = "<|im_end|>"
PARAMS = SamplingParams(max_new_tokens=200, sampling_seed=5)  # the chat knows the end of a turn


def add(a: int, b: int) -> int:
    """Adds two integers."""
    return a + b


async def divide(a: int, b: int) -> float:
    """Divides."""
    return a / b


def prompt(config: RolloutConfig = CONFIG) -> Prompt:
    text = prompting(tokenizer("qwen3"), config.tools).apply_chat_template(
        [{"role": "user", "content": "2+3?"}], tokenize=False, add_generation_prompt=True
    )
    ids = tuple(tokenizer("qwen3").encode(text, add_special_tokens=False))
    return Prompt(id="p", token_ids=ids, answer="5", text=text)


def played(engine: Script, config: RolloutConfig = CONFIG, n: int = 1, stops: tuple[int, ...] = ()) -> list[Sample]:
    runner, params = make_episode_runner(config, tokenizer("qwen3"), timed=False), replace(PARAMS, stop_token_ids=stops)
    (group,) = asyncio.run(runner.wrap(engine).generate([prompt(config)], n=n, params=params))
    return list(group.samples)


def text_of(sample: Sample, span: Span) -> str:
    return str(tokenizer("qwen3").decode(sample.token_ids[span.start : span.end].tolist()))


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}",  "arguments": {arguments}}}\n</tool_call>'


FIRST = "<think>\nHm.\n</think>\n\n" + call("add", '{"a": 2,"b": 3}') + END
SECOND = "\n".join(
    [
        call("add", '{"a": 2}'),
        call("sub", "{}"),
        call("divide", '{"a": 1, "b": 0}'),
        "<tool_call>\n{oh\n</tool_call>",
        call("divide", '{"a": 1, "b": 2}'),
    ]
)
LINES = (FIRST, SECOND + END, "It is 5." + END)


def test_the_prompt_describes_the_tools() -> None:
    text = prompt().text
    assert '"name": "add"' in text and "Adds two integers." in text and text.count("<|im_start|>") == 3


@pytest.mark.parametrize("renderer", [None, "template", "qwen3"])
def test_a_policy_calls_tools_until_it_answers(renderer: str | None) -> None:
    """What it sampled is under loss as it was sampled; all failures of calls are answered, and are in the spans."""
    engine = Script(*LINES)
    config = CONFIG.model_copy(update={"renderer": renderer})
    a, b = played(engine, config, n=2)
    assert torch.equal(a.token_ids, b.token_ids) and a.finish is Finish.STOP and a.reward is None
    sampled = str(tokenizer("qwen3").decode(a.token_ids[a.loss_mask].tolist()))
    assert sampled == "".join(LINES)
    first, second = dict.fromkeys(engine.fed)
    assert first == ("\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert second.count("<tool_response>") == 5
    for word in ("required", "'sub'", "add, divide", "ZeroDivisionError", "JSON", "\n0.5\n"):
        assert word in second, word
    calls = [(s.name, s.status) for s in a.spans if s.what == "tool_call"]
    assert calls == [
        ("add", "ok"),
        ("add", "wrong_arguments"),
        ("sub", "unknown_tool"),
        ("divide", "failed"),
        ("", "invalid_json"),
        ("divide", "ok"),
    ]
    results = [s for s in a.spans if s.what == "tool_result"]
    assert [s.status for s in results] == [status for _, status in calls]
    assert text_of(a, results[0]).strip() == "5" and text_of(a, results[-1]).strip() == "0.5"
    assert [text_of(a, s) for s in a.spans if s.what == "turn" and s.who == "policy"] == list(LINES)
    assert ["Hm." in text_of(a, s) for s in a.spans if s.what == "reasoning"] == [True]
    for span in a.spans:
        if span.what == "tool_call":
            assert text_of(a, span).strip().startswith("<tool_call>")


def test_an_episode_ends_at_its_limits() -> None:
    one = CONFIG.model_copy(update={"max_turns": 1})
    (sample,) = played(Script(*LINES), one)
    assert sample.finish is Finish.LENGTH and sample.turns == 1
    (cut,) = played(Script(FIRST.removesuffix(END)))
    assert cut.finish is Finish.LENGTH


def test_an_environment_of_one_s_own_answers_with_messages() -> None:
    """With `rollout.renderer`. A role whose messages would change earlier turns ends the run."""
    common: dict[str, Any] = {"max_turns": 3, "max_new_tokens": 200, "max_episode_tokens": 2000}
    chatty = RolloutConfig(environment=f"{HERE}:Chatty", renderer="auto", **common)
    engine = Script("a" + END, "b" + END)
    with refuses(ValueError, "rollout.renderer", "'qwen3'", "'user'", "rollout.generate"):
        played(engine, chatty)
    silent = RolloutConfig(environment=f"{HERE}:Chatty", **common)
    with refuses(ValueError, "p/0", "rollout.renderer"):
        played(Script("a" + END), silent, stops=end_ids("qwen3"))


class Chatty:
    def __init__(self, prompt: Prompt, *, seed: int) -> None: ...

    def __call__(self, sample: Sample, turn: str) -> Any:
        from miles_like.types import Observation

        return Observation(messages=({"role": "user", "content": "why?"},))


def test_a_configuration_that_has_no_effect_is_refused() -> None:
    with refuses(ValueError, "rollout.tools", "rollout.max_turns"):
        RolloutConfig(tools=TOOLS, max_episode_tokens=100)
    with refuses(ValueError, "rollout.environment", "rollout.tools"):
        RolloutConfig(tools=TOOLS, environment="a:b", max_turns=1, max_episode_tokens=100)
    with refuses(ValueError, "rollout.renderer", "'auto'", "rollout.tools"):
        RolloutConfig(renderer="auto")
    with refuses(ValueError, "rollout.tools", "hermes"):
        make_episode_runner(CONFIG, tokenizer("llama"))
    with refuses(ValueError, "chat template", "does not support tools"):
        make_episode_runner(CONFIG.model_copy(update={"renderer": "template"}), tokenizer("chatml"))
    drops = CONFIG.model_copy(update={"renderer": "template"})
    with refuses(ValueError, "does not support tools"):
        make_episode_runner(drops, tokenizer("drops"))
