"""Law: a run with tools is trained on the tokens that the policy sampled, and on no other; what it called and was
answered is in the rollouts.

Why it must hold: between the engine and the trainer a turn is parsed, a tool is called, and a template writes its
answer. A turn that is encoded again would have other ids than those whose log-probs were sampled.

A random model of a chat tokenizer, which begins calls now and then and writes none that can be made. Not covered: that
a policy learns to call (docs/start/tool_tutorial.md).
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from miles_like.types import POLICY, Span
from tests.support.chat_templates import tokenizer
from tests.support.forked import tail
from tests.support.local_run import SMALL_MODEL, drive, shared_starter

HERE = Path(__file__)
SETTINGS = (
    "train.steps=2",
    "checkpoint.every=2",
    "data.max_prompt_tokens=400",
    "train.max_tokens_per_rank=2048",
    "train.samples_per_group=8",
    "rollout.max_new_tokens=60",
    "rollout.max_episode_tokens=500",
)
TOOLS = ("rollout.max_turns=3", f"rollout.tools.functions=['{HERE}:add']")
AGENT = (f"rollout.agent.function={HERE}:two_conversations", "data.template=chat")


def add(a: int, b: int) -> int:
    """Adds two integers."""
    return a + b


async def two_conversations(prompt: Any, *, base_url: str, api_key: str, seed: int) -> None:
    """An agent that asks in two contexts, which are two rows."""
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {api_key}"}, timeout=60) as http:
        for system in ("short", "long"):
            messages = [{"role": "system", "content": system}, *prompt.messages]
            for _ in range(2):
                body = {"model": "m", "messages": messages}
                reply = (await http.post(f"{base_url}/v1/chat/completions", json=body)).json()
                if "choices" not in reply or reply["choices"][0]["finish_reason"] == "length":
                    break
                messages += [reply["choices"][0]["message"], {"role": "user", "content": "go on"}]


def make_chat_home(where: Path) -> None:
    """As `make_home`, with the marks of a chat model in the vocabulary."""
    from megatron_bridge.convert.to_megatron import to_megatron
    from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

    words = tokenizer("tools")
    hf = tiny(**SMALL_MODEL, vocab_size=-(-len(words) // 16) * 16)
    write_checkpoint(where / "hf", hf, random_tensors(hf))
    words.save_pretrained(where / "hf")
    to_megatron(where / "hf", where / "megatron")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("tools")
    rows = [{"prompt": [{"role": "user", "content": f"{i}+1="}], "answer": str(i + 1)} for i in range(16)]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert shared_starter().call(home / "home.log", make_chat_home, home) == 0, tail(home / "home.log")
    return home


def ran(home: Path, name: str, *settings: str) -> Path:
    log = home / name / "driver.log"
    given = (*SETTINGS, f"data.train={home / 'rows.jsonl'}", f"data.eval={home / 'rows.jsonl'}", *settings)
    assert shared_starter().call(log, drive, home / name, home, given, None, None) == 0, tail(log)
    return home / name


def rows(run: Path) -> list[dict[str, Any]]:
    files = sorted((run / "rollouts").glob("step_*.jsonl"))
    assert len(files) == 2
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_what_was_sampled_is_trained(home: Path) -> None:
    run = ran(home, "tools", *TOOLS)
    words, found, several = tokenizer("tools"), Counter[str](), 0
    for row in rows(run):
        ids, spans = row["token_ids"], [Span(**span) for span in row["spans"]]
        policy = [s for s in spans if (s.what, s.who) == ("turn", POLICY)]
        masked = [i for i, under in enumerate(row["loss_mask"]) if under]
        assert masked == [i for s in policy for i in range(s.start, s.end)]
        several += len(policy) > 1
        for span in spans:
            text = words.decode(ids[span.start : span.end])
            if span.what == "tool_call":
                found[span.status] += 1
                assert text.startswith("<tool_call>")
            if span.what == "tool_result":
                assert text.startswith("The tool call was not made")
        for before, after in itertools.pairwise(policy):
            between = words.decode(ids[before.end : after.start])
            assert between.startswith("\n<|im_start|>tool\nThe tool call") and between.endswith("assistant\n")
    assert several and sum(found.values()) >= several and "ok" not in found


@pytest.mark.long(beside="tests/laws/test_recorded_episodes.py")
def test_the_rows_of_an_agent_are_trained(home: Path) -> None:
    """Each episode has two rows, of one reward, and each sampled token is under loss in one of them."""
    run = ran(home, "agent", *AGENT)
    of: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows(run):
        of.setdefault((row["prompt_id"], row["index"]), []).append(row)
        spans = [Span(**span) for span in row["spans"]]
        under = [i for s in spans if (s.what, s.who) == ("turn", POLICY) for i in range(s.start, s.end)]
        assert under == [i for i, one in enumerate(row["loss_mask"]) if one]
    assert of and all(len(found) == 2 and len({row["reward"] for row in found}) == 1 for found in of.values())
    text = tokenizer("tools").decode(rows(run)[0]["token_ids"])
    assert text.startswith("<|im_start|>system\nshort<|im_end|>")
