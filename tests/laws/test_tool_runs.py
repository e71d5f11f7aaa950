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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    "rollout.max_turns=3",
    "rollout.max_episode_tokens=500",
    "rollout.temperature=1.0",
    f"rollout.tools.functions=['{HERE}:add']",
)


def add(a: int, b: int) -> int:
    """Adds two integers."""
    return a + b


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
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    home = tmp_path_factory.mktemp("tools")
    rows = [{"prompt": [{"role": "user", "content": f"{i}+1="}], "answer": str(i + 1)} for i in range(16)]
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert shared_starter().call(home / "home.log", make_chat_home, home) == 0, tail(home / "home.log")
    settings = (*SETTINGS, f"data.train={home / 'rows.jsonl'}", f"data.eval={home / 'rows.jsonl'}")
    log = home / "run" / "driver.log"
    assert shared_starter().call(log, drive, home / "run", home, settings, None, None) == 0, tail(log)
    yield home / "run"


def rows(run: Path) -> list[dict[str, Any]]:
    files = sorted((run / "rollouts").glob("step_*.jsonl"))
    assert len(files) == 2
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_what_was_sampled_is_trained(run: Path) -> None:
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
