"""The expert choices of one token sequence, and their form on SGLang's wire.

Letters: S tokens, L MoE layers, K experts a token, E experts. Row i holds the experts token i was routed to when it was
fed, so the last sampled token has none and a sequence of S tokens has S-1 rows.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def id_dtype(num_experts: int) -> torch.dtype:
    """Smallest type that holds expert ids 0..num_experts-1: uint8, else int16."""
    if not 0 < num_experts <= 32768:
        raise ValueError(f"{num_experts} experts do not fit int16 ids")
    return torch.uint8 if num_experts <= 256 else torch.int16


def _raw(payload: str, rows: int, row_bytes: int, num_layers: int, top_k: int) -> bytes:
    try:
        raw = binascii.a2b_base64(payload, strict_mode=True)
    except ValueError as e:  # binascii.Error is one
        raise ValueError(f"routed_experts is not base64: {e}") from None
    want = rows * row_bytes
    if len(raw) not in (want, want + row_bytes):
        raise ValueError(
            f"routed_experts has {len(raw)} bytes; {rows} rows x {num_layers} layers x {top_k} experts x 4 = {want}"
        )
    return raw[:want]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingTrace:
    """Logical expert ids of the MoE layers only, in the router's own order within a row."""

    experts: Tensor  # [rows, L, K] uint8 (E <= 256) or int16
    layers: tuple[int, ...]  # [L] global decoder-layer numbers from 0, ascending
    num_experts: int

    def __post_init__(self) -> None:
        if self.experts.ndim != 3 or self.experts.shape[1] != len(self.layers):
            raise ValueError(f"experts {tuple(self.experts.shape)} does not fit {len(self.layers)} MoE layers")
        if self.experts.dtype != id_dtype(self.num_experts):
            raise ValueError(
                f"ids of {self.num_experts} experts are {id_dtype(self.num_experts)}, not {self.experts.dtype}"
            )
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers {self.layers} are not ascending")

    def __len__(self) -> int:
        return int(self.experts.shape[0])

    @property
    def top_k(self) -> int:
        return int(self.experts.shape[2])

    def check(self) -> None:
        """Every id in range, no expert twice in a row. Raises ValueError naming row and layer."""
        ids = self.experts.to(torch.int64)
        bad = (ids < 0) | (ids >= self.num_experts)
        if bad.any():
            r, layer, _ = (int(x) for x in bad.nonzero()[0])
            raise ValueError(
                f"row {r}, layer {self.layers[layer]}: ids {ids[r, layer].tolist()} outside 0..{self.num_experts - 1}"
            )
        ordered = ids.sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        if twice.any():
            r, layer = (int(x) for x in twice.nonzero()[0])
            raise ValueError(f"row {r}, layer {self.layers[layer]}: an expert twice in {ids[r, layer].tolist()}")

    @classmethod
    def from_wire(
        cls, payload: str, *, rows: int, num_layers: int, layers: Sequence[int], top_k: int, num_experts: int
    ) -> RoutingTrace:
        """`many_from_wire` of one sequence."""
        return cls.many_from_wire(
            [payload], rows=[rows], num_layers=num_layers, layers=layers, top_k=top_k, num_experts=num_experts
        )[0]

    @classmethod
    def many_from_wire(
        cls,
        payloads: Sequence[str],
        *,
        rows: Sequence[int],
        num_layers: int,
        layers: Sequence[int],
        top_k: int,
        num_experts: int,
    ) -> list[RoutingTrace]:
        """Read SGLang's `meta_info.routed_experts`, one a sequence: base64 of little-endian int32
        [rows, num_layers, K].

        The wire has all layers, dense ones zero-filled; only `layers` are kept. A server may also have fed the last
        sampled token (a stop at the edge of a batch): that row predicts nothing we train on and is dropped. Any other
        length, an id out of range or an expert twice in a row is a ValueError. All sequences are read and checked at
        once: a step has hundreds of short ones.
        """
        if not payloads:
            return []
        row_bytes = num_layers * top_k * 4
        parts = [_raw(p, n, row_bytes, num_layers, top_k) for p, n in zip(payloads, rows, strict=True)]
        ids = np.frombuffer(b"".join(parts), dtype="<i4").reshape(-1, num_layers, top_k)[:, list(layers)]
        if ids.size and (ids.min() < 0 or ids.max() >= num_experts):
            raise ValueError(
                f"routed_experts has ids {ids.min()}..{ids.max()}; the model has experts 0..{num_experts - 1}"
            )
        whole = cls(
            experts=torch.from_numpy(np.ascontiguousarray(ids)).to(id_dtype(num_experts)),
            layers=tuple(layers),
            num_experts=num_experts,
        )
        whole.check()
        split = torch.split(whole.experts, list(rows))
        return [cls(experts=e, layers=whole.layers, num_experts=num_experts) for e in split]

    def to_wire(self, *, num_layers: int) -> str:
        """The inverse of `from_wire`: all `num_layers`, zeros where there is no router."""
        out = np.zeros((len(self), num_layers, self.top_k), dtype="<i4")
        out[:, list(self.layers)] = self.experts.to(torch.int32).numpy()
        return base64.b64encode(out.tobytes()).decode("ascii")

    @staticmethod
    def concat(traces: Sequence[RoutingTrace]) -> RoutingTrace:
        """Rows of several sequences, end to end. Raises ValueError when their layers or experts differ."""
        first = traces[0]
        for t in traces[1:]:
            if t.layers != first.layers or t.num_experts != first.num_experts or t.top_k != first.top_k:
                raise ValueError(
                    f"traces of different models: layers {first.layers} and {t.layers}, "
                    f"experts {first.num_experts} and {t.num_experts}, top-k {first.top_k} and {t.top_k}"
                )
        return RoutingTrace(
            experts=torch.cat([t.experts for t in traces]), layers=first.layers, num_experts=first.num_experts
        )
