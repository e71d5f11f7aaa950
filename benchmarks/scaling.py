"""How the time of an iteration grows with samples a step, tokens a sample and experts, and of a start with prompts.

An iteration is what data_plane_workers.py does with a round: one worker samples groups of four from a replayed server,
the driver gets records, plans and has the portions cut, and a process that stands for the ranks fills their
micro-batches and compares the routes with routers' choices, which is what depends on the number of experts. Model,
rewards and optimizer are left out. Shape: 4 layers with experts, top 8 of 64. Samples: of 256 tokens, so that the
largest step fits the 512 MiB of the object store of a Ray that a run starts; tokens and experts: 64 samples, experts
with 4,096 tokens.

A start reads a jsonl file of short prompts, in a fresh process for each size and with a stand-in for the tokenizer, of
one token a byte: seconds by the clock, and resident memory after it and at its peak, beyond that before.

Each axis is fitted as seconds = a * x^b by least squares of the logarithms: over the upper half of its points, where
fixed costs are small, and over all. Goal: b of the upper half at most 1.05, 1 with room for noise, and at most 200
bytes a prompt with the most prompts, where the buffers of a fixed size are small.

    python benchmarks/scaling.py [--quick] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import re
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import ray
from data_plane import VOCABULARY, recorded, replayed
from data_plane_workers import G, Measured, Rank, Replayed, with_workers
from figures import add_write, finish

from miles_like.nodes.session import start_ray, stop_ray
from rollout.prompts.config import DataConfig
from rollout.prompts.mix import PromptSource
from rollout.sglang.samples import RoutingShape

LAYERS, TOP_K, EXPERTS, TOKENS, GROUPS = 4, 8, 64, 256, 16
SAMPLES = [64, 128, 256, 512, 1024, 2048, 4096, 8192]
LENGTHS = [16, 64, 256, 1 << 10, 4 << 10, 16 << 10, 32 << 10]
OF_EXPERTS, OF_EXPERTS_TOKENS = [8, 16, 32, 64, 128, 256], 4 << 10
PROMPTS = [1_000, 10_000, 100_000, 1_000_000, 10_000_000]
MOST = 1.05
GOALS = {
    **{f"{axis}_exponent_max": MOST for axis in ("samples", "tokens", "experts", "prompts")},
    "bytes_a_prompt_max": 200,
    "peak_bytes_a_prompt_max": 200,
}


class Point(NamedTuple):
    x: int
    seconds: float
    beside: str  # further figures, as text


def rounds(rank: Any, experts: int, tokens: int, groups: Sequence[int]) -> list[Measured]:
    """Of each round after a first one of processes that are cold."""
    shape = RoutingShape(num_layers=LAYERS, moe_layers=tuple(range(LAYERS)), top_k=TOP_K, num_experts=experts)
    prompt = min(256, tokens // 2)
    with replayed(recorded(tokens, shape, prompt)) as url, tempfile.TemporaryDirectory() as logs:
        recipe = Replayed(shape, VOCABULARY, tokens)
        return with_workers([url], recipe, range(prompt), groups=[GROUPS, *groups], logs=Path(logs), rank=rank)[1:]


def median(axis: str, x: int, found: Sequence[Measured]) -> Point:
    driver = statistics.median(one.driver_s for one in found) * 1e3
    seconds = statistics.median(one.iteration_s for one in found)
    groups = f"{x // G:,} groups, " if axis == "samples" else ""
    return shown(axis, Point(x, seconds, f"{groups}driver {driver:.3f} ms a sample"))


def shown(axis: str, point: Point) -> Point:
    print(f"{axis} {point.x}: {point.seconds:.4g} s, {point.beside}", flush=True)
    return point


def of_samples(rank: Any, sizes: Sequence[int], most: int) -> list[Point]:
    """most: samples over all rounds of a size, of which there is one at least and five at most."""
    repeats = [min(5, max(1, most // n)) for n in sizes]
    found = rounds(rank, EXPERTS, TOKENS, [n // G for n, k in zip(sizes, repeats, strict=True) for _ in range(k)])
    ends = list(accumulate(repeats))
    return [median("samples", n, found[end - k : end]) for n, k, end in zip(sizes, repeats, ends, strict=True)]


def of_lengths(rank: Any, lengths: Sequence[int], count: int) -> list[Point]:
    return [median("tokens", tokens, rounds(rank, EXPERTS, tokens, [GROUPS] * count)) for tokens in lengths]


def of_experts(rank: Any, numbers: Sequence[int], count: int) -> list[Point]:
    return [median("experts", n, rounds(rank, n, OF_EXPERTS_TOKENS, [GROUPS] * count)) for n in numbers]


class Bytes:
    """A tokenizer of one token a byte."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode()

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        return "".join(m["content"] for m in conversation)


def _prompts(path: Path, n: int) -> None:
    with path.open("w") as out:
        for i in range(n):
            out.write(f'{{"id": "r{i}", "prompt": "what is {i} + {i}?", "answer": "{2 * i}"}}\n')


def _start(path: str) -> tuple[float, int, int]:
    """Seconds, and bytes after the start and at its peak. The peak is reset before it (Linux)."""

    def peak() -> int:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) << 10

    process, tokenizer = psutil.Process(), Bytes()
    Path("/proc/self/clear_refs").write_text("5")
    before, before_peak, began = process.memory_info().rss, peak(), time.perf_counter()
    source = PromptSource(DataConfig(train=path), tokenizer, path)
    seconds = time.perf_counter() - began
    out = seconds, process.memory_info().rss - before, peak() - before_peak
    assert source.take(1)
    return out


def of_prompts(sizes: Sequence[int]) -> tuple[list[Point], float, float]:
    """Points, and bytes a prompt of the most prompts, after the start and at its peak."""
    out, after, peak = list[Point](), 0.0, 0.0
    for n in sizes:
        with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(1) as pool:
            small, path = Path(folder, "small.jsonl"), Path(folder, "prompts.jsonl")
            _prompts(small, 100)
            _prompts(path, n)
            pool.apply(_start, (str(small),))  # what is imported and made once
            seconds, kept, most = pool.apply(_start, (str(path),))
        after, peak = kept / n, most / n
        beside = f"{seconds / n * 1e6:.3g} s a million, {after:.3g} bytes a prompt, {peak:.3g} at the peak"
        out.append(shown("prompts", Point(n, seconds, beside)))
    return out, after, peak


def exponent(points: Sequence[Point]) -> float:
    """b of seconds = a * x^b."""
    x, y = np.log([p.x for p in points]), np.log([p.seconds for p in points])
    return float(np.polyfit(x, y, 1)[0])


def lines(axes: Mapping[str, Sequence[Point]], figures: Mapping[str, float]) -> list[str]:
    """Tables of the fits and of the points."""
    out = ["", "| axis | b of the upper half | b of all | goal |", "|---|---|---|---|"]
    out += [
        f"| {axis} | {figures[f'{axis}_exponent']:.3f} | {figures[f'{axis}_exponent_all']:.3f} | <= {MOST} |"
        for axis in axes
    ]
    out += [
        f"| bytes a prompt, {when} | {figures[key]:.1f} | | <= {GOALS[f'{key}_max']} |"
        for key, when in (("bytes_a_prompt", "after the start"), ("peak_bytes_a_prompt", "at its peak"))
    ]
    out += ["", "| axis | x | seconds | beside |", "|---|---|---|---|"]
    out += [f"| {axis} | {p.x:,} | {p.seconds:.4g} | {p.beside} |" for axis, points in axes.items() for p in points]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="fewer and smaller points, and no more than 100,000 prompts"
    )
    add_write(parser)
    quick = parser.parse_args().quick
    axes = dict[str, list[Point]]()
    axes["prompts"], after, peak = of_prompts(PROMPTS[:3] if quick else PROMPTS)
    start_ray(None)
    with contextlib.ExitStack() as ends:
        ends.callback(stop_ray)
        rank = ray.remote(num_cpus=0)(Rank).remote()
        axes["samples"] = of_samples(rank, SAMPLES[:5:2] if quick else SAMPLES, 1 << 8 if quick else 2 << 10)
        axes["tokens"] = of_lengths(rank, LENGTHS[::3] if quick else LENGTHS, 1 if quick else 3)
        axes["experts"] = of_experts(rank, OF_EXPERTS[::5] if quick else OF_EXPERTS, 1 if quick else 3)
    figures: dict[str, float] = {"bytes_a_prompt": after, "peak_bytes_a_prompt": peak}
    for axis, points in axes.items():
        figures[f"{axis}_exponent"] = exponent(points[len(points) // 2 :] if len(points) > 3 else points[-2:])
        figures[f"{axis}_exponent_all"] = exponent(points)
    made = lines(axes, figures)
    print("\n".join(made))
    finish("scaling", figures, GOALS, all(figures[key[:-4]] <= goal for key, goal in GOALS.items()), lines=made)


if __name__ == "__main__":
    main()
