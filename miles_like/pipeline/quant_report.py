"""The quantization error of a model, per kind of weight and per layer, measured while it is quantized.

Compares weights as bf16 (to which the codec rounds first) with the decoded values, and counts the stored codes byte by
byte. Only sums are kept.
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

from quant.formats.codec import Codec, QuantTensor
from quant.registry import make_codec
from quant.spec import QuantSpec

REPORT, PLOTS = "quant_report.json", "quant_report"
KINDS = ("attention", "dense MLP", "shared experts", "routed experts")
_CHUNK = 1 << 20  # elements per comparison


class Place(NamedTuple):
    """The position of a weight in a model."""

    layer: int
    kind: str  # of KINDS
    projection: str


def place_of(name: str) -> Place:
    """The place of a quantized weight, from its name."""
    *above, parent, projection, _ = name.split(".")
    layer = next((int(n) for before, n in zip(above, [*above[1:], parent], strict=True) if before == "layers"), 0)
    if parent == "self_attn":
        return Place(layer, "attention", projection)
    if parent.startswith("shared_expert"):
        return Place(layer, "shared experts", projection)
    return Place(layer, "routed experts" if parent.isdecimal() else "dense MLP", projection)


@dataclass
class WeightStats:
    """Sums over weights."""

    weights: int = 0
    elements: int = 0
    zeros: int = 0  # elements that are zero before encoding
    signal: float = 0.0  # sum of squares
    noise: float = 0.0  # sum of squared differences
    before: int = 0  # bytes as bf16, fp16 or fp32
    after: int = 0  # bytes of all parts
    codes: Tensor | None = None  # int64 [256]: number of stored bytes of each value

    def __iadd__(self, other: WeightStats) -> WeightStats:
        for name in ("weights", "elements", "zeros", "signal", "noise", "before", "after"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.codes = other.codes if self.codes is None or other.codes is None else self.codes + other.codes
        return self

    @property
    def snr_db(self) -> float | None:
        """10 log10 of signal over noise; None where the encoding is exact."""
        return 10 * math.log10(self.signal / self.noise) if self.signal > 0 and self.noise > 0 else None


class QuantReport:
    """Accumulates statistics of weights, and writes them."""

    def __init__(self, spec: QuantSpec) -> None:
        self.spec = spec
        self.codec: Codec = make_codec(spec)
        self._of_bytes = self.codec.levels_of_bytes()
        self._stats: defaultdict[Place, WeightStats] = defaultdict(WeightStats)
        self._skipped = [0, 0]  # tensors, bytes

    def skip(self, tensor: Tensor) -> None:
        """Count a tensor that is not quantized."""
        self._skipped[0] += 1
        self._skipped[1] += tensor.nbytes

    def add(self, name: str, w: Tensor, q: QuantTensor) -> None:
        """Add a weight [n, k] of any float dtype and its encoding."""
        stats = WeightStats(weights=1, elements=w.numel(), before=w.nbytes, after=q.nbytes)
        decoded, rows = self.codec.decode(q), max(1, _CHUNK // w.shape[1])
        for a in range(0, len(w), rows):
            was = w[a : a + rows].to(torch.bfloat16).float()
            stats.signal += _squares(was)
            stats.zeros += int((was == 0).sum())
            stats.noise += _squares(was - decoded[a : a + rows].float())
        stored = next(iter(q.stored.values())).contiguous().view(torch.uint8).flatten()
        stats.codes = sum(
            (c.bincount(minlength=256) for c in torch.split(stored, _CHUNK)), torch.zeros(256, dtype=torch.int64)
        )
        self._stats[place_of(name)] += stats

    def by(self, *keys: str) -> dict[tuple[Any, ...], WeightStats]:
        """Statistics summed per combination of `keys` ("layer", "kind", "projection"), sorted by these."""
        found: defaultdict[tuple[Any, ...], WeightStats] = defaultdict(WeightStats)
        order = sorted(self._stats, key=lambda p: (p.layer, KINDS.index(p.kind), p.projection))
        for place in order:
            found[tuple(getattr(place, key) for key in keys)] += self._stats[place]
        return dict(sorted(found.items(), key=lambda item: [KINDS.index(k) if k in KINDS else k for k in item[0]]))

    def occupancy(self, stats: WeightStats) -> tuple[list[float], list[float]]:
        """(magnitudes of codes before scaling, ascending; the share of codes with each)."""
        assert stats.codes is not None
        magnitudes, index = torch.unique(self._of_bytes.abs().nan_to_num(nan=math.inf), return_inverse=True)
        counts = torch.zeros(len(magnitudes), dtype=torch.int64)
        counts.index_add_(0, index.flatten(), stats.codes[:, None].expand(index.shape).flatten())
        finite = torch.isfinite(magnitudes)
        return magnitudes[finite].tolist(), (counts[finite].double() / counts.sum()).tolist()

    def figures(self, stats: WeightStats) -> dict[str, Any]:
        """The written figures. `saturated` is the share of codes of the largest magnitude, at least one per block where
        the scale is the block's largest value divided by that magnitude; `zero` is the share of nonzero weights that
        become zero."""
        magnitudes, shares = self.occupancy(stats)
        top = float(self._of_bytes.nan_to_num(nan=0).max())
        other = stats.elements - stats.zeros
        return {
            "weights": stats.weights,
            "elements": stats.elements,
            "snr_db": stats.snr_db,
            "saturated": sum(s for m, s in zip(magnitudes, shares, strict=True) if m >= top),
            "zero": (shares[0] * stats.elements - stats.zeros) / other if other else 0.0,
            "bytes_before": stats.before,
            "bytes_after": stats.after,
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
        """Write REPORT."""
        (directory / REPORT).write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    def table(self) -> Table:
        """The table for the console."""
        table = Table(title=f"{self.spec.format}, blocks of {self.spec.block[0]} x {self.spec.block[1]}")
        for column in ("weights", "", "number", "SNR dB", "saturated", "zero", "bytes before", "after"):
            table.add_column(column, justify="left" if column in ("weights", "") else "right")
        for (kind, projection), stats in self.by("kind", "projection").items():
            table.add_row(kind, projection, *_cells(self.figures(stats)))
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
