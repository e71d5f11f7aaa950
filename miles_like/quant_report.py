"""How well a format holds a model: per kind of weight and per layer, measured while it is quantized.

Everything is told by the codec: weights as bf16 (what it rounds first) against what it decodes to, and the codes as
they are stored, counted byte by byte. Nothing is kept of a weight but sums.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from quant.codec import Codec, QuantTensor
from quant.registry import make_codec
from quant.spec import QuantSpec

REPORT, PLOTS = "quant_report.json", "quant_report"
KINDS = ("attention", "dense MLP", "shared experts", "routed experts")
_CHUNK = 1 << 20  # elements that are compared at once


class Place(NamedTuple):
    """Where a weight is in a model."""

    layer: int
    kind: str  # of KINDS
    projection: str


def place_of(name: str) -> Place:
    """Of the name of a weight that a `QuantSpec` covers."""
    *above, parent, projection, _ = name.split(".")
    layer = next((int(n) for before, n in zip(above, [*above[1:], parent], strict=True) if before == "layers"), 0)
    if parent == "self_attn":
        return Place(layer, "attention", projection)
    if parent.startswith("shared_expert"):
        return Place(layer, "shared experts", projection)
    return Place(layer, "routed experts" if parent.isdecimal() else "dense MLP", projection)


@dataclass
class Tally:
    """Sums over weights."""

    weights: int = 0
    elements: int = 0
    zeros: int = 0  # elements that are zero before
    signal: float = 0.0  # of squares
    noise: float = 0.0  # of squared differences
    before: int = 0  # bytes as bf16, fp16 or fp32
    after: int = 0  # bytes of all parts
    codes: Tensor | None = None  # int64 [256]: how often each byte is stored

    def __iadd__(self, other: Tally) -> Tally:
        for name in ("weights", "elements", "zeros", "signal", "noise", "before", "after"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.codes = other.codes if self.codes is None or other.codes is None else self.codes + other.codes
        return self

    @property
    def snr_db(self) -> float | None:
        """10 log10 of signal over noise; None where nothing is lost."""
        return 10 * math.log10(self.signal / self.noise) if self.signal > 0 and self.noise > 0 else None


class QuantReport:
    """Filled weight by weight, then written."""

    def __init__(self, spec: QuantSpec) -> None:
        self.spec = spec
        self.codec: Codec = make_codec(spec)
        self._of_bytes = self.codec.levels_of_bytes()
        self._tallies: defaultdict[Place, Tally] = defaultdict(Tally)
        self._skipped = [0, 0]  # tensors, bytes

    def skip(self, tensor: Tensor) -> None:
        """One that is not quantized."""
        self._skipped[0] += 1
        self._skipped[1] += tensor.nbytes

    def add(self, name: str, w: Tensor, q: QuantTensor) -> None:
        """w [n, k] of any float dtype and what is stored of it."""
        tally = Tally(weights=1, elements=w.numel(), before=w.nbytes, after=q.nbytes)
        decoded, rows = self.codec.decode(q), max(1, _CHUNK // w.shape[1])
        for a in range(0, len(w), rows):
            was = w[a : a + rows].to(torch.bfloat16).float()
            tally.signal += _squares(was)
            tally.zeros += int((was == 0).sum())
            tally.noise += _squares(was - decoded[a : a + rows].float())
        stored = next(iter(q.parts.values())).contiguous().view(torch.uint8).flatten()
        tally.codes = sum(
            (c.bincount(minlength=256) for c in stored.split(_CHUNK)), torch.zeros(256, dtype=torch.int64)
        )
        self._tallies[place_of(name)] += tally

    def by(self, *keys: str) -> dict[tuple[Any, ...], Tally]:
        """Tallies added up over what is not among `keys` ("layer", "kind", "projection"), in order of those."""
        found: defaultdict[tuple[Any, ...], Tally] = defaultdict(Tally)
        order = sorted(self._tallies, key=lambda p: (p.layer, KINDS.index(p.kind), p.projection))
        for place in order:
            found[tuple(getattr(place, key) for key in keys)] += self._tallies[place]
        return dict(sorted(found.items(), key=lambda item: [KINDS.index(k) if k in KINDS else k for k in item[0]]))

    def occupancy(self, tally: Tally) -> tuple[list[float], list[float]]:
        """(magnitudes that codes stand for before scaling, ascending; the share of codes that has each)."""
        assert tally.codes is not None
        magnitudes, index = torch.unique(self._of_bytes.abs().nan_to_num(nan=math.inf), return_inverse=True)
        counts = torch.zeros(len(magnitudes), dtype=torch.int64)
        counts.index_add_(0, index.flatten(), tally.codes[:, None].expand(index.shape).flatten())
        finite = torch.isfinite(magnitudes)
        return magnitudes[finite].tolist(), (counts[finite].double() / counts.sum()).tolist()

    def figures(self, tally: Tally) -> dict[str, Any]:
        """As written: `saturated` is the share of codes of the largest magnitude, of which each block has one at least
        where its scale is its largest value over that; `zero` the share of weights that are not zero and become it."""
        magnitudes, shares = self.occupancy(tally)
        top = float(self._of_bytes.nan_to_num(nan=0).max())
        other = tally.elements - tally.zeros
        return {
            "weights": tally.weights,
            "elements": tally.elements,
            "snr_db": tally.snr_db,
            "saturated": sum(s for m, s in zip(magnitudes, shares, strict=True) if m >= top),
            "zero": (shares[0] * tally.elements - tally.zeros) / other if other else 0.0,
            "bytes_before": tally.before,
            "bytes_after": tally.after,
        }

    def as_json(self) -> dict[str, Any]:
        def listed(keys: tuple[str, ...]) -> list[dict[str, Any]]:
            return [dict(zip(keys, k, strict=True)) | self.figures(t) for k, t in self.by(*keys).items()]

        return {
            "format": str(self.spec.format),
            "block": list(self.spec.block),
            "convention": self.spec.convention,
            "ignore": list(self.spec.ignore),
            "total": self.figures(self.by()[()]),
            "not_quantized": {"tensors": self._skipped[0], "bytes": self._skipped[1]},
            "kinds": listed(("kind", "projection")),
            "layers": listed(("layer", "kind", "projection")),
        }

    def write(self, directory: Path) -> None:
        """REPORT."""
        (directory / REPORT).write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    def table(self) -> Table:
        """For the console."""
        table = Table(title=f"{self.spec.format}, blocks of {self.spec.block[0]} x {self.spec.block[1]}")
        for column in ("weights", "", "number", "SNR dB", "saturated", "zero", "bytes before", "after"):
            table.add_column(column, justify="left" if column in ("weights", "") else "right")
        for (kind, projection), tally in self.by("kind", "projection").items():
            table.add_row(kind, projection, *_cells(self.figures(tally)))
        table.add_section()
        table.add_row("all", "", *_cells(self.figures(self.by()[()])))
        return table


def _cells(figures: Mapping[str, Any]) -> Iterable[str]:
    snr = figures["snr_db"]
    yield f"{figures['weights']:,}"
    yield "exact" if snr is None else f"{snr:.2f}"
    yield f"{figures['saturated']:.3%}"
    yield f"{figures['zero']:.3%}"
    yield f"{figures['bytes_before']:,}"
    yield f"{figures['bytes_after']:,}"


def _squares(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2
