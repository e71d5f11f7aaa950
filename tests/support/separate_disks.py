"""What the nodes of tests/cluster/test_separate_disks.py run: a conversion that takes its time, and staging."""

from __future__ import annotations

import dataclasses
import socket
import time
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_bridge.convert import to_megatron as conversion
from megatron_bridge.convert.directory.boxes import Grid
from megatron_bridge.convert.directory.manifest import Manifest
from megatron_bridge.convert.source import Source
from megatron_bridge.convert.to_megatron import Conversion, convert_source, plan_conversion
from megatron_bridge.convert.units import ELSEWHERE, HashedFile
from miles_like.config.load import load_config
from miles_like.nodes.members import living_nodes
from miles_like.nodes.session import start_ray, stop_ray
from miles_like.staging.separate_disks import SpreadApart, stage_on_nodes
from miles_like.staging.stage_files import stage_plan
from miles_like.storage.completion import Output, file_fact, files_under
from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

HF = tiny(num_hidden_layers=3)
CHUNK, UNIT = 1 << 13, 1 << 15
TINY = Path(__file__).parents[2] / "configs" / "tiny.toml"
LAYOUT = ("parallel.pp=3", "parallel.dp=1", "parallel.ep=1", "cluster.nodes=3", "rollout.servers=1", "replay.mode=off")


class Stuck(Conversion):
    """A conversion that on the last of three nodes does not get beyond two units."""

    def write(self, number: int, out: HashedFile) -> list[list[Any]]:
        if socket.gethostname() == "node2":
            if len(_written) == 2:
                time.sleep(600)
            _written.append(number)
        return super().write(number, out)


_written: list[int] = []  # by this process


def plan_stuck(*args: Any, **kwargs: Any) -> Conversion:
    job = plan_conversion(*args, **kwargs)
    return Stuck(*(getattr(job, f.name) for f in dataclasses.fields(Conversion)))


def write_source(disk: Path) -> dict[str, Any]:
    """And what one machine makes of it, which is described."""
    write_checkpoint(disk / "hf", HF, random_tensors(HF, mtp=True), shard_bytes=1 << 19)
    (disk / "hf" / "tokenizer.json").write_text('{"version": "1.0"}')
    convert_source(Source.open(disk / "hf"), disk / "alone", Grid(), chunk_bytes=CHUNK, unit_bytes=UNIT)
    return described(disk / "alone")


def join(address: str, alive: int) -> None:
    start_ray(address)
    until = time.monotonic() + 120
    while len(living_nodes()) != alive:
        assert time.monotonic() < until, f"{len(living_nodes())} nodes, {alive} are alive"
        time.sleep(0.3)


def convert_apart(source: Path, out: Path, address: str, local: Path, stuck: bool, alive: int = 3) -> dict[str, Any]:
    """On the driver's node, once Ray has noticed that `alive` nodes live."""
    join(address, alive)
    spread = SpreadApart(nodes=living_nodes(), each=1, timeout_s=120.0, local=local)
    try:
        with mock.patch.object(conversion, "plan_conversion", plan_stuck if stuck else plan_conversion):
            convert_source(Source.open(source), out, Grid(), chunk_bytes=CHUNK, unit_bytes=UNIT, spread=spread)
    finally:
        stop_ray()
    return described(out)


def described(out: Path) -> dict[str, Any]:
    """Manifest, bytes of the metadata, names of the data files that are here, and the holders of the others."""
    manifest = Manifest.read(out)
    return {
        "manifest": (out / "manifest.json").read_bytes(),
        "metadata": (out / ".metadata").read_bytes(),
        "here": sorted(p.name for p in out.glob("*.distcp")),
        "files": sorted(manifest.files),
        "elsewhere": (out / ELSEWHERE).read_text() if (out / ELSEWHERE).is_file() else "{}",
    }


def stage_twice(source: Path, out: Path, data: Path, address: str) -> tuple[list[Any], list[Any]]:
    """On the driver's node: one stage of the pipeline and no server, or the server, on each of three nodes; and what
    the same does when all is there."""
    join(address, 3)
    try:
        config = load_config(TINY, list(LAYOUT))
        hf, shards = (
            Output(root, {str(p.relative_to(root)): file_fact(p) for p in files_under(root)}) for root in (source, out)
        )
        first, again = (
            list(stage_on_nodes(stage_plan(config, data, hf, shards).nodes, living_nodes(), timeout_s=120.0))
            for _ in range(2)
        )
        return first, again
    finally:
        stop_ray()
