"""Commands that write a directory announce where they write, and as many bytes as its tensors then have.

Why it must hold: the share that is done and the time that is left are computed from them. How they are shown:
tests/miles_like/report/test_written.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import miles_like
from megatron_bridge.convert.directory.manifest import Manifest
from miles_like.cli import app
from miles_like.commands import output
from miles_like.hf.checkpoint import DTYPE_NAMES, HFCheckpoint
from miles_like.pipeline.convert import ConvertWork, to_hf, to_megatron
from miles_like.pipeline.dequantize import dequantize_checkpoint
from miles_like.pipeline.quantize import quantize_checkpoint, spec_of
from miles_like.report import written
from tests.support.cli_runner import CliRunner
from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

SIZES = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in DTYPE_NAMES}


class Watched:
    """What work announces."""

    def __init__(self) -> None:
        self.announced: list[tuple[Path, int]] = []

    @contextmanager
    def __call__(self, directory: Path, total: int) -> Iterator[None]:
        self.announced.append((directory, total))
        yield
        assert directory.is_dir() != directory.with_suffix("").is_dir(), "it is written, or renamed just now"


def test_the_announced_bytes_are_those_of_the_tensors(tmp_path: Path) -> None:
    hf = tiny()
    write_checkpoint(tmp_path / "bf16", hf, random_tensors(hf))

    def work(watch: Watched) -> ConvertWork:
        return ConvertWork(memory_limit=4 << 30, workers=1, nodes=None, watch=watch)

    more: dict[str, Any] = {"format": "int4", "hf_config": None, "lora_alpha": None}
    steps: dict[str, Callable[[Watched, Path], Any]] = {
        "fp8": lambda watch, out: quantize_checkpoint(tmp_path / "bf16", out, spec_of("fp8"), watch=watch),
        "plain": lambda watch, out: dequantize_checkpoint(tmp_path / "fp8", out, watch=watch),
        "shards": lambda watch, out: to_megatron(tmp_path / "fp8", out, work(watch)),
        "back": lambda watch, out: to_hf(tmp_path / "shards", out, work(watch), **more),
    }
    for name, step in steps.items():
        watch = Watched()
        step(watch, tmp_path / name)
        ((directory, total),) = watch.announced
        assert directory == tmp_path / f"{name}.partial"
        if name == "shards":
            facts = Manifest.read(tmp_path / name).tensors.values()
            assert total == sum(math.prod(fact.shape) * SIZES[fact.dtype] for fact in facts) > 1 << 16
        else:
            made = HFCheckpoint(tmp_path / name)
            assert total == sum(made.info(one).nbytes for one in made.names()) > 1 << 16


@pytest.mark.parametrize("quiet", [False, True])
def test_the_commands_show_it_unless_they_are_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: bool
) -> None:
    """And so do the functions of the same names."""
    hf, seen = tiny(), list[str]()
    write_checkpoint(tmp_path / "a", hf, random_tensors(hf))

    @contextmanager
    def noted(self: Any, directory: Path, total: int) -> Iterator[None]:
        if not self._console.quiet:
            seen.append(self._what)
        yield

    monkeypatch.setattr(written.Written, "__call__", noted)
    words = ["--quiet"] if quiet else []
    try:
        for line in ("quantize a b", "dequantize b c", "convert to-megatron a d", "convert to-hf d e"):
            command, *paths = line.rsplit(" ", 2)
            done = CliRunner().invoke(app, [*words, *command.split(), *(str(tmp_path / one) for one in paths)])
            assert done.exit_code == 0 and bool(done.stdout) != quiet, done.stderr
    finally:
        output.set_output(quiet=False, log_level="warning")
    miles_like.quantize(tmp_path / "a", tmp_path / "f", quiet=quiet)
    wanted = ["quantizing", "dequantizing", "converting", "converting", "quantizing"]
    assert seen == ([] if quiet else wanted)
