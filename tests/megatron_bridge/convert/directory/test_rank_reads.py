"""The files that a rank is planned to read are those that a real rank opens while it loads, no more and no fewer; and a
directory that holds only these loads, while one without one of them is refused by every rank in one sentence.

Beside it: tests/megatron_bridge/families/test_built_shapes.py holds the shares to what megatron builds at true shapes.
Not covered: TransformerEngine's modules, which do not open the file of the objects beside the tensors.
"""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_bridge.config import ParallelConfig
from megatron_bridge.convert.directory.boxes import Grid
from megatron_bridge.convert.directory.manifest import Manifest
from megatron_bridge.convert.directory.rank_reads import bytes_read, files_read
from megatron_bridge.convert.source import Source
from megatron_bridge.convert.to_megatron import convert_source
from megatron_bridge.families.registry import family_of
from tests.support import toy
from tests.support.chosen import later
from tests.support.refusals import check_refusal
from tests.support.spawn import free_port, run_ranks
from tests.support.tiny_models import random_tensors, tiny, tiny_dense, write_checkpoint

MOE = tiny(num_hidden_layers=4, num_nextn_predict_layers=1)
TIED = tiny_dense(num_hidden_layers=4, tie_word_embeddings=True)
# layout, model, with the draft layer; two ranks each
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "TP2": ({"tp": 2}, MOE, False),
    "PP2, uneven, draft layer": ({"pp": 2, "first_stage_layers": 1}, MOE, True),
    "PP2, interleaved": ({"pp": 2, "vpp": 2}, MOE, False),
    "EP2": ({"dp": 2, "ep": 2}, MOE, True),
    "ETP2": ({"dp": 2, "etp": 2}, MOE, False),
    "PP2, tied": ({"pp": 2}, TIED, False),
}


def _convert(where: Path, hf: dict[str, Any]) -> Path:
    """In many small files, cut for two tensor-parallel ranks."""
    write_checkpoint(where / "hf", hf, random_tensors(hf, mtp=hf is MOE))
    grid = Grid(2, 2 if hf is MOE else 1)
    convert_source(Source.open(where / "hf"), where / "megatron", grid, chunk_bytes=1 << 13, unit_bytes=1 << 14)
    return where / "megatron"


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of MOE, not to be changed."""
    return _convert(tmp_path_factory.mktemp("moe"), MOE)


def _open_names(root: Path) -> set[str]:
    """Names of the files below `root` that this process opens from now on."""
    found: set[str] = set()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | Path) and Path(arguments[0]).is_relative_to(root):
            found.add(str(Path(arguments[0]).relative_to(root)))

    sys.addaudithook(note)
    return found


def _load(rank: int, world_size: int, port: int, jobs: list[tuple[Path, dict[str, Any], bool, int]]) -> list[Any]:
    """Of each job: the files that the rank opened, and why the load failed."""
    out = []
    for root, layout, mtp, job_port in jobs:
        config = toy.config(str(root.parent / "hf"), mode="off", dtype="bfloat16", mtp_coefficient=0.1 * mtp, **layout)
        with toy.trainer(config, rank, world_size, job_port) as t:
            opened, problem = _open_names(root), None
            try:
                t.load_weights(root)
            except ValueError as e:
                problem = str(e)
            out.append((set(opened), problem))
    return out


def _planned(root: Path, hf: dict[str, Any], layout: dict[str, Any], mtp: bool, ranks: list[int]) -> frozenset[str]:
    tensors = family_of(hf).bind(hf, mtp=mtp)
    return files_read(Manifest.read(root), tensors, ParallelConfig(**layout), ranks)


FIRST = ("TP2", "PP2, uneven, draft layer", "EP2")


@pytest.mark.parametrize(
    "names",
    later([FIRST, tuple(CASES)], [FIRST], beside="tests/megatron_bridge/convert/directory/test_rank_reads.py"),
    ids=["first", "all"],
)
def test_a_rank_opens_the_files_of_its_read_list_and_no_other(
    moe: Path, names: tuple[str, ...], tmp_path: Path
) -> None:
    cases = {name: CASES[name] for name in names}
    whole = {id(MOE): moe}
    if any(hf is TIED for _, hf, _ in cases.values()):
        whole[id(TIED)] = _convert(tmp_path / "tied", TIED)
    jobs, lacking = [], ""
    for name, (layout, hf, mtp) in cases.items():
        # a node's own copy, of what its two ranks read
        root = tmp_path / "nodes" / name / "megatron"
        for file in _planned(whole[id(hf)], hf, layout, mtp, [0, 1]):
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(whole[id(hf)] / file, root / file)
        shutil.copytree(whole[id(hf)].parent / "hf", root.parent / "hf")
        jobs.append((root, layout, mtp, free_port()))
    short = tmp_path / "nodes" / "short" / "megatron"
    shutil.copytree(jobs[0][0].parent, short.parent)
    lacking = min(f for f in _planned(whole[id(MOE)], MOE, {"tp": 2}, False, [1]) if f.endswith(".distcp"))
    (short / lacking).unlink()
    ranks = run_ranks(_load, 2, [*jobs, (short, {"tp": 2}, False, free_port())])
    some_are_unread = 0
    for i, (name, (layout, hf, mtp)) in enumerate(cases.items()):
        everything = set(Manifest.read(whole[id(hf)]).files)
        for rank in (0, 1):
            opened, problem = ranks[rank][i]
            assert problem is None, (name, problem)
            assert opened == _planned(whole[id(hf)], hf, layout, mtp, [rank]), (name, rank)
            some_are_unread += bool({f for f in everything - opened if f.endswith(".distcp")})
    assert some_are_unread >= len(cases)
    assert ranks[0][-1][1] == ranks[1][-1][1]
    check_refusal(ranks[0][-1][1], lacking)


def test_bytes_of_all_ranks_are_the_model() -> None:
    """Shares are disjoint or equal: all ranks together read every element once, also an embedding that the first and
    the last stage hold."""
    for name, (layout, hf, mtp) in CASES.items():
        tensors, config = family_of(hf).bind(hf, mtp=mtp), ParallelConfig(**layout)
        sizes = {p.hf_name: math.prod(p.shape) * tensors.dtype(p.entry).itemsize for p in tensors.places()}
        both, each = bytes_read(tensors, config, [0, 1]), [bytes_read(tensors, config, [r]) for r in (0, 1)]
        assert both == sum(sizes.values()), name
        assert max(each) < both <= sum(each)


@pytest.mark.parametrize("ranks", [[], [0]])
def test_a_node_without_ranks_reads_nothing(moe: Path, ranks: list[int]) -> None:
    assert bool(_planned(moe, MOE, {"tp": 2}, False, ranks)) is bool(ranks)
