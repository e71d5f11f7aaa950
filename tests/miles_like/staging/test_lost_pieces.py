"""A file of a converted directory is lost where its node has left the cluster or no longer has all of it.

Not covered: the question to a node over Ray, and what is converted again (tests/cluster/test_four_nodes.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron_bridge.convert.directory.manifest import FileFact, Manifest
from megatron_bridge.convert.units import ELSEWHERE
from miles_like.nodes.members import Node
from miles_like.staging import separate_disks
from miles_like.staging.separate_disks import lost_pieces

SIZE = 8
NODES = tuple(Node(id=name, address=f"10.0.0.{i}", host=name, gpus=0, cores=1) for i, name in enumerate("ab"))


def test_files_of_nodes_that_left_and_files_that_nodes_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, pieces, asked = tmp_path / "out", tmp_path / "pieces", []
    out.mkdir(), pieces.mkdir()
    holders = {"whole": 0, "short": 1, "gone": 1, "left": 7}  # file -> its node
    Manifest("torch_dist", {}, {name: FileFact(SIZE, "") for name in (*holders, "here")}).write(out)
    elsewhere = {name: [f"10.0.0.{node}", str(pieces)] for name, node in holders.items()}
    (out / ELSEWHERE).write_text(json.dumps(elsewhere))
    (pieces / "whole").write_bytes(bytes(SIZE))
    (pieces / "short").write_bytes(bytes(SIZE - 1))

    def on_nodes(
        works: Sequence[Callable[[Callable[[], None]], list[str]]], nodes: Sequence[Node], *, timeout_s: float
    ) -> list[list[str]]:
        asked.append((tuple(nodes), timeout_s))
        return [work(lambda: None) for work in works]

    monkeypatch.setattr(separate_disks, "on_nodes", on_nodes)
    monkeypatch.setattr(separate_disks, "living_nodes", lambda: NODES)
    assert lost_pieces(out, timeout_s=5.0) == ("gone", "left", "short")
    assert asked == [(NODES, 5.0)]
    monkeypatch.setattr(separate_disks, "living_nodes", lambda: ())
    assert lost_pieces(out, timeout_s=5.0) == tuple(sorted(holders)) and len(asked) == 1
