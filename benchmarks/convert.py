"""Conversion beside a plain copy: GB/s of to-megatron and to-hf, and the peak of their memory.

A synthetic checkpoint of Qwen3-30B-A3B's real shapes with fewer layers is copied by a loop that reads and writes 8 MiB
at a time and syncs each file, then converted to Megatron shards and back, by turns that begin alike (`seconds_of`);
each figure is the median over the rounds of a turn's speed over the plain copy's of the same round. The first round
does not count. The model also goes to block FP8, and from there to Megatron in one pass; those speeds are of the BF16
bytes too, and have no goal.

The time for 671 B parameters on one node is extrapolated from bytes alone; nothing of that size was run.

    python benchmarks/convert.py [--quick] [--workers N] [--directory DIR]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from figures import add_write, finish

from megatron_bridge.convert.to_hf import to_hf
from megatron_bridge.convert.to_megatron import to_megatron
from megatron_bridge.families.registry import family_of
from miles_like.hf.checkpoint import write_hf

GOALS = {"to_megatron_of_copy_min": 0.5, "to_hf_of_copy_min": 0.5}
LIMIT = 4 << 30
V3_BYTES = 2 * 671_026_404_352
QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
}


def random_tensors(hf: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor, cut out of one block of random numbers at a different place each."""
    tensors = family_of(hf).bind(hf)
    block = torch.randn(64 << 20, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for number, place in enumerate(tensors.places()):
        size = torch.Size(place.shape).numel()
        start = number * 7919 % 4096
        flat = block[start : start + size]
        if len(flat) < size:
            flat = block.repeat(-(-size // len(block)))[:size]
        yield place.hf_name, flat.view(place.shape).to(tensors.dtype(place.entry))


def copy_plainly(source: Path, target: Path) -> None:
    target.mkdir()
    buffer = bytearray(8 << 20)
    for file in sorted(source.iterdir()):
        with file.open("rb", buffering=0) as read, (target / file.name).open("wb", buffering=0) as write:
            while n := read.readinto(buffer):
                write.write(memoryview(buffer)[:n])
            os.fsync(write.fileno())


def resident_bytes(process: int) -> int:
    """Of a process and all it started."""
    try:
        fields = Path(f"/proc/{process}/statm").read_text().split()
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return 0  # it has just ended
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") + sum(resident_bytes(int(child)) for child in children)


class Peak:
    """The most that this process and its children held together, looked at 20 times a second."""

    def __enter__(self) -> Peak:
        self.bytes, self._end = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.05):
            self.bytes = max(self.bytes, resident_bytes(os.getpid()))


def seconds_of(work: Callable[[], object], base: Path, nbytes: int) -> float:
    """Of the work, which will write about `nbytes` below `base`.

    As many are written and removed just before: a virtual machine gives memory back that was free for a second, and a
    turn that had to fetch it again would pay for its place in the order.
    """
    zeros = bytes(8 << 20)
    with (base / "memory").open("wb", buffering=0) as file:
        for _ in range(nbytes // len(zeros)):
            file.write(zeros)
        os.fsync(file.fileno())
    (base / "memory").unlink()
    os.sync()  # what an earlier turn left to be written is not this one's
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> int:
    """0 when the goals hold."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(p)
    p.add_argument("--quick", action="store_true", help="one layer: 2.5 GB")
    p.add_argument("--workers", type=int, default=1, help="processes")
    p.add_argument("--directory", type=Path, help="for some 20 GB; a temporary one else")
    args = p.parse_args()
    hf = QWEN3_30B | {"num_hidden_layers": 1 if args.quick else 3}
    base = Path(tempfile.mkdtemp(dir=args.directory))
    try:
        figures, peak = measure(base, hf, rounds=3, workers=args.workers)
    finally:
        shutil.rmtree(base)
    hours = V3_BYTES / 1e9 / figures["to_megatron_gb_per_s"] / 3600
    print(f"peak of the resident memory: {peak / (1 << 30):.2f} GiB, limit {LIMIT >> 30} GiB")
    print(f"extrapolated, not run: 671 B parameters in BF16 to Megatron on one such node in {hours:.2f} h")
    figures |= {"peak_gib": round(peak / (1 << 30), 3), "extrapolated_671b_hours": round(hours, 3)}
    holds = peak <= LIMIT and all(figures[goal.removesuffix("_min")] >= least for goal, least in GOALS.items())
    finish("convert", figures, GOALS, holds)
    return 0 if holds else 1


def measure(base: Path, hf: dict[str, Any], *, rounds: int, workers: int) -> tuple[dict[str, float], int]:
    """(figures, peak in bytes) of `rounds` counted rounds and one before."""
    source = base / "source"
    nbytes = write_hf(source, random_tensors(hf), hf, shard_bytes=1 << 30)
    how: dict[str, Any] = {"memory_limit": LIMIT, "workers": workers}
    turns: list[tuple[float, float, float]] = []
    coded: list[tuple[float, float]] = []
    most = 0
    for _ in range(rounds + 1):
        plain = seconds_of(lambda: copy_plainly(source, base / "copy"), base, nbytes)
        shutil.rmtree(base / "copy")
        with Peak() as peak:
            there = seconds_of(lambda: to_megatron(source, base / "megatron", **how), base, nbytes)
            back = seconds_of(lambda: to_hf(base / "megatron", base / "back", **how), base, nbytes)
            shutil.rmtree(base / "back")
            encode = seconds_of(lambda: to_hf(base / "megatron", base / "fp8", format="fp8", **how), base, nbytes)
            shutil.rmtree(base / "megatron")
            decode = seconds_of(lambda: to_megatron(base / "fp8", base / "megatron", **how), base, nbytes)
        shutil.rmtree(base / "megatron")
        shutil.rmtree(base / "fp8")
        most = max(most, peak.bytes)
        turns.append((plain, there, back))
        coded.append((encode, decode))
    del turns[0], coded[0]
    plain, there, back = (statistics.median(column) for column in zip(*turns, strict=True))
    encode, decode = (statistics.median(column) for column in zip(*coded, strict=True))
    figures = {
        "bytes": float(nbytes),
        "copy_gb_per_s": nbytes / plain / 1e9,
        "to_megatron_gb_per_s": nbytes / there / 1e9,
        "to_hf_gb_per_s": nbytes / back / 1e9,
        "to_hf_fp8_gb_per_s": nbytes / encode / 1e9,
        "fp8_to_megatron_gb_per_s": nbytes / decode / 1e9,
        "to_megatron_of_copy": statistics.median(a / b for a, b, _ in turns),
        "to_hf_of_copy": statistics.median(a / c for a, _, c in turns),
    }
    for name, value in figures.items():
        print(f"{name:24}{value:16,.2f}")
    return {name: round(value, 3) for name, value in figures.items()}, most


if __name__ == "__main__":
    sys.exit(main())
