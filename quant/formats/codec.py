"""Base class of the codecs of quantized formats.

A codec is the only implementation of its format: checkpoint conversion, the trainer's fake quantization and weight
publication all call it, so they cannot disagree. Every codec rounds its input to bf16 first, so that an fp32 master and
its bf16 copy give the same codes.

Letters: B weights of one shape, n rows (out), k columns (in), r x c a tile of a weight.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from quant.formats.quant_tensor import Layout, PerBlock, PerWeight, QuantTensor
from quant.formats.tiles import amax_bits, tile_elements, tiles
from quant.spec import QuantSpec

__all__ = ["NOT_FINITE", "Codec", "Layout", "PerBlock", "PerWeight", "QuantTensor"]

_DAMAGED = (
    "NaN or infinite values; nothing was quantized. Check the source checkpoint, or the gradient norm of the last step"
)
NOT_FINITE = 0x7F80  # bits of infinity in bf16; those of a NaN are greater


class Codec(ABC):
    """Encoder and decoder of one format. The hooks work on tiles of whole blocks.

    `stored` maps the last component ("leaf") of each stored tensor's name to its dtype and shape. `_pack` and `_levels`
    may overwrite the codes of `_choose`, and `_scaled` the levels: each result is used once.
    """

    stored: Mapping[str, PerBlock | PerWeight]
    dropped: frozenset[str] = frozenset()  # leaves that are not read; the codec generates those that are in `stored`
    shared_amax: ClassVar[bool] = False  # whether scales depend on the largest magnitude of a whole bundle

    def __init__(self, spec: QuantSpec) -> None:
        self.spec = spec
        self.block = spec.block

    # ---- hooks

    @abstractmethod
    def _choose(self, w: Tensor, bits: Tensor, top: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The quantizer. w bf16 [B, r, c]; bits int16 [B, r/bn, c/bk] of each block's amax; top fp32 [B], the result of
        `_shared` -> codes [B, r, c], packed or not, and the scales as stored."""

    @abstractmethod
    def _pack(self, codes: Tensor) -> Tensor:
        """Codes of `_choose` -> codes as stored, before the cast to the stored dtype."""

    @abstractmethod
    def _levels(self, codes: Tensor) -> Tensor:
        """Codes of `_choose` -> their values before scaling, fp32 [B, r, c]."""

    @abstractmethod
    def _unpack(self, packed: Tensor) -> Tensor:
        """Codes as stored -> their values before scaling, fp32 [B, r, c]."""

    @abstractmethod
    def _scaled(self, levels: Tensor, scales: tuple[Tensor, ...], top: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Levels times scales: the decoded values before the one rounding to `dtype`."""

    def _whole(self, shape: tuple[int, ...], top: Tensor | None) -> dict[str, Tensor]:
        """The `PerWeight` tensors of B weights of one shape, [B, ...] or broadcast over B."""
        return {}

    def _shared(self, amax: Tensor) -> Tensor:
        """Largest magnitudes [B] of bundles -> the scale that the weights of a bundle share, as stored, fp32 [B]."""
        return amax

    def _top(self, whole: Mapping[str, Tensor]) -> Tensor | None:
        """The result of `_shared`, [B], from the stored `PerWeight` tensors."""
        return None

    def _check_values(self, name: str, stored: Mapping[str, Tensor]) -> None:  # noqa: B027 - most need none
        """Raises ValueError naming a stored tensor with invalid values."""

    def _check_whole(self, name: str, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> None:  # noqa: B027
        """Raises ValueError for a `PerWeight` tensor that contradicts the shape of the whole weight."""

    # ---- shapes and names

    @property
    def leaves(self) -> tuple[str, ...]:
        return tuple(self.stored)

    def bundle_of(self, name: str) -> tuple[str, ...]:
        """All weights that must be encoded together with `name`, including it, in the same order for each of them."""
        return (name,)

    def layout(self, shape: Sequence[int], name: str = "a weight") -> Layout:
        """Dtypes and shapes of the tensors stored for a weight [n, k]. Raises ValueError for a shape that the format
        cannot hold."""
        self._check_shape(name, shape)
        n, k = shape
        return {
            leaf: (p.dtype, (-(-n // p.rows), -(-k // p.columns))) if isinstance(p, PerBlock) else (p.dtype, p.shape)
            for leaf, p in self.stored.items()
        }

    def whole(self, shape: tuple[int, int], amax: Tensor | None = None) -> dict[str, Tensor]:
        """The `PerWeight` tensors of a weight of `shape`. amax: as in `encode`, for formats with a shared scale."""
        given = self._whole(shape, self._shared(amax[None]) if amax is not None and self.shared_amax else None)
        return {leaf: given[leaf].expand(1, *p.shape)[0] for leaf, p in self.stored.items() if isinstance(p, PerWeight)}

    def levels_of_bytes(self) -> Tensor:
        """fp32 [256, m]: the values before scaling, or NaN, of the m codes in each byte of stored codes."""
        stored = torch.arange(256, dtype=torch.uint8).view(next(iter(self.stored.values())).dtype)
        levels = self._unpack(stored[None, None]).view(256, -1)
        if stored.is_floating_point():  # `_unpack` does not handle NaN
            levels[stored.float().isnan()] = math.nan
        return levels

    def check_bundle(self, name: str, coded: Container[str]) -> None:
        """Raises ValueError where `name` would be stored without a weight that it shares a scale with, or where engines
        need a shared scale that the format does not have."""
        for other in self.bundle_of(name):
            if other not in coded:
                raise ValueError(f"{name} shares a scale with {other}, which is not quantized: quantize or ignore both")

    def shape_of(self, stored: Mapping[str, Tensor | tuple[int, ...]], name: str = "a weight") -> tuple[int, int]:
        """[n, k] of the weight, from the stored codes or their shape. Raises ValueError for codes that are not 2-D."""
        (leaf, kind), codes = next(iter(self.stored.items())), stored[next(iter(self.stored))]
        assert isinstance(kind, PerBlock)
        shape = tuple(codes.shape) if isinstance(codes, Tensor) else codes
        if len(shape) != 2:
            raise ValueError(f"{name}: {self.spec.format} codes ({leaf}) must be 2-D, but their shape is {list(shape)}")
        return shape[0] * kind.rows, shape[1] * kind.columns

    def _check_shape(self, name: str, shape: Sequence[int]) -> None:
        if len(shape) != 2 or not all(shape):
            raise ValueError(
                f"{name}: {self.spec.format} supports 2-D weights, but this shape is {list(shape)}: exclude the "
                "weight (ignore)"
            )
        bn, bk = self.block
        if bn == 1 and shape[1] % bk:
            raise ValueError(
                f"{name}: {shape[1]} columns are not a multiple of {self.spec.format}'s group of {bk} that shares "
                "a scale: choose a smaller group, or exclude the weight (ignore)"
            )

    # ---- encode

    @torch.no_grad()
    def encode(
        self, bundle: Mapping[str, Tensor], amax: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, QuantTensor]:
        """Weights [n, k] of any float dtype -> their stored tensors, which share no storage.

        All names of one `bundle_of` must be given, unless `amax` gives, for each name, the largest magnitude of its
        whole bundle (0-d). Weights of one shape are encoded together, so many at once are cheaper. Raises ValueError
        naming a weight that is not 2-D, not finite, or of a shape that the format cannot hold.
        """
        done: dict[str, QuantTensor] = {}
        for names, w, top in self._stacks(bundle, amax):
            shape = (w.shape[1], w.shape[2])
            whole, layout = self._whole(shape, top), self.layout(shape)
            stacked = {
                leaf: whole[leaf].expand(len(names), *kind.shape)
                if isinstance(kind, PerWeight)
                else torch.empty(len(names), *layout[leaf][1], dtype=kind.dtype, device=w.device)
                for leaf, kind in self.stored.items()
            }
            tiled = [(kind, stacked[leaf]) for leaf, kind in self.stored.items() if isinstance(kind, PerBlock)]
            for rows, columns in tiles(shape, self.block, tile_elements(w.device) // len(names)):
                codes, scales = self._quantize(bundle, w[:, rows, columns], top)
                for (kind, out), value in zip(tiled, (self._pack(codes), *scales), strict=True):
                    out[:, _cut(rows, kind.rows), _cut(columns, kind.columns)] = value
            # copies: a view into the stack would be pickled with the whole stack
            own = {leaf: t.unbind() if len(names) == 1 else [v.clone() for v in t] for leaf, t in stacked.items()}
            for i, name in enumerate(names):
                done[name] = QuantTensor({leaf: t[i] for leaf, t in own.items()}, shape)
        return {name: done[name] for name in bundle}

    @torch.no_grad()
    def fake(
        self,
        bundle: Mapping[str, Tensor],
        amax: Mapping[str, Tensor] | None = None,
        out: Mapping[str, Tensor] | None = None,
    ) -> Mapping[str, Tensor]:
        """`decode(encode(w))` of each weight, bf16 [n, k], without packing. out: name -> tensor to write to.

        Other arguments and errors as in `encode`.
        """
        done = dict(out) if out is not None else {}
        for names, w, top in self._stacks(bundle, amax):
            shape = (w.shape[1], w.shape[2])
            alone = len(names) == 1 and names[0] in done
            into = done[names[0]].view(w.shape) if alone else torch.empty_like(w)
            for rows, columns in tiles(shape, self.block, tile_elements(w.device) // len(names)):
                codes, scales = self._quantize(bundle, w[:, rows, columns], top)
                into[:, rows, columns] = self._scaled(self._levels(codes), scales, top, torch.bfloat16)
            if alone:
                continue
            for name, value in zip(names, into.unbind(), strict=True):
                if name in done:
                    done[name].copy_(value)
                else:
                    done[name] = value
        return {name: done[name] for name in bundle}

    def amax(self, w: Tensor) -> Tensor:
        """The largest magnitude of the bf16 copy of a weight, fp32, 0-d; NaN or infinite when the weight is not
        finite. Ranks that hold shards of a bundle reduce it by maximum."""
        bits = w.detach().to(torch.bfloat16).view(torch.int16).bitwise_and(0x7FFF).amax()
        return bits.view(torch.bfloat16).float()

    def _quantize(
        self, bundle: Mapping[str, Tensor], w: Tensor, top: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        bits = amax_bits(w, self.block)
        if int(bits.max()) >= NOT_FINITE:
            bad = next(n for n, x in bundle.items() if not bool(torch.isfinite(x.to(torch.bfloat16)).all()))
            raise ValueError(f"{bad}: the weight has {_DAMAGED}")
        return self._choose(w, bits, top)

    def _stacks(
        self, bundle: Mapping[str, Tensor], amax: Mapping[str, Tensor] | None
    ) -> Iterator[tuple[list[str], Tensor, Tensor | None]]:
        """Yields (names, [B, n, k] bf16, top [B]) of weights of one shape; a stack of several fits in a tile."""
        alike: defaultdict[tuple[torch.Size, torch.device], list[str]] = defaultdict(list)
        for name, w in bundle.items():
            if not w.is_floating_point():
                raise ValueError(f"{name}: {self.spec.format} supports 2-D float weights, but this dtype is {w.dtype}")
            self._check_shape(name, w.shape)
            alike[w.shape, w.device].append(name)
        tops = self._tops(bundle, amax) if self.shared_amax else None
        for (shape, device), names in alike.items():
            together = max(1, tile_elements(device) // shape.numel())
            for i in range(0, len(names), together):
                some = names[i : i + together]
                ws = [bundle[n].detach().to(torch.bfloat16) for n in some]
                w = torch.stack(ws) if len(ws) > 1 else ws[0].contiguous()[None]
                yield some, w, None if tops is None else self._shared(torch.stack([tops[n] for n in some]))

    def _tops(self, bundle: Mapping[str, Tensor], amax: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        if amax is None:
            own = {name: self.amax(w) for name, w in bundle.items()}
            amax = {}
            for name in bundle:
                names = self.bundle_of(name)
                if missing := [n for n in names if n not in own]:
                    raise ValueError(f"{name} shares a scale with {missing[0]}: encode them together")
                amax[name] = torch.stack([own[n] for n in names]).max()
        for name, value in amax.items():
            if not math.isfinite(float(value)):
                raise ValueError(f"{name}: the weight, or one that shares its scale, has {_DAMAGED}")
        return amax

    # ---- decode

    def decode(self, q: QuantTensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """[n, k] in `dtype`: the fp32 product of code and scale, rounded once."""
        return self.decode_stack([q], dtype)[0]

    @torch.no_grad()
    def decode_stack(
        self, qs: Sequence[QuantTensor], dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None
    ) -> Tensor:
        """[B, n, k]: `decode` of B weights of one shape, in one call for many small ones."""
        shape = qs[0].shape
        if any(q.shape != shape for q in qs):
            raise ValueError(f"weights of shapes {sorted({q.shape for q in qs})} cannot be stacked")
        n, k = shape
        for leaf, (_, want) in self.layout((n, k)).items():
            if tuple(qs[0].stored[leaf].shape) != want:
                have = tuple(qs[0].stored[leaf].shape)
                raise ValueError(
                    f"{leaf} {have} does not fit a weight {n} x {k} in blocks of {self.block}: expected {want}"
                )
        device = next(iter(qs[0].stored.values())).device
        if out is None:
            out = torch.empty(len(qs), n, k, dtype=dtype, device=device)
        together = max(1, tile_elements(device) // (n * k))
        for i in range(0, len(qs), together):
            some = {
                leaf: torch.stack([q.stored[leaf] for q in qs[i : i + together]])
                if together > 1
                else qs[i].stored[leaf][None]
                for leaf in self.stored
            }
            self._decode(some, out[i : i + together], out.dtype)
        return out

    @torch.no_grad()
    def decode_stored(self, stacked: Mapping[str, Tensor], out: Tensor) -> Tensor:
        """Stored tensors [B, ...] of B weights of one shape -> out [B, n, k] of any float dtype: the bf16 values of
        `decode`, cast. The shapes are not checked: each weight came through `adopt`."""
        together = max(1, tile_elements(out.device) // (out.shape[1] * out.shape[2]))
        for i in range(0, len(out), together):
            some = {leaf: t[i : i + together] for leaf, t in stacked.items()}
            self._decode(some, out[i : i + together], torch.bfloat16)
        return out

    def _decode(self, stacked: Mapping[str, Tensor], out: Tensor, dtype: torch.dtype) -> None:
        """Stored tensors [B, ...] -> out [B, n, k], with values rounded to `dtype`."""
        top = self._top({leaf: stacked[leaf] for leaf, kind in self.stored.items() if isinstance(kind, PerWeight)})
        tiled = [(kind, stacked[leaf]) for leaf, kind in self.stored.items() if isinstance(kind, PerBlock)]
        shape = (out.shape[1], out.shape[2])
        for rows, columns in tiles(shape, self.block, tile_elements(out.device) // len(out)):
            codes, *scales = (t[:, _cut(rows, kind.rows), _cut(columns, kind.columns)] for kind, t in tiled)
            value = self._scaled(self._unpack(codes), tuple(scales), top, dtype)
            out[:, rows, columns] = value if out.dtype is dtype else value.to(dtype)

    def adopt(self, name: str, stored: Mapping[str, Tensor], shape: tuple[int, int] | None = None) -> QuantTensor:
        """Stored tensors, read from a file or received -> the weight. shape: of the whole weight, where the tensors
        hold only some of its rows of blocks. Raises ValueError naming a tensor of a wrong shape or dtype, or with
        values that no encoder writes."""
        q = self.fit(name, stored)
        self._check_values(name.removesuffix(".weight"), q.stored)
        self._check_whole(name.removesuffix(".weight"), q.stored, shape or (q.shape[0], q.shape[1]))
        return q

    def fit(self, name: str, stored: Mapping[str, Tensor]) -> QuantTensor:
        """As `adopt`, without reading values: accepts tensors on the meta device."""
        shape = self.shape_of(stored, name)
        found: dict[str, Tensor] = {}
        for leaf in self.layout(shape, name):
            if leaf in self.dropped:
                found[leaf] = self._whole(shape, None)[leaf]
            else:
                found[leaf] = self.adopt_tensor(name, leaf, stored[leaf], shape)
        return QuantTensor(found, shape)

    def adopt_tensor(self, name: str, leaf: str, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """One stored tensor of the weight `name` [n, k], as this codec writes it. Raises ValueError for a wrong shape
        or dtype."""
        dtype, want = self.layout(shape, name)[leaf]
        fit = self._accept(leaf, tensor)
        if tuple(fit.shape) != want or fit.dtype != dtype:
            module = name.removesuffix(".weight")
            raise ValueError(
                f"{module}.{leaf}: {tensor.dtype} {tuple(tensor.shape)}; a weight {tuple(shape)} in "
                f"{self.spec.format} blocks of {self.block} needs {str(dtype).removeprefix('torch.')} {want}: "
                "check that the quantization_config in config.json belongs to these weights"
            )
        return fit

    def _accept(self, leaf: str, tensor: Tensor) -> Tensor:
        """Converts other dtypes and shapes that are read too to those that this codec writes."""
        return tensor


def _cut(run: slice, per: int) -> slice:
    return slice(run.start // per, -(-run.stop // per))
