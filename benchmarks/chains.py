"""The chains of docs/recipes, run whole as their pages show them, and the figures of each page.

    python benchmarks/chains.py [NAME...] [--home DIR] [--write]

Every command of a page is run in DIR (by default a temporary directory), where it can use what an earlier page left:
the warmed-up model is made once. Figures come from the runs' metrics.jsonl, seconds are by the clock, those of a
command include its start. Goal: each figure is better after its stage than before.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from figures import END, ROOT, begin, write_block

sys.path.insert(0, str(ROOT))  # the reader of pages is the tests' one
from tests.support.pages import blocks
from tests.support.reader import Reader

SCRIPT = "benchmarks/chains.py"
HEADING = "## What came out\n"  # of a page, above its block
SAMPLED = "eval/heldout/avg@4"
RANKED = "eval/chain_pairs_heldout/accuracy"
PREFERRED = "eval/chain_pref_pairs_heldout/accuracy"
FROM_PAIRS = "eval |data pairs|"  # the answers and the pairs, and then the training
REWARD_MODEL = rf"{FROM_PAIRS}runs/chain_reward( |$)"
DPO = rf"{FROM_PAIRS}runs/chain_pref_dpo( |$)"
Find = Callable[[Path], float]


def first(run: str, key: str) -> Find:
    return lambda runs: _rows(runs / run)[0][key]


def last(run: str, key: str) -> Find:
    return lambda runs: _rows(runs / run)[-1][key]


def of_file(name: str, key: str) -> Find:
    return lambda runs: float(json.loads((runs / name).read_text())[key])


def tied(runs: Path) -> float:
    """Before the first step the two answers of each pair are equal, and a tie is half right."""
    return 0.5


def _rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@dataclass(frozen=True)
class Row:
    stage: str
    figure: str
    before: Find
    after: Find
    commands: str = ""  # pattern of the commands whose seconds are the row's; "": those of another row


def answer_probability(run: str, commands: str) -> Row:
    key = "eval/heldout/answer_prob"
    return Row("SFT", "probability of the right answer", first(run, key), last(run, key), commands)


ACCURACY = "accuracy of 4 samples"  # what a policy's training raises: the expected reward
OF_PAIRS = "held-out pairs ranked right"
CHAINS = {
    "chain_reward_model": [
        answer_probability("chain_sft", r"demonstrations.py|runs/chain_sft( |$)"),
        Row("reward model", OF_PAIRS, tied, last("chain_reward", RANKED), REWARD_MODEL),
        Row("PPO", ACCURACY, first("chain_ppo", SAMPLED), last("chain_ppo", SAMPLED), "train .*ppo.toml"),
    ],
    "chain_preferences": [
        answer_probability("chain_pref_sft", r"runs/chain_pref_sft( |$)"),
        Row("DPO", OF_PAIRS, tied, last("chain_pref_dpo", PREFERRED), DPO),
        Row("DPO", ACCURACY, of_file("chain_pref_sft.json", SAMPLED), first("chain_pref_grpo", SAMPLED)),
        Row("GRPO", ACCURACY, first("chain_pref_grpo", SAMPLED), last("chain_pref_grpo", SAMPLED), "grpo.toml"),
    ],
    "chain_reasoning": [
        Row(
            "SFT",
            "probability of the whole worked answer",
            first("chain_cot_sft", "eval/cot_check/answer_prob"),
            last("chain_cot_sft", "eval/cot_check/answer_prob"),
            "cot.py|cot_sft",
        ),
        Row(
            "GRPO",
            ACCURACY,
            first("chain_cot_grpo", SAMPLED),
            last("chain_cot_grpo", SAMPLED),
            "train .*cot_grpo|export .*cot_grpo",
        ),
        Row("student", ACCURACY, first("chain_student", SAMPLED), last("chain_student", SAMPLED), "student.toml"),
    ],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(CHAINS)}; default: all")
    parser.add_argument("--home", type=Path, help="an empty directory, or that of an earlier call")
    parser.add_argument("--write", action="store_true", help="put the figures into the pages")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in CHAINS]:
        parser.error(f"{unknown[0]!r} is no chain: {', '.join(CHAINS)}")
    with tempfile.TemporaryDirectory() as made:
        home = Path(made) / "home" if given.home is None else given.home
        home.mkdir(parents=True, exist_ok=True)
        holds = [measure(Reader(home), name, write=given.write) for name in given.names or CHAINS]
    return 0 if all(holds) else 1


def measure(reader: Reader, name: str, *, write: bool) -> bool:
    """Runs a chain and prints its figures; whether its goal holds."""
    page = ROOT / "docs" / "recipes" / f"{name}.md"
    began = time.monotonic()
    for block in blocks(page):
        reader.follow(block)
    whole, rows = time.monotonic() - began, CHAINS[name]
    better = []
    lines = ["| stage | figure | before | after | s |", "|---|---|---|---|---|"]
    for row in rows:
        before, after = (find(reader.home / "runs") for find in (row.before, row.after))
        better.append(after > before)
        seconds = spent(reader.seconds, row.commands)
        lines.append(f"| {row.stage} | {row.figure} | {before:.3f} | {after:.3f} | {seconds} |")
    print("\n".join(lines))
    print(
        json.dumps({"name": name, "figures": {"whole_s": round(whole)}, "goals": {}, "holds": all(better)}), flush=True
    )
    if write:
        text = page.read_text()
        if begin(SCRIPT) not in text:
            page.write_text(text.replace(HEADING, f"{HEADING}\n{begin(SCRIPT)}\n{END}\n", 1))
        write_block(page, SCRIPT, [*lines, "", f"The whole chain took {whole:.0f} s."])
    return all(better)


def spent(seconds: Sequence[tuple[str, float]], pattern: str) -> str:
    """By the commands that match; "": none, as of a row whose seconds are another one's."""
    found = [s for line, s in seconds if pattern and re.search(pattern, line)]
    return f"{sum(found):.0f}" if found else ""


if __name__ == "__main__":
    sys.exit(main())
