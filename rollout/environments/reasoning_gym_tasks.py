"""Tasks of reasoning-gym (0.1.25, `pip install 'miles-like[reasoning-gym]'`): rows of prompts, and the reward that
scores an answer with the task's own verifier.

    python -m rollout.environments.reasoning_gym_tasks chain_sum --size 1000 --seed 1 --out train.jsonl

    [reward]
    name = "rollout.environments.reasoning_gym_tasks:score"

Options of a task are `--set NAME=JSON`. The answer is the content of the last `<answer>` tag, else the whole response
after the reasoning, stripped.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from miles_like.limits.regular_files import replace_bytes
from miles_like.protocols import SampleReward
from miles_like.types import Prompt, Sample

INSTRUCTION = "Give the final answer between <answer> and </answer>."
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def rows(task: str, size: int, seed: int, **options: Any) -> list[dict[str, Any]]:
    """Rows of prompts. Raises ValueError for an unknown task or option, as reasoning-gym does, and for a task whose
    verifier scores its own answer by values that a row cannot hold (arc_agi compares tuples)."""
    import reasoning_gym

    out = []
    for entry in reasoning_gym.create_dataset(task, size=size, seed=seed, **options):
        kept = json.dumps({key: entry[key] for key in ("question", "answer", "metadata")}, default=str)
        of_row, own = (float(_verifier(task).score_answer(entry["answer"], e)) for e in (json.loads(kept), entry))
        if of_row != own:
            raise ValueError(
                f"task {task!r} scores its own answer with {own:g}, and with {of_row:g} where its entry is read from a "
                "file of prompts: use another task"
            )
        out.append(
            {
                "prompt": f"{entry['question']}\n{INSTRUCTION}",
                "answer": str(entry["answer"]),
                "task": task,
                "entry": kept,
            }
        )
    return out


def answer_in(response: str) -> str:
    text = response.rpartition("</think>")[2]
    found = _ANSWER.findall(text)
    return str(found[-1] if found else text).strip()


@cache
def _verifier(task: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=0)


def score(prompt: Prompt, sample: Sample) -> float:
    """The verifier's score, from 0 to 1; 0 where the verifier fails at this text, and not at its own answer. Raises
    ValueError for a row of another maker, and what a verifier raises that fails at both."""
    task, entry = prompt.meta.get("task"), prompt.meta.get("entry")
    if not isinstance(task, str) or not isinstance(entry, str):
        raise ValueError(f"prompt {prompt.id!r} has no columns task and entry: make its file with this module")
    given: Mapping[str, Any] = json.loads(entry)
    verifier = _verifier(task)
    try:
        return float(verifier.score_answer(answer_in(sample.text), given))
    except Exception:  # of 0.1.25, prime_factorization and boxnet raise for texts that are no answers
        verifier.score_answer(given["answer"], given)
        return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task")
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=JSON")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    options = {name: json.loads(value) for name, _, value in (text.partition("=") for text in args.set)}
    made = rows(args.task, args.size, args.seed, **options)
    replace_bytes(args.out, "".join(json.dumps(row) + "\n" for row in made).encode())


if __name__ == "__main__":
    main()

_: SampleReward = score  # mypy holds it to its Protocol here
