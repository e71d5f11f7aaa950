"""What the checks of a running job cost: shares of an iteration of configs/tiny.toml, at their default periods.

- `routes_share`: the agreement of replayed routes with the trainer's own choice, counted in every step: its time for an
  iteration's rows on one thread, over the whole iteration. `routes_share_of_sets`: of that, the comparison of whole
  sets, `routing/agreement`, alone.
- `compare_share`: the comparison of both sides, every mismatch.check_every steps.
- `checksums_share`: the hashes of all served tensors, every mismatch.checksums_every steps.

All are ratios of times of one process family and one run. Goal: together <= 2 % of an iteration.

    python benchmarks/checks.py [--quick]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from figures import add_write, finish
from iteration import ROOT, by_turns, medians
from r3 import median_ms
from rich.console import Console
from rich.table import Table

from miles_like.config.load import load_config
from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.run import assemble
from rollout.wire.checksum import tensor_checksum
from routing_replay.agreement import count_routes, topk_agreement

GOALS = {"checks_share_max": 0.02}


def routes_ms(rows: int, layers: int, experts: int, top_k: int, turns: int) -> tuple[float, float]:
    """Of all layers: (what a step counts, the comparison of sets alone)."""
    g = torch.Generator().manual_seed(0)
    ids = torch.rand(rows, experts, generator=g).topk(top_k).indices
    recorded, real = ids.to(torch.uint8), torch.ones(rows, dtype=torch.bool)

    def every() -> None:
        for _ in range(layers):
            count_routes(ids, recorded, real, experts)

    def sets() -> None:
        for _ in range(layers):
            topk_agreement(ids, recorded)

    return median_ms(every, turns), median_ms(sets, turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(parser)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    config = load_config(ROOT / "configs" / "tiny.toml", ["model.make.max_steps=0"])
    with tempfile.TemporaryDirectory() as home:
        try:
            (side,) = by_turns({"r3": (config, True)}, Path(home), iterations=6 if quick else 30)
            served = HFCheckpoint(side.rollout.plan.served)
            held = list(served.stream())
            hashes_ms = median_ms(lambda: [tensor_checksum(name, x) for name, x in held], 3 if quick else 9)
        finally:
            assemble.shut_down()
    hf, family = side.rollout.plan.hf.config, side.rollout.plan.model.family
    step_s = medians(side)["iteration_s"]
    rows = config.train.groups_per_step * config.train.samples_per_group * 15  # tokens, of a prompt and its answer
    shape = (len(family.moe_layers(hf)), family.num_experts(hf), family.top_k(hf))
    counted, sets = routes_ms(rows, *shape, turns=9)
    m = config.mismatch
    figures = {
        "iteration_s": step_s,
        "routes_ms": counted,
        "routes_share": counted / 1e3 / step_s,
        "routes_share_of_sets": sets / counted,
        "compare_s": side.compared_again,
        "compare_share": side.compared_again / (m.check_every * step_s),
        "checksums_ms": hashes_ms,
        "checksums_share": hashes_ms / 1e3 / (m.checksums_every * step_s),
    }
    figures["checks_share"] = sum(figures[f"{what}_share"] for what in ("routes", "compare", "checksums"))
    big, big_sets = routes_ms(8192, 58, 256, 8, turns=3)
    figures |= {"deepseek_v3_8192_tokens_ms": big, "deepseek_v3_8192_tokens_sets_ms": big_sets}
    table = Table("figure", "value", title="checks of a running job")
    for name, value in figures.items():
        table.add_row(name, f"{value:.4f}")
    Console().print(table)
    holds = figures["checks_share"] <= GOALS["checks_share_max"]
    finish("checks", figures, GOALS, holds)


if __name__ == "__main__":
    main()
