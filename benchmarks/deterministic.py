"""What alignment.deterministic costs of one GRPO iteration of configs/tiny.toml: rollout, train and publish.

Two sides take turns, each with a separate server and trainer, so both see the same machine: the configuration as it is
shipped, and with the key. The key makes the engine compute in bfloat16, as the trainer does, instead of float32. Ratios
are medians of pairs that lie next to each other in time; `cpu_ratio` is of the processor time of all processes, which a
busy machine moves less. Without --quick also with answers of 64 tokens instead of 5, of which the rollout is more.
Goal: an iteration <= 1.5 times the plain one, at either length.

    python benchmarks/deterministic.py [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from figures import add_write, finish
from iteration import PHASES, ROOT, by_turns, medians
from rich.console import Console
from rich.table import Table

from miles_like.config.load import load_config
from miles_like.run import assemble

GOALS = {"ratio_max": 1.5}
LONGER = 64  # tokens of an answer


def ratios(settings: list[str], iterations: int) -> dict[str, float]:
    plain = load_config(ROOT / "configs" / "tiny.toml", settings)
    exact = load_config(ROOT / "configs" / "tiny.toml", [*settings, "alignment.deterministic=true"])
    with tempfile.TemporaryDirectory() as home:
        try:
            sides = by_turns({"plain": (plain, True), "deterministic": (exact, True)}, Path(home), iterations)
        finally:
            assemble.shut_down()
    figures = {
        f"{how}_{name}": x
        for how, side in zip(("plain", "exact"), sides, strict=True)
        for name, x in medians(side).items()
    }
    for name in (*PHASES, "iteration"):
        pairs = zip(*(side.seconds[name] for side in sides), strict=True)
        figures["ratio" if name == "iteration" else f"ratio_in_{name}"] = statistics.median(b / a for a, b in pairs)
    of_plain, of_exact = (sum(side.seconds["cpu"]) for side in sides)  # of a hundredth's resolution: only the sum tells
    return figures | {"cpu_ratio": of_exact / of_plain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(parser)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    figures: dict[str, float] = {}
    for of, answer, turns in (("", 5, 6),) if quick else (("", 5, 30), (f"_of_{LONGER}", LONGER, 8)):
        found = ratios(["model.make.max_steps=0", f"rollout.max_new_tokens={answer}"], turns)
        figures |= {name + of: x for name, x in found.items()}
    table = Table("figure", "value", title="alignment.deterministic, medians")
    for name, value in figures.items():
        table.add_row(name, f"{value:.3f}")
    Console().print(table)
    holds = max(figures["ratio"], figures.get(f"ratio_of_{LONGER}", 0.0)) <= GOALS["ratio_max"]
    finish("deterministic", figures, GOALS, holds)


if __name__ == "__main__":
    main()
