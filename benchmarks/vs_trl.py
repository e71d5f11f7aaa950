"""One GRPO iteration of ours beside TRL's GRPOTrainer on CPU: rollout, scoring, optimizer step and publish included.

Both have the same checkpoint (configs/tiny/model.json, random weights), the same prompts in the same order, 32 of them
with 8 samples each, the same reward function, loss (clipped, mean over the batch's tokens, no KL), AdamW and clipping,
fp32 parameters, and one thread and one core each. TRL is one process. Ours is what a run is: a driver, a trainer rank
and a rollout server behind HTTP with R3 on, which all share the one core. The sides take turns and change cores after
each; figures are medians of pairs of turns that lie next to each other in time. `cpu_ratio` is of the processor time
of all processes of a side.

(a) "equal": every answer has 12 tokens. (b) "long_tail": most answers are short, a few long, up to 128 tokens.
Neither side is given the lengths: both sides sample them from the checkpoint, whose weights are crafted so that the
probability of the end token depends on the last token alone (`craft`). What each side drew is printed.

Goals: samples/s of ours / TRL's >= 1.0 at equal lengths, >= 2 on long-tailed ones, by the clock.

    python benchmarks/vs_trl.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from figures import add_write, finish
from iteration import PHASES, ROOT, Side, cpu_seconds, started
from rich.console import Console
from rich.table import Table
from trl_side import TrlSide, TrlWork

from megatron_bridge.families.registry import family_of
from miles_like.config.load import load_config
from miles_like.config.run import ModelConfig, RunConfig
from miles_like.config.sections.algorithm import Clipped
from miles_like.hf.checkpoint import write_hf
from miles_like.nodes.session import start_ray
from miles_like.pipeline.warmup import random_weights
from miles_like.run import assemble
from miles_like.run.setup.launcher import Launcher, freeze_gc
from miles_like.run.setup.model_plan import model_plan
from miles_like.run.setup.rollout_side import RolloutSide
from miles_like.types import NamedTensor
from rollout.prompts.mix import PromptSource

GOALS = {"ratio_equal_min": 1.0, "ratio_long_tail_min": 2.0}
PROMPTS, SAMPLES = 32, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Probabilities of the next step of an answer, given its last token's kind; `longest` ends every answer."""

    longest: int
    end_of_short: float  # after a token of a short answer
    end_of_long: float
    begins_long: float  # of the first token


WORKS = {
    "equal": Lengths(longest=12, end_of_short=0.0, end_of_long=0.0, begins_long=0.0),
    "long_tail": Lengths(longest=128, end_of_short=1 / 8, end_of_long=1 / 60, begins_long=0.1),
}


# the checkpoint

_END, _SHORT, _LONG, _NEVER = range(4)  # classes of tokens
_CONSTANT = 32.0  # of a token's kind in the residual stream, beside values near 1


def craft(hf: Mapping[str, Any], tokenizer: Any, lengths: Lengths) -> Iterator[NamedTensor]:
    """Random weights in which three residual dimensions carry the last token's kind (short answer, long answer, end of
    the prompt) past every layer to the output, whose rows turn it into the odds of what follows."""
    last, vocabulary = tokenizer.encode("=", add_special_tokens=False)[-1], int(hf["vocab_size"])
    classes = [_SHORT] * vocabulary
    classes[-vocabulary // 8 :] = [_LONG] * -(-vocabulary // 8)
    classes[tokenizer.eos_token_id] = _END
    for never in (tokenizer.pad_token_id, tokenizer.unk_token_id, last):
        classes[never] = _NEVER
    odds = _logits(lengths, short=classes.count(_SHORT), long=classes.count(_LONG))
    seen = _CONSTANT / math.sqrt(_CONSTANT**2 / hf["hidden_size"] + 1)  # after the last norm
    shapes = {p.hf_name: p.shape for p in family_of(hf).bind(hf).places()}
    for name, tensor in random_weights(shapes, hf, seed=0):
        if name.endswith("embed_tokens.weight"):
            tensor[:, :3] = 0
            for token, of in enumerate(classes):
                tensor[token, 2 if token == last else int(of == _LONG)] = _CONSTANT
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[:3] = 0
        elif name.endswith("mlp.gate.weight"):
            tensor[:, :3] = 0  # experts are chosen by the rest
        elif name == "lm_head.weight":
            for token, of in enumerate(classes):
                for kind in range(3):
                    tensor[token, kind] = odds[kind][of] / seen
        yield NamedTensor(name, tensor)


def _logits(lengths: Lengths, *, short: int, long: int) -> list[dict[int, float]]:
    """After each kind of token: what each class' tokens get, of which there are `short` and `long`."""
    no = -40.0

    def odds(p: float, others: int) -> float:
        return math.log(p / (1 - p) * others) if p else no

    return [
        {_SHORT: 0.0, _LONG: no, _NEVER: no, _END: odds(lengths.end_of_short, short)},
        {_SHORT: no, _LONG: 0.0, _NEVER: no, _END: odds(lengths.end_of_long, long)},
        {_SHORT: 0.0, _LONG: odds(lengths.begins_long, short) - math.log(long), _NEVER: no, _END: no},
    ]


def checkpoint(path: Path, lengths: Lengths) -> None:
    from transformers import AutoTokenizer

    tiny = ROOT / "configs" / "tiny"
    hf = json.loads((tiny / "model.json").read_text())
    write_hf(path, craft(hf, AutoTokenizer.from_pretrained(tiny), lengths), hf)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(tiny / name, path / name)


# our side


def configured(model: Path, lengths: Lengths) -> RunConfig:
    settings = [
        *("parallel.dp=1", "parallel.ep=1", "precision.format=bf16", "precision.qat=false"),
        *(f"train.groups_per_step={PROMPTS}", f"train.samples_per_group={SAMPLES}"),
        *(f"rollout.max_new_tokens={lengths.longest}", "optimizer.lr=1e-6", "optimizer.warmup_steps=0"),
        *(f"rollout.prompts_per_request={PROMPTS}", "reward.name=trl_side:digits"),  # one request: one core is shared
    ]
    config = load_config(ROOT / "configs" / "tiny.toml", settings)
    return config.model_copy(update={"model": ModelConfig(path=str(model))})


@dataclass(kw_only=True)
class Taken:
    """By one side, of each turn."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)


def pin(processes: Sequence[psutil.Process], core: int) -> None:
    """Every thread."""
    for process in processes:
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


@contextmanager
def timed(taken: Taken, processes: Sequence[psutil.Process]) -> Iterator[None]:
    worked, began = cpu_seconds(processes), time.perf_counter()
    yield
    taken.wall.append(time.perf_counter() - began)
    taken.cpu.append(cpu_seconds(processes) - worked)


async def turns(side: Side, trl: TrlSide, source: PromptSource, rounds: int, warm: int) -> dict[str, Taken]:
    freeze_gc()
    found = {"ours": Taken(), "trl": Taken()}
    ours: list[psutil.Process] = []
    theirs = [psutil.Process(trl.process.pid)]
    for turn in range(warm + rounds):
        if turn <= warm:  # what is started on demand has been by then
            found = {"ours": Taken(), "trl": Taken()}
            side.seconds = {name: [] for name in side.seconds}
            ours = [p for p in started() if p not in theirs]
        pin(ours, turn % 2)
        pin(theirs, 1 - turn % 2)
        for name in ("ours", "trl") if turn % 4 < 2 else ("trl", "ours"):
            if name == "ours":
                with timed(found[name], ours):
                    groups = await side.iterate(turn, source)
                found[name].lengths += [s.response_len for g in groups for s in g.samples]
            else:
                with timed(found[name], theirs):
                    lengths = trl.iterate()
                found[name].lengths += lengths
    await side.engine.close()
    await side.trainer.close()
    return found


def measure(lengths: Lengths, home: Path, rounds: int) -> tuple[dict[str, Taken], Side]:
    console = Console(quiet=True)
    model, run_dir = home / "model", home / "run"
    checkpoint(model, lengths)
    config = configured(model, lengths)
    root = assemble.staged(config, run_dir, console, None)
    start_ray(None)
    plan = model_plan(config, run_dir, root / "hf", root / "megatron")
    in_fp32 = plan.model.trainer.model_copy(update={"params_dtype": "float32"})  # TRL's default, and its masters'
    rollout = RolloutSide(plan=dataclasses.replace(plan, model=dataclasses.replace(plan.model, trainer=in_fp32)))
    source = PromptSource(config.data, plan.tokenizer, config.data.train)
    prompts = [p.text for p in PromptSource(config.data, plan.tokenizer, config.data.train).take(PROMPTS * 200)]
    loss = config.algorithm.parts.loss
    assert isinstance(loss, Clipped), loss
    launcher = Launcher()
    servers = launcher.servers(rollout, 0)
    try:
        trl = TrlSide(
            TrlWork(
                model=model,
                prompts=prompts,
                prompts_a_step=PROMPTS,
                samples=SAMPLES,
                max_new_tokens=lengths.longest,
                dtype="float32",
                optimizer=config.optimizer,
                clip=(loss.clip_low, loss.clip_high),
                core=1,
                scratch=home / "trl",
            )
        )
        side = Side(rollout, launcher.nodes(plan), servers.wait()[0], name="ours", routing=True)
        found = asyncio.run(turns(side, trl, source, rounds, warm=3))
        trl.close()
    finally:
        servers.stop()
    return found, side


def figures_of(found: Mapping[str, Taken], side: Side) -> dict[str, float]:
    per_turn = PROMPTS * SAMPLES
    figures: dict[str, float] = {}
    for name, taken in found.items():
        figures[f"{name}_samples_per_s"] = per_turn / statistics.median(taken.wall)
        figures[f"{name}_iteration_s"] = statistics.median(taken.wall)
        figures[f"{name}_cpu_s"] = statistics.mean(taken.cpu)
        figures[f"{name}_tokens_mean"] = statistics.mean(taken.lengths)
        figures[f"{name}_tokens_median"] = statistics.median(taken.lengths)
        figures[f"{name}_tokens_max"] = max(taken.lengths)
    figures |= {f"ours_{phase}_s": statistics.median(side.seconds[phase]) for phase in PHASES}
    ours, trl = found["ours"], found["trl"]
    figures["ratio"] = statistics.median(b / a for a, b in zip(ours.wall, trl.wall, strict=True))
    figures["cpu_ratio"] = sum(trl.cpu) / sum(ours.cpu)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(parser)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--work", choices=tuple(WORKS), action="append", help="only this one")
    given = parser.parse_args()
    os.sched_setaffinity(0, {0})
    figures: dict[str, float] = {}
    for name in given.work or WORKS:
        rounds = (8 if name == "equal" else 4) if given.quick else (40 if name == "equal" else 16)
        with tempfile.TemporaryDirectory() as home:
            try:
                found, side = measure(WORKS[name], Path(home), rounds)
            finally:
                assemble.shut_down()
        figures |= {f"{key}_{name}": value for key, value in figures_of(found, side).items()}
    report(figures, given.work or list(WORKS))


def report(figures: Mapping[str, float], works: Sequence[str]) -> None:
    table = Table("figure", *works, title=f"one iteration, {PROMPTS} prompts x {SAMPLES} samples, medians")
    for key in [k.removesuffix(f"_{works[0]}") for k in figures if k.endswith(f"_{works[0]}")]:
        table.add_row(key, *(f"{figures[f'{key}_{work}']:.3f}" for work in works))
    Console().print(table)
    goals = {k: v for k, v in GOALS.items() if k.removeprefix("ratio_").removesuffix("_min") in works}
    holds = all(figures[k.removesuffix("_min")] >= goal for k, goal in goals.items())
    finish("vs_trl", figures, goals, holds)


if __name__ == "__main__":
    main()
