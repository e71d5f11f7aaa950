"""Which recorded turn a client's messages continue.

A client sends its whole history with each request, and rarely as it was received: arguments are serialized again, ids
of calls change, reasoning is dropped, null becomes "". Histories are compared without these differences.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_like.types import Sample

Json = dict[str, Any]
Path = tuple[str, ...]  # normal forms of messages


def normal(message: Mapping[str, Any]) -> str:
    """A message's role, content and calls, in one spelling. Arguments of calls are objects."""
    out: Json = {"role": message.get("role")}
    if content := str(message.get("content") or "").strip():
        out["content"] = content
    if calls := message.get("tool_calls"):
        out["calls"] = [[call["function"]["name"], call["function"].get("arguments") or {}] for call in calls]
    return json.dumps(out, sort_keys=True, ensure_ascii=False)


@dataclass(slots=True, eq=False)
class Node:
    """A recorded turn. path: of the messages up to it, it included. sample: its row up to the turn's end."""

    path: Path
    tools: str
    row: int  # the index of its row
    sample: Sample
    start: int  # of the turn, in the sample's tokens
    continued: bool = False  # its row goes on after it


def deepest(nodes: Sequence[Node], path: Path, tools: str, assistant: Sequence[bool]) -> Node | None:
    """The node with the longest path that begins `path`, whose rest has no turn of an assistant. assistant: of each
    message, whether it is one."""
    found = [
        node
        for node in nodes
        if node.tools == tools
        and len(node.path) < len(path)
        and path[: len(node.path)] == node.path
        and not any(assistant[len(node.path) :])
    ]
    return max(found, key=lambda node: (len(node.path), not node.continued), default=None)


def false_fork(nodes: Sequence[Node], path: Path, assistant: Sequence[bool]) -> bool:
    """Whether a history that continues no node has the messages of one except for what its assistant wrote: a client
    that changes what it received."""

    def others(given: Path, count: int) -> list[str]:
        return [text for text, own in zip(given[:count], assistant, strict=False) if not own]

    return any(
        len(node.path) < len(path) and others(node.path, len(node.path)) == others(path, len(node.path))
        for node in nodes
    )
