"""Law: a run is the same run whether its server opens the published weights by handles, receives them in a process
group, gets slices from the ranks that hold them, or loads them from a disk on which each rank has written a part.

Two expert-parallel ranks gather the weights together; on the disk each writes its part, and the server loads what rank
0 has joined; slices are not gathered. Whole runs on plain processes, byte for byte. Not covered: several nodes and
their disks; stock SGLang; quantized weights and what a single publication holds (tests/rollout/publish).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forked import tail
from tests.support.local_run import Runs, untimed

LONG = pytest.mark.long(beside="tests/laws/test_published_on_disk.py")
SETTINGS = ("parallel.dp=2", "parallel.ep=2", "train.steps=2", "eval.every=0", "checkpoint.every=0")


def _published_by(runs: Runs, where: Path, path: str) -> bytes:
    """The metrics of a run, timings aside."""
    settings = (*SETTINGS, f"publish.path={path}")
    assert runs.run(where / path, settings) == 0, tail(where / path / "driver.log")
    return untimed(where / path / "metrics.jsonl")


def test_two_ranks_write_what_one_sends(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    with Runs(tmp_path / "home") as runs:
        assert _published_by(runs, tmp_path, "disk") == _published_by(runs, tmp_path, "tensor")
    written = tmp_path / "disk" / "published"
    assert [p.name for p in written.iterdir()] == ["version_2"]
    (index,) = (written / "version_2").glob("*.index.json")
    assert "model-00002-of-00002.safetensors" in index.read_text(), "two ranks wrote it"


@LONG
def test_two_sources_and_two_shards_send_what_one_rank_sends(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    with Runs(tmp_path / "home") as runs:
        sent, by_sources, by_shards = (_published_by(runs, tmp_path, p) for p in ("tensor", "distributed", "reshard"))
    assert sent == by_sources == by_shards


@LONG
def test_divided_ranks_send_slices_to_a_divided_server(tmp_path: Path) -> None:
    """Two tensor-parallel ranks, a server of two."""
    divided = ("parallel.tp=2", "rollout.embedded.tp_size=2", *SETTINGS[2:])
    (tmp_path / "home").mkdir()
    with Runs(tmp_path / "home") as runs:
        for path in ("tensor", "reshard"):
            settings = (*divided, f"publish.path={path}")
            assert runs.run(tmp_path / path, settings) == 0, tail(tmp_path / path / "driver.log")
    assert untimed(tmp_path / "tensor" / "metrics.jsonl") == untimed(tmp_path / "reshard" / "metrics.jsonl")
    ledgers = [(tmp_path / path / "ledger.jsonl").read_bytes() for path in ("tensor", "reshard")]
    assert ledgers[0] == ledgers[1]
