"""Nodes that do not see a teacher's directory get verified copies of it, at one path; the others read it in place.

Not covered: the copies over Ray, and a real second disk (tests/cluster/test_spread_run.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from miles_like.nodes.members import Node
from miles_like.staging import node_copies
from miles_like.staging.node_copies import seen_by
from miles_like.storage.completion import Output, file_fact
from miles_like.storage.verified_copy import StageFiles

NODES = tuple(Node(id=name, address=f"10.0.0.{i}", host=name, gpus=0, cores=1) for i, name in enumerate("ab"))
Staged = list[tuple[StageFiles, Node]]


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> Staged:
    """The copies that were made."""
    made: Staged = []

    def stage(works: Sequence[StageFiles], nodes: Sequence[Node], *, timeout_s: float) -> list[Any]:
        made.extend(zip(works, nodes, strict=True))
        return []

    monkeypatch.setattr(node_copies, "stage_on_nodes", stage)
    return made


def see(monkeypatch: pytest.MonkeyPatch, *seen: bool) -> None:
    def answer(work: Any, nodes: Sequence[Node], *, timeout_s: float) -> list[tuple[str, tuple[bool, ...]]]:
        assert work.probes[0].is_seen() and nodes == NODES
        return [(node.address, (one,)) for node, one in zip(nodes, seen, strict=True)]

    monkeypatch.setattr(node_copies, "on_every_node", answer)


def test_a_directory_is_copied_to_the_nodes_that_do_not_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staged: Staged
) -> None:
    root = tmp_path / "fetch" / "data"
    root.mkdir(parents=True)
    (root / "config.json").write_text("{}")
    files = Output(root, {"config.json": file_fact(root / "config.json")})
    see(monkeypatch, True, True)
    assert seen_by(files, NODES, local=tmp_path / "nvme", timeout_s=1) == root and not staged
    see(monkeypatch, True, False)
    assert seen_by(files, NODES, local=None, timeout_s=1) == root
    ((work, node),) = staged
    assert node is NODES[1] and work.copies[0].target == root and list(work.copies[0].files) == ["config.json"]
    staged.clear()
    target = seen_by(files, NODES, local=tmp_path / "nvme", timeout_s=1)  # one path, so all nodes copy
    assert [n for _, n in staged] == list(NODES) and target.parent == tmp_path / "nvme"
    assert {work.copies[0].target for work, _ in staged} == {target} == {work.data for work, _ in staged}
    assert not [p for p in root.iterdir() if p.name != "config.json"]


def test_files_without_checksums_are_hashed_and_other_files_have_another_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staged: Staged
) -> None:
    """A directory of shards that the user names is not in the cache."""
    (tmp_path / "shards").mkdir()
    see(monkeypatch, False, False)
    found = set()
    for content in ("a", "b"):
        (tmp_path / "shards" / "x.distcp").write_text(content)
        found.add(seen_by(Output(tmp_path / "shards", {}), NODES, local=tmp_path / "nvme", timeout_s=1))
    sums = {work.copies[0].files["x.distcp"]["sha256"] for work, _ in staged}
    assert len(found) == len(sums) == 2
