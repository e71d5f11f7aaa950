"""Conversion to Megatron at its limits: killed at any moment it resumes to what it would have been, and its processes
together stay within the memory they were given, however large the checkpoint.

The second law's checkpoint is larger than the limit but small as checkpoints go; that memory does not grow with size
follows from chunks of one size, and bookkeeping of a few kilobytes a tensor. Not covered: a machine that loses power.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megatron_bridge.convert.directory.manifest import MANIFEST, Manifest
from megatron_bridge.convert.memory_limit import MIB
from megatron_bridge.convert.source import Source
from megatron_bridge.convert.to_megatron import convert_source
from megatron_bridge.families.registry import family_of
from quant.hf_config import spec_to_hf
from quant.spec import QuantFormat, QuantSpec
from tests.support.spawn import run_ranks
from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

KILLS = 20


def _units(out: Path) -> int:
    """Complete units of the unfinished directory."""
    return len(list(out.with_name(f"{out.name}.partial").glob("*.distcp.json")))


def _attempt(hf_dir: Path, out: Path, delay: float | None, units: int = 0) -> bool:
    """Converts in a separate process, killed `delay` seconds after `units` units are complete; returns whether it
    completed."""
    pid = os.fork()
    if not pid:
        try:
            convert_source(Source.open(hf_dir), out, chunk_bytes=20_000, unit_bytes=150_000)
            os._exit(0)
        finally:
            os._exit(1)
    if delay is not None:
        while _units(out) < units and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.001)
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status == 0


def _kill_and_resume(rank: int, world_size: int, port: int, hf: str, root: str) -> tuple[int, int]:
    """(times it came to its end, the most units that a later attempt found)."""
    hf_dir, out, straight = Path(hf), Path(root) / "out", Path(root) / "straight"
    _attempt(hf_dir, straight, None)  # the first is slow: nothing is warm
    shutil.rmtree(straight)
    began = time.perf_counter()
    assert _attempt(hf_dir, straight, None)
    whole = time.perf_counter() - began
    want = (straight / MANIFEST).read_bytes()
    draw, kills, ends, kept = random.Random(0), 0, 0, 0
    while kills < KILLS or not ends:
        found = _units(out)
        kept = max(kept, found)
        # every second attempt has further units first: on a busy machine the clock alone kills all of them too early
        units = found + 2 if kills % 2 else 0
        delay = draw.uniform(0, 0.4 * whole) if kills < KILLS else None
        ended = _attempt(hf_dir, out, delay, units)
        kills += not ended
        if not out.exists():
            assert not ended
            continue
        ends += 1  # or killed after the rename: it is whole
        assert (out / MANIFEST).read_bytes() == want
        for name, fact in Manifest.read(out).files.items():
            assert (out / name).read_bytes() == (straight / name).read_bytes(), name
            assert fact.size == (out / name).stat().st_size
        shutil.rmtree(out)
    return ends, kept


def test_killed_at_twenty_moments_it_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    hf = tiny(num_hidden_layers=2)
    source = write_checkpoint(tmp_path / "hf", hf, random_tensors(hf), shard_bytes=400_000)
    ((ends, kept),) = run_ranks(_kill_and_resume, 1, str(source), str(tmp_path))
    assert ends >= 1
    assert kept > 2  # the kills did not all come before there was something to keep


# memory

LIMIT = 1150 * MIB
CONVERT = """
import re, resource, sys
from pathlib import Path
from megatron_bridge.convert.to_megatron import to_megatron
report = to_megatron(Path(sys.argv[1]), Path(sys.argv[2]), memory_limit=int(sys.argv[3]), workers=2)
# not ru_maxrss of this process: it remembers the one that this was forked from
own = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]
print(report.bytes, report.units, own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


BACK = CONVERT.replace("to_megatron", "to_hf").replace("workers=2", "workers=2, shard_bytes=300 << 20")


def _sparse_fp8(path: Path, hf: dict[str, Any]) -> Path:
    """A block FP8 checkpoint whose data, zeros, take no room on the disk."""
    spec, tensors = QuantSpec(format=QuantFormat.FP8), family_of(hf).bind(hf)
    names = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3"}
    header: dict[str, Any] = {}
    end = 0
    for place in tensors.places():
        parts = [(place.hf_name, tensors.dtype(place.entry), place.shape)]
        if spec.covers(place.hf_name, place.shape):
            blocks = tuple(-(-n // b) for n, b in zip(place.shape, spec.block, strict=True))
            parts = [
                (place.hf_name, torch.float8_e4m3fn, place.shape),
                (place.hf_name + "_scale_inv", torch.float32, blocks),
            ]
        for name, dtype, shape in parts:
            start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": names[dtype], "shape": shape, "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    path.mkdir()
    with (path / "model.safetensors").open("wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        f.truncate(8 + len(raw) + end)
    (path / "config.json").write_text(json.dumps(hf | {"quantization_config": spec_to_hf(spec)}))
    return path


def _watched(convert: str, source: Path, out: Path) -> tuple[int, int, list[int]]:
    """(most bytes that the process and its children held together, most processes, the numbers that it printed)."""
    most = seen = 0
    with subprocess.Popen(
        [sys.executable, "-c", convert, str(source), str(out), str(LIMIT)], stdout=subprocess.PIPE, text=True
    ) as process:
        parent = psutil.Process(process.pid)
        while process.poll() is None:
            sizes = []
            for p in [parent, *parent.children(recursive=True)]:
                try:
                    sizes.append(p.memory_info().rss)
                except psutil.NoSuchProcess:
                    continue
            most, seen = max(most, sum(sizes)), max(seen, len(sizes))
            time.sleep(0.02)
        assert process.stdout is not None
        printed = [int(number) for number in process.stdout.read().split()]
    assert process.returncode == 0
    return most, seen, printed


@pytest.mark.long(beside="tests/miles_like/pipeline/test_dequantize.py")
@pytest.mark.parametrize(
    "back",
    [
        pytest.param(False, id="there"),
        pytest.param(True, id="and back"),
    ],
)
def test_its_processes_stay_within_the_limit_together(tmp_path: Path, *, back: bool) -> None:
    """Resident memory of parent and workers, sampled while they run; and their peaks added up, which is no less."""
    hf = tiny(hidden_size=1024, vocab_size=150016, intermediate_size=16384, moe_intermediate_size=3072)
    source, held = _sparse_fp8(tmp_path / "hf", hf), list[Path]()
    for convert, out in [(CONVERT, tmp_path / "megatron"), (BACK, tmp_path / "back")][: 1 + back]:
        most, seen, (size, units, own, child) = _watched(convert, source, out)
        assert size > 1.1 * LIMIT and units >= 2
        assert seen >= 3, most
        assert 0.4 * LIMIT < most < LIMIT  # and the samples were of the processes that work
        assert (own + 2 * child) * 1024 < LIMIT, (most, own, child)
        source = out
        held.append(out)
    for out in held:
        shutil.rmtree(out)
