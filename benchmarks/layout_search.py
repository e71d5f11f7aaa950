"""Seconds of `miles-like plan configs/deepseek_v3_fp8.toml --search --nodes 16`, on one core.

The search alone, pinned to one core: every division of 128 GPUs for trainer and servers is timed, and the fastest are
planned whole. Goal: 60 s of processor time. Other load makes the wall time longer.

    python benchmarks/layout_search.py [--write] [--quick]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from figures import ROOT, add_write, finish

from miles_like.config.load import load_config
from miles_like.device_table import device
from miles_like.planning.compose import IMBALANCE
from miles_like.run import assemble
from miles_like.run.step_time import Asked, searched

GOAL_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(parser)
    parser.add_argument("--quick", action="store_true", help="Qwen3-4B on one node")
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    name, nodes = ("qwen3_4b", 1) if args.quick else ("deepseek_v3_fp8", 16)
    run = load_config(Path(ROOT / "configs" / f"{name}.toml"))
    model = assemble.known_model(run)
    assert model is not None
    facts = Asked(prompt=None, response=None, reward_s=0.0).facts(run, device("H100"), IMBALANCE)
    wall, cpu = time.perf_counter(), time.process_time()
    found = searched(run, model, facts, nodes=str(nodes), formats=None, by=None)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    figures = {
        "configuration": name,
        "nodes": nodes,
        "cpu_s": cpu,
        "wall_s": wall,
        "considered": found.considered,
        "planned": found.planned,
        "layouts": len(found.found),
    }
    for key, value in figures.items():
        print(f"{key:16}{value!s:>24}")
    finish("layout_search", figures, {"cpu_s_max": GOAL_S}, cpu <= GOAL_S and bool(found.found))
    return 0 if cpu <= GOAL_S and found.found else 1


if __name__ == "__main__":
    sys.exit(main())
