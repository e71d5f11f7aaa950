"""Tables of docs/plan.md: devices, and predicted against published step times.

The rows are those of `miles_like/timing/published`: NeMo-RL v0.6, prime-rl, verl. Goal: two thirds within 25 %.

    python benchmarks/plan_figures.py [--write]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable

from figures import ROOT, write_block

from miles_like.device_table import DEVICES, GIB
from miles_like.timing.published.models import Row, published_shapes
from miles_like.timing.published.nemo_rl import DENSE, calibration, nemo_rl
from miles_like.timing.published.others import prime_rl, verl
from miles_like.timing.rates.calibration import PRODUCTS, REACHED

PAGE = ROOT / "docs" / "plan.md"
WITHIN = 0.25


def devices() -> list[str]:
    head = ["device", "GiB", "BF16", "FP8", "HBM", "NVLink", "network", "host", "domain", "node"]
    lines = [f"| {' | '.join(head)} | products | reached |", "|---" * (len(head) + 2) + "|"]
    for d in DEVICES.values():
        fp8 = "-" if d.fp8 is None else f"{d.fp8 / 1e12:,.0f}"
        rates = [f"{d.hbm / 1e9:,.0f}", *(f"{x / 1e9:,.4g}" for x in (d.intra, d.inter, d.host))]
        node = f"{d.node_gpus}, {d.node_memory / GIB:,.0f}, {d.node_disk / 1e12:.1f}, {d.disk / 1e9:.0f}"
        cells = [d.name, f"{d.memory / GIB:.1f}", f"{d.bf16 / 1e12:,.0f}", fp8, *rates, str(d.domain), node]
        lines.append(f"| {' | '.join(cells)} | {PRODUCTS[d.name]:.2f} | {REACHED[d.name]:.2f} |")
    return lines


def errors(rows: Iterable[Row]) -> list[str]:
    lines = ["| | run | published | predicted | error | decided by |", "|---|---|---|---|---|---|"]
    for row in rows:
        seen, predicted = (f"{x:,.4g} {row.unit}" for x in (row.seen, row.predicted))
        mark = "" if abs(row.error) <= WITHIN else " *"
        lines.append(f"| {row.source} | {row.name} | {seen} | {predicted} | {row.error:+.0%}{mark} | {row.decides} |")
    return lines


def within(rows: list[Row]) -> int:
    return sum(abs(row.error) <= WITHIN for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/plan.md")
    args = parser.parse_args()
    shapes = published_shapes(ROOT / "configs")
    held = [*nemo_rl(shapes), *prime_rl(shapes), *verl(shapes)]
    dense, more = list(nemo_rl(shapes, DENSE)), list(prime_rl(shapes, more=True))
    found = {name: round(value, 3) for name, value in calibration(shapes).items()}
    lines = [
        "**Devices**",
        "",
        *devices(),
        "",
        f"**Held rows**: {within(held)} of {len(held)} within {WITHIN:.0%}; * marks the others.",
        "",
        *errors(held),
        "",
        f"**Runs that calibrate** (median per device: {', '.join(f'{k} {v}' for k, v in found.items())}):",
        "",
        *errors(dense),
        "",
        f"**Further rows of prime-rl's page**: {within(more)} of {len(more)} within {WITHIN:.0%}.",
        "",
        *errors(more),
    ]
    print("\n".join(lines))
    figures = {"held": len(held), "within": within(held), "more": len(more), "more_within": within(more)}
    good = within(held) >= 2 * len(held) / 3
    print(json.dumps({"name": "plan_figures", "figures": figures, "goals": {"share_min": 2 / 3}, "holds": good}))
    if args.write:
        write_block(PAGE, "benchmarks/plan_figures.py", lines)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
