"""A directory of the driver on the nodes whose processes load all of it, as a teacher's. Imported with Ray started."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from miles_like.nodes.members import Node
from miles_like.nodes.sight import Probe, probe_in, probe_of
from miles_like.nodes.work import on_every_node
from miles_like.staging.separate_disks import Sees, stage_on_nodes
from miles_like.storage.completion import Output, file_fact, files_under, input_key
from miles_like.storage.verified_copy import Copy, FileSum, LocalSource, StageFiles


def seen_by(files: Output, nodes: Sequence[Node], *, local: Path | None, timeout_s: float) -> Path:
    """The path at which each of `nodes` finds the files of a directory of the driver.

    It is that of the directory where all of them see it. Otherwise each gets a verified copy: below the node-local
    directory `local`, or without one at the same path on the disks of those nodes that do not see it. files: without
    any, all that lie there are copied, and read once more for their checksums. Raises ValueError as `stage_on_nodes`.
    """
    root = files.root.resolve()
    with contextlib.ExitStack() as stack:
        sees = on_every_node(Sees((_probe(root, stack),)), nodes, timeout_s=timeout_s)
    blind = [node for node, (_, (seen,)) in zip(nodes, sees, strict=True) if not seen]
    if not blind:
        return root
    facts = files.files or {str(p.relative_to(root)): file_fact(p) for p in files_under(root)}
    sums: dict[str, FileSum] = {name: {"size": fact["size"], "sha256": fact["sha256"]} for name, fact in facts.items()}
    target = root
    if local is not None:
        blind = list(nodes)  # all load from one path
        key = input_key("teacher", {name: one["sha256"] for name, one in sums.items()})
        target = local / f"teacher-{key}"
    work = StageFiles(target, (Copy(LocalSource(root), target, sums),))
    stage_on_nodes([work] * len(blind), blind, timeout_s=timeout_s)
    return target


def _probe(root: Path, stack: contextlib.ExitStack) -> Probe:
    try:
        return stack.enter_context(probe_in(root))
    except OSError:  # of another user
        return probe_of(next(p for p in sorted(root.iterdir()) if p.is_file()))
