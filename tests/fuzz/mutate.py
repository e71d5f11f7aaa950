"""Values and byte strings that are wrong in the ways files on a disk are."""

from __future__ import annotations

import random
from typing import Any

NUMBERS = (0, -1, 1, 2, 3, 7, 255, 10**6, 2**31, 2**63, 2**64, 10**23, 10**400, -(2**63), 0.5, -0.0, 1e308, 1e-320)
TEXTS = (
    "",
    " ",
    "x",
    "none",
    "nan",
    "0",
    "../../x",
    "/etc/passwd",
    "/dev/zero",
    "./missing.py:f",
    "a" * 5000,
    "\0",
    "é",
)
SPECIAL = (float("inf"), float("-inf"), float("nan"), True, False, None)


def value(rng: random.Random, depth: int = 0) -> Any:
    """A JSON or TOML value of any type, of a size or shape that programs forget."""
    kind = rng.randrange(7 if depth < 2 else 5)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice(TEXTS)
    if kind == 4:
        return rng.choice(SPECIAL)
    if kind == 5:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(TEXTS): value(rng, depth + 1) for _ in range(rng.randrange(3))}


def places(tree: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Paths of all values below and including `tree`."""
    found = [at]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, inner in items:
        found += places(inner, (*at, key))
    return found


def changed(rng: random.Random, tree: Any) -> Any:
    """`tree` with one value replaced, removed, doubled or put under another key. The tree given may be changed."""
    where = rng.choice(places(tree))
    if not where:
        return value(rng)
    *parents, last = where
    node = tree
    for key in parents:
        node = node[key]
    kind = rng.randrange(5)
    if kind == 0:
        del node[last]
    elif kind == 1 and isinstance(node, dict):
        node[rng.choice(TEXTS)] = node[last]
    elif kind == 1:
        node.insert(last, node[last])
    else:
        node[last] = value(rng)
    return tree


def spoiled(rng: random.Random, data: bytes) -> bytes:
    """`data` cut, with a bit flipped, a part doubled, zeroed, removed, or with bytes put in."""
    if not data:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(64)))
    a, b = sorted((rng.randrange(len(data)), rng.randrange(len(data))))
    kind = rng.randrange(7)
    if kind == 0:
        return data[:a]
    if kind == 1:
        return data[:a] + bytes((data[a] ^ 1 << rng.randrange(8),)) + data[a + 1 :]
    if kind == 2:
        return data[:b] + data[a:]
    if kind == 3:
        return data[:a] + bytes(b - a) + data[b:]
    if kind == 4:
        return data[:a] + data[b:]
    if kind == 5:
        part = rng.choice((b"\x00", b"\xff\xfe", b"[" * 5000, b"{" * 3, b'"', b"\n", b"1e999", b"9" * 5000, b"NaN"))
        return data[:a] + part + data[a:]
    return rng.choice((b"", b"\x00" * 64, b"null", b"[]", b"{}", b"\xef\xbb\xbf" + data, data + data))
