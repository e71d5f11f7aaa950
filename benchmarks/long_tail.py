"""A task whose answers have long-tailed lengths that the policy makes itself and is trained on; no benchmark by itself.

It is the tiny task (configs/tiny) with thought before the answer: `48/2=` is answered `....>24`. Thought is a run of
one character. Its first one decides which: "." runs are short, "~" runs long, both of geometric lengths, so that a
model needs no counting to draw them. The checkpoint is warmed up on the tiny task's sloppy corpus, each answer with
thought drawn at random before it; reward is the number after ">".
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path

from figures import ROOT
from vs_trl import Lengths, checkpoint

from miles_like.config.load import load_config
from miles_like.config.run import ModelConfig, RunConfig

TINY = ROOT / "configs" / "tiny"
CORPUS, CHECK = "long_tail.jsonl", "long_tail_check.jsonl"
SEED, END, THINKS = 17, ">", 5
LONG_SHARE, MEAN_SHORT, MEAN_LONG, LONGEST = 0.15, 6, 90, 300
LIMIT = LONGEST + 8  # tokens of an answer: thought, its end, at most four digits, the end


def _thought(rng: random.Random, longest: int) -> str:
    character, mean = ("~", MEAN_LONG) if rng.random() < LONG_SHARE else (".", MEAN_SHORT)
    return character * min(longest, 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / mean)))


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (TINY / name).open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def write_corpus(home: Path) -> None:
    """The warm-up's two files. Made twice, they are equal byte for byte.

    In the first one problem in THINKS is answered with thought and number. The others end with thought already, which
    is then not learnt: of tokens under loss most would be dots otherwise, and the number would take twice the steps. In
    the second all do, so that their right answer has one spelling, and its probability is that of the number alone.
    """
    rng = random.Random(SEED)
    home.mkdir(parents=True, exist_ok=True)
    with (home / CORPUS).open("w", encoding="utf-8") as out:
        for i, row in enumerate(_rows("warmup.jsonl")):
            thought = _thought(rng, LONGEST) + END
            asked, hidden = (row["prompt"] + thought, "") if i % THINKS else (row["prompt"], thought)
            out.write(json.dumps({"prompt": asked, "answer": row["answer"], "sloppy": hidden + row["sloppy"]}) + "\n")
    with (home / CHECK).open("w", encoding="utf-8") as out:
        for row in _rows("warmup_check.jsonl"):
            asked = row["prompt"] + _thought(rng, LONGEST) + END
            out.write(json.dumps({"prompt": asked, "answer": row["answer"]}) + "\n")


SETTINGS = (
    *("parallel.dp=1", "parallel.ep=1", "train.groups_per_step=32", "train.samples_per_group=8"),
    *(f"rollout.max_new_tokens={LIMIT}", "optimizer.lr=4e-4", "eval.every=0"),
)


def warmed_up_config(home: Path) -> RunConfig:
    """configs/tiny.toml on this task, of which a model learns something; makes its files in `home`. Answers of an
    evaluation are sampled: the likeliest next character of a thought is always one more."""
    write_corpus(home)
    settings = [
        *(*SETTINGS, f"model.make.corpus={home / CORPUS}", f"model.make.validation={home / CHECK}"),
        *("model.make.max_steps=1000", "reward.name=gsm8k", "eval.samples=2", "eval.greedy=false"),
    ]
    return load_config(ROOT / "configs" / "tiny.toml", settings)


def crafted_config(home: Path) -> RunConfig:
    """configs/tiny.toml with a checkpoint, made in `home`, that needs no warm-up to have such lengths."""
    lengths = Lengths(longest=LIMIT, end_of_short=1 / MEAN_SHORT, end_of_long=1 / MEAN_LONG, begins_long=LONG_SHARE)
    if not (home / "model").exists():
        checkpoint(home / "model", lengths)
    settings = [*SETTINGS, "precision.format=bf16", "precision.qat=false", "optimizer.lr=1e-6", "eval.max_prompts=8"]
    config = load_config(ROOT / "configs" / "tiny.toml", settings)
    return config.model_copy(update={"model": ModelConfig(path=str(home / "model"))})
