"""A release gate: whether the second of two evaluations is worse than the first, by set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from miles_like.report.paired.bootstrap import Difference, difference
from miles_like.report.paired.scores import Evaluated


class Verdict(NamedTuple):
    """Of one eval set."""

    name: str
    found: Difference
    errors: float  # the threshold, in standard errors

    @property
    def word(self) -> str:
        """`worse`, `better` or `within noise`."""
        if self.found.fallen >= self.errors:
            return "worse"
        return "better" if self.found.fallen <= -self.errors else "within noise"


def verdicts(one: Evaluated, other: Evaluated, *, errors: float, seed: int = 0) -> list[Verdict]:
    """Of each set that both have. Raises ValueError where there is none with two common problems."""
    common = [name for name in one.scores if name in other.scores]
    found = [(name, difference(one.scores[name], other.scores[name], seed=seed)) for name in common]
    out = [Verdict(name, of, errors) for name, of in found if of is not None]
    if not out:
        sets = [", ".join(e.scores) or "none" for e in (one, other)]
        raise ValueError(
            f"{one.path} has the eval sets {sets[0]}, and {other.path} has {sets[1]}: no set has two problems that "
            "both were asked, so the two cannot be compared: evaluate both on the same set"
        )
    return out


def verdict_table(one: Evaluated, other: Evaluated, found: Sequence[Verdict]) -> Table:
    """A line for each set."""
    table = Table(title=f"A: {escape(one.name)}, B: {escape(other.name)}", title_justify="left")
    for name in ("set", "problems", "A", "B", "B - A", "95 % of resamples", "errors below", "verdict"):
        table.add_column(name, justify="left" if name in ("set", "verdict") else "right")
    for name, of, errors in found:
        range_ = f"{of.low:+.4f} .. {of.high:+.4f}"
        cells = (f"{of.problems:,}", f"{of.before:.4f}", f"{of.after:.4f}", f"{of.change:+.4f}", range_)
        table.add_row(escape(name), *cells, f"{of.fallen:.2f}", Verdict(name, of, errors).word)
    return table
