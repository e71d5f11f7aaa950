"""What quantization-aware training adds to a training step.

Trainers of the same model, seed and samples, one a process, take turns with one step each (forward with replayed
routes, loss, backward, clip, AdamW): one without quantization, one for each format, each recomputing what its linears
compute with once after every update. A figure is the median over the rounds of (step with) / (step without) - 1, in
seconds of processor time, so that what else the machine does counts little.

Judged are FP8 and INT4 at their default scopes. NVFP4, inputs rounded too, and the share of a step that recomputing the
weights alone takes, are reported.

    python benchmarks/qat_step.py [--quick] [--threads N] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from figures import add_write, finish
from train_step import WIDE, Work, fill, long_tailed, model_config
from transformers_step import LOSS, OPTIMIZER, Plain

from megatron_bridge.config import ParallelConfig, PrecisionConfig, ReplayConfig, TrainerConfig
from rollout.sglang.ports import free_port

GOALS = {"overhead_fp8_max": 0.15, "overhead_int4_max": 0.15}
WAYS: dict[str, dict[str, Any]] = {
    "without": {"format": "bf16"},
    "fp8": {"format": "fp8", "qat": True},
    "int4": {"format": "int4", "qat": True},
    "nvfp4": {"format": "nvfp4", "qat": True},
    "mxfp8, inputs too": {"format": "mxfp8", "qat": True, "activations": "fp8"},
}


def _serve(line: Connection, folder: Path, precision: dict[str, Any], port: int, threads: int) -> None:
    """A trainer; answers each message with the seconds of a step and of the recomputing in it."""
    from megatron_bridge.trainer import MegatronTrainer

    torch.set_num_threads(threads)
    config = TrainerConfig(
        hf_config=str(folder),
        parallel=ParallelConfig(),
        precision=PrecisionConfig(**precision),
        optimizer=OPTIMIZER,
        replay=ReplayConfig(),
    )
    t = MegatronTrainer(config, rank=0, world_size=1, master_addr="127.0.0.1", master_port=port, loss=LOSS)
    batch = torch.load(folder / "batch.pt", weights_only=False)
    stock, spent = t._step.prepare, [0.0]

    def prepare() -> None:
        start = time.process_time()
        stock()
        spent[0] += time.process_time() - start

    t._step.prepare = prepare
    while line.recv():
        spent[0] = 0.0
        start = time.process_time()
        t.step(batch.grid[0], batch.loss_tokens, 1)
        line.send((time.process_time() - start, spent[0]))
    t.close()


def overheads(
    work: Work, ways: Sequence[str], rounds: int, threads: int, folder: Path
) -> dict[str, tuple[float, float, float]]:
    """Way -> (overhead, share of a step that is spent on recomputing weights, seconds of a step)."""
    plain = Plain(work.hf, torch.bfloat16)
    torch.save(fill(plain, work), folder / "batch.pt")
    (folder / "config.json").write_text(json.dumps(work.hf))
    del plain
    context = multiprocessing.get_context("spawn")
    lines, processes = {}, []
    for name in ways:
        lines[name], theirs = context.Pipe()
        processes.append(context.Process(target=_serve, args=(theirs, folder, WAYS[name], free_port(), threads)))
        processes[-1].start()
    turns: list[dict[str, tuple[float, float]]] = []
    for _ in range(rounds + 2):
        turn = {}
        for name, line in lines.items():
            line.send(True)
            turn[name] = line.recv()
        turns.append(turn)
    for line in lines.values():
        line.send(False)
    for process in processes:
        process.join()
    turns = turns[2:]
    return {
        name: (
            statistics.median(turn[name][0] / turn["without"][0] for turn in turns) - 1,
            statistics.median(turn[name][1] / turn[name][0] for turn in turns),
            statistics.median(turn[name][0] for turn in turns),
        )
        for name in ways
    }


def main() -> int:
    """0 when the goals hold."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(p)
    p.add_argument("--quick", action="store_true", help="the tiny model alone")
    p.add_argument("--threads", type=int, default=1, help="of each trainer")
    p.add_argument("--rounds", type=int, default=9)
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # of the processes started from here
    works = {"tiny": Work(model_config(), long_tailed(4096, 64, 900))}
    if not args.quick:
        works["wide"] = Work(model_config(**WIDE), long_tailed(4096, 64, 900))
    rounds, figures = args.rounds, dict[str, float](threads=args.threads)
    print(f"{'':28}{'tokens':>8}{'seconds':>9}{'added':>8}{'weights':>9}   of a step, median of {rounds}")
    for model, work in works.items():
        with tempfile.TemporaryDirectory() as folder:
            got = overheads(work, list(WAYS)[: 3 if model == "wide" else None], rounds, args.threads, Path(folder))
        for way, (added, share, seconds) in got.items():
            print(f"{model + ', ' + way:28}{work.tokens:8}{seconds:9.3f}{added:8.1%}{share:9.1%}")
            key = f"{model}_{way}".replace(", ", "_").replace(" ", "_")
            figures |= {f"overhead_{key}": round(added, 4), f"weights_{key}": round(share, 4)}
    for name in ("fp8", "int4"):
        figures[f"overhead_{name}_max"] = max(figures[f"overhead_{model}_{name}"] for model in works)
    holds = all(figures[name] <= goal for name, goal in GOALS.items())
    finish("qat_step", figures, GOALS, holds)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
