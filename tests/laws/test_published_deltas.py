"""Law: after real steps a server that takes differences holds, bit for bit, what one that takes whole tensors holds.

Two expert-parallel ranks train; each step is published to two servers of the embedded engine, to one in requests and to
the other as differences, which each rank writes for its share. Whole runs are compared too. Not covered: several nodes
and their disks; faults (tests/rollout/publish/directory/test_delta_publisher.py).
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from miles_like import quantize
from miles_like.cluster.pacing import Pacer
from miles_like.hf.checkpoint import write_hf
from quant.hf_config import quantized_config
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from rollout.config import PublishConfig
from rollout.publish.directory.delta_publisher import DeltaPublisher
from rollout.publish.directory.disk_publisher import SharedDirectory
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from tests.support import toy
from tests.support.forked import tail
from tests.support.layouts import EXPERTS, ROUTED
from tests.support.local_run import Runs, untimed
from tests.support.spawn import run_ranks

HERE = "tests/laws/test_published_deltas.py"
FORMATS = ("bf16", "fp8", "int4")
STEPS = 4
SPECS = {"bf16": None, "fp8": QuantSpec.of(QuantFormat.FP8), "int4": QuantSpec.of(QuantFormat.INT4)}


def _rank(rank: int, world: int, port: int, where: str) -> dict[str, list[dict[str, Any]]]:
    """Format -> for each step what both servers hold, and the bytes sent."""
    config = toy.config(where + "/moe", mode="off", dtype="bfloat16", lr=1e-5, dp=world, ep=world)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in FORMATS}
    with toy.trainer(config, rank, world, port) as t, ExitStack() as stack:
        pacer = Pacer(t.signals, sends=rank == 0)
        start = [(name, x.clone()) for name, x in t.export()]
        sides = {name: _Side(t, pacer, rank, world, Path(where) / name, start, stack) for name in FORMATS}
        parts = toy.samples(8, seed=0, layers=t.family.moe_layers(t.hf), experts=EXPERTS)
        rows, tokens = toy.grid(parts, dp=world, micros=1)
        for step in range(STEPS):
            t.step(rows[t.dp_rank], tokens, step + 1)
            for name, side in sides.items():
                found[name].append(side.published(step + 1))
    return found


class _Side:
    """The publishers of a rank for one format; rank 0 has the servers."""

    def __init__(self, t: Any, pacer: Pacer, rank: int, world: int, where: Path, start: Any, stack: ExitStack) -> None:
        from tests.support.embedded_fixtures import served, service

        spec, urls, self.services = SPECS[where.name], ["http://unused"] * 2, []
        hf = quantized_config(t.hf, spec, [name for name, _ in start])
        if not rank:
            write_hf(where / "hf", quantize_stream(iter(start), spec), hf)
            self.services = [service(where / "hf") for _ in range(2)]
            urls = [stack.enter_context(served(s)) for s in self.services]
        targets = [
            PublishTarget(urls=(u,), kind="embedded", spec=spec, config=PublishConfig(bucket_bytes=1 << 16))
            for u in urls
        ]
        shared = SharedDirectory(path=where / "published", hf_config=hf, copy_from=None)
        self.trainer, self.pacer = t, pacer
        self.tensor = TensorPublisher(targets[0], send=rank == 0)
        self.delta = DeltaPublisher(targets[1], shared, rank=rank, ranks=world)

    def published(self, version: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, publisher in (("tensor", self.tensor), ("delta", self.delta)):
            stream = self.pacer.paced(self.trainer.export(), together=publisher.every_rank)
            report = publisher.publish(stream, version=version)
            out[name] = report.bytes
        out["versions"] = [s.engine.version for s in self.services]
        out["held"] = [s.store.checksums() for s in self.services]
        return out


def test_after_real_steps_both_servers_hold_the_same_bits(tmp_path: Path) -> None:
    toy.hf_dir(tmp_path / "moe", toy.hf_config() | ROUTED)
    found, _ = run_ranks(_rank, 2, str(tmp_path), keep=True)
    for name, steps in found.items():
        whole = steps[0]["delta"]
        for i, step in enumerate(steps):
            tensor, delta = step["held"]
            assert tensor == delta and step["versions"] == [str(i + 1)] * 2, (name, i)
            assert i == 0 or tensor != steps[i - 1]["held"][0], "the step changed weights"
            assert i == 0 or 0 < step["delta"] < 0.5 * whole, (name, step["delta"], whole)


@pytest.mark.long(beside=HERE)
@pytest.mark.parametrize(
    "settings",
    [
        ("parallel.dp=2", "parallel.ep=2"),
        ("precision.format=fp8", "precision.qat=true"),
        ("precision.format=int4", "precision.qat=true", "rollout.servers=2"),
    ],
    ids=["two ranks", "fp8, QAT", "int4, QAT, two servers"],
)
def test_a_run_with_differences_is_the_run_with_tensors(tmp_path: Path, settings: tuple[str, ...]) -> None:
    (tmp_path / "home").mkdir()
    with Runs(tmp_path / "home") as runs:
        if (
            format := next((s.partition("=")[2] for s in settings if s.startswith("precision.format")), None)
        ) is not None:
            served = runs.home / "hf"
            quantize(served, tmp_path / "served", format=format)
            served.unlink()
            served.symlink_to(tmp_path / "served")
        for name, path in (("sent", "tensor"), ("written", "delta")):
            more = (*settings, "train.steps=4", "eval.every=0", "checkpoint.every=0", f"publish.path={path}")
            assert runs.run(tmp_path / name, more) == 0, tail(tmp_path / name / "driver.log")
    written, sent = (untimed(tmp_path / name / "metrics.jsonl", "sync/") for name in ("written", "sent"))
    assert written == sent
    text = (tmp_path / "written" / "metrics.jsonl").read_text()
    assert '"sync/delta_frac": 0.' in text, "differences were sent"
