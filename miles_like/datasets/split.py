"""Divides rows into parts such as train and heldout.

The hash of its text decides to which part a row belongs, so it is in the same part whatever other rows there are. Two
rows that are nearly the same text, with the same answer or another, may belong to different parts. Of a cluster of such
rows only one part's are kept, those of the smallest part, and the others are left out. Moving them instead would move a
row when a later one connects two clusters.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from miles_like.datasets.duplicates import Texts
from miles_like.datasets.similarity import clusters, near_pairs
from miles_like.datasets.table import Item

LEFT_OUT = "left_out"
_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    parts: Mapping[str, Sequence[int]]  # name -> rows, in the order of the file
    left_out: Sequence[int]
    crossing: int  # clusters whose rows belong to several parts


def parse_parts(text: str) -> dict[str, Fraction]:
    """Name -> share, of `train=0.9,heldout=0.1`. Raises ValueError unless shares are positive and their sum is 1."""
    out: dict[str, Fraction] = {}
    for one in text.split(","):
        name, eq, share = one.strip().partition("=")
        try:
            value = Fraction(share)
        except (ValueError, ZeroDivisionError):
            eq, value = "", Fraction(0)
        if not eq or not _NAME.fullmatch(name) or name == LEFT_OUT or name in out or value <= 0:
            raise ValueError(
                f"--parts {text}: {one.strip()!r} is not NAME=SHARE with a unique name (not {LEFT_OUT!r}) and a "
                "share above 0: use for example train=0.9,heldout=0.1"
            )
        out[name] = value
    if len(out) < 2 or sum(out.values()) != 1:
        total = float(sum(out.values()))
        raise ValueError(
            f"--parts {text}: {len(out)} parts with shares of {total:g} in total: use two or more parts, with "
            "shares of 1 in total"
        )
    return out


def part_of(text: str, parts: Mapping[str, Fraction], seed: int) -> str:
    """The part to which a normalized text belongs."""
    digest = hashlib.sha256(f"{seed}\0{text}".encode()).digest()
    at, above = Fraction(int.from_bytes(digest[:8]), 1 << 64), Fraction(0)
    for name, share in parts.items():
        above += share
        if at < above:
            return name
    raise AssertionError("the shares must sum to 1")


def split(items: Sequence[Item], parts: Mapping[str, Fraction], *, threshold: float, seed: int = 0) -> Split:
    """threshold: Jaccard index of shingles from which two prompts are of one cluster."""
    found = Texts(items)
    homes = [part_of(text, parts, seed) for text in found.texts]
    roots = clusters(len(found.texts), near_pairs(found.texts, threshold))
    of_cluster: defaultdict[int, set[str]] = defaultdict(set)
    for root, home in zip(roots, homes, strict=True):
        of_cluster[root].add(home)
    scarce = sorted(parts, key=lambda name: parts[name])  # sorts stably: of equal shares the first
    kept = {root: min(names, key=scarce.index) for root, names in of_cluster.items()}
    out: dict[str, list[int]] = {name: [] for name in parts}
    left_out = list[int]()
    for i, text in enumerate(found.of):
        home = homes[text]
        (out[home] if kept[roots[text]] == home else left_out).append(i)
    return Split(parts=out, left_out=left_out, crossing=sum(len(names) > 1 for names in of_cluster.values()))
