"""What a codec is, and the one quantized value type.

A codec is the only place where its format is encoded or decoded: checkpoint conversion, the trainer's fake quantization
and weight publication all call it, so they cannot disagree. Every codec rounds what it is given to bf16 first: an fp32
master and its bf16 copy would choose other codes.

Letters: B weights of one shape, n rows (out), k columns (in), r x c a tile of one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from quant.parts import Layout, Part, QuantTensor, Whole
from quant.spec import QuantSpec
from quant.tiles import amax_bits, tile_elements, tiles

__all__ = ["NOT_FINITE", "Codec", "Layout", "Part", "QuantTensor", "Whole"]

_DAMAGED = (
    "NaN or infinite values; nothing was quantized. Check the checkpoint it came from, or the gradient norm of the "
    "last step"
)
NOT_FINITE = 0x7F80  # bits of bf16's infinity; a NaN's are above


class Codec(ABC):
    """One format. `parts` says what it stores; the hooks work on tiles that hold whole blocks.

    `_pack` and `_levels` may overwrite the codes of `_choose`, and `_scaled` the levels: each result is used once.
    """

    parts: Mapping[str, Part | Whole]
    dropped: frozenset[str] = frozenset()  # last components not read: those stored too, this codec makes itself
    shared_amax: ClassVar[bool] = False  # the largest magnitude of a whole bundle enters the scales

    def __init__(self, spec: QuantSpec) -> None:
        self.spec = spec
        self.block = spec.block

    # ---- hooks

    @abstractmethod
    def _choose(self, w: Tensor, bits: Tensor, top: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The quantizer. w bf16 [B, r, c]; bits int16 [B, r/bn, c/bk] of each block's amax; top fp32 [B], what
        `_shared` made of the bundles -> codes [B, r, c], packed or not, and the scales as stored."""

    @abstractmethod
    def _pack(self, codes: Tensor) -> Tensor:
        """Codes as `_choose` gives them -> as stored, but for the cast to the stored dtype."""

    @abstractmethod
    def _levels(self, codes: Tensor) -> Tensor:
        """Codes as `_choose` gives them -> what they stand for before scaling, fp32 [B, r, c]."""

    @abstractmethod
    def _unpack(self, packed: Tensor) -> Tensor:
        """Codes as stored -> the same."""

    @abstractmethod
    def _scaled(self, levels: Tensor, scales: tuple[Tensor, ...], top: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Levels times their scales, which rounded to `dtype` are the decoded values, rounded once."""

    def _whole(self, shape: tuple[int, ...], top: Tensor | None) -> dict[str, Tensor]:
        """Each `Whole` part of B weights of one shape, [B, ...] or the same for all."""
        return {}

    def _shared(self, amax: Tensor) -> Tensor:
        """The number that the weights of a bundle share, as stored, fp32 [B], of their largest magnitudes [B]."""
        return amax

    def _top(self, whole: Mapping[str, Tensor]) -> Tensor | None:
        """What `_shared` gave, [B], of the stored `Whole` parts."""
        return None

    def _check_values(self, name: str, parts: Mapping[str, Tensor]) -> None:  # noqa: B027 - most need none
        """Raises ValueError naming a part whose values cannot be meant."""

    def _check_whole(self, name: str, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> None:  # noqa: B027
        """The same of what `Whole` parts say of a weight of that shape."""

    # ---- shapes and names

    @property
    def leaves(self) -> tuple[str, ...]:
        return tuple(self.parts)

    def bundle_of(self, name: str) -> tuple[str, ...]:
        """All weights that must be encoded together with `name`, itself included, in an order that all share."""
        return (name,)

    def layout(self, shape: Sequence[int], name: str = "a weight") -> Layout:
        """Of what is stored for a weight [n, k]. Raises ValueError for a shape that the format cannot hold."""
        self._check_shape(name, shape)
        n, k = shape
        return {
            leaf: (p.dtype, (-(-n // p.rows), -(-k // p.columns))) if isinstance(p, Part) else (p.dtype, p.shape)
            for leaf, p in self.parts.items()
        }

    def whole(self, shape: tuple[int, int], amax: Tensor | None = None) -> dict[str, Tensor]:
        """Each `Whole` part of a weight of `shape`; `amax` as of `encode`, where magnitudes are shared."""
        given = self._whole(shape, self._shared(amax[None]) if amax is not None and self.shared_amax else None)
        return {leaf: given[leaf].expand(1, *p.shape)[0] for leaf, p in self.parts.items() if isinstance(p, Whole)}

    def levels_of_bytes(self) -> Tensor:
        """fp32 [256, m]: of each byte of stored codes, what the m codes in it stand for before scaling, or NaN."""
        stored = torch.arange(256, dtype=torch.uint8).view(next(iter(self.parts.values())).dtype)
        levels = self._unpack(stored[None, None]).view(256, -1)
        if stored.is_floating_point():  # `_unpack` is given no NaN
            levels[stored.float().isnan()] = math.nan
        return levels

    def check_bundle(self, name: str, coded: Container[str]) -> None:
        """Raises ValueError where a weight is to be stored without another that it shares a scale with, or would need
        to share one in engines and does not."""
        for other in self.bundle_of(name):
            if other not in coded:
                raise ValueError(
                    f"{name} shares a scale with {other}, which is not there to be quantized: quantize or ignore both"
                )

    def shape_of(self, parts: Mapping[str, Tensor | tuple[int, ...]], name: str = "a weight") -> tuple[int, int]:
        """[n, k] that the codes, or their shape, are of. Raises ValueError for codes that are not 2-D."""
        (leaf, part), codes = next(iter(self.parts.items())), parts[next(iter(self.parts))]
        assert isinstance(part, Part)
        shape = tuple(codes.shape) if isinstance(codes, Tensor) else codes
        if len(shape) != 2:
            raise ValueError(f"{name}: {self.spec.format} codes ({leaf}) are 2-D, these are {list(shape)}")
        return shape[0] * part.rows, shape[1] * part.columns

    def _check_shape(self, name: str, shape: Sequence[int]) -> None:
        if len(shape) != 2 or not all(shape):
            raise ValueError(f"{name}: {self.spec.format} holds 2-D weights, this one is {list(shape)}")
        bn, bk = self.block
        if bn == 1 and shape[1] % bk:
            raise ValueError(
                f"{name}: {shape[1]} columns are not a multiple of the group of {bk} that {self.spec.format} scales "
                "together: choose a smaller group, or leave the weight out (ignore)"
            )

    # ---- encode

    @torch.no_grad()
    def encode(
        self, bundle: Mapping[str, Tensor], amax: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, QuantTensor]:
        """Weights [n, k] of any float dtype -> what is stored of each, none sharing storage.

        Names of one `bundle_of` must come together, unless `amax` gives, for each name, the largest magnitude of its
        whole bundle (0-d). Many weights at once are cheaper, as those of one shape are encoded together. Raises
        ValueError naming a weight that is not 2-D, not finite, or of a shape the format cannot hold.
        """
        done: dict[str, QuantTensor] = {}
        for names, w, top in self._stacks(bundle, amax):
            shape = (w.shape[1], w.shape[2])
            whole, layout = self._whole(shape, top), self.layout(shape)
            parts = {
                leaf: whole[leaf].expand(len(names), *p.shape)
                if isinstance(p, Whole)
                else torch.empty(len(names), *layout[leaf][1], dtype=p.dtype, device=w.device)
                for leaf, p in self.parts.items()
            }
            tiled = [(p, parts[leaf]) for leaf, p in self.parts.items() if isinstance(p, Part)]
            for rows, columns in tiles(shape, self.block, tile_elements(w.device) // len(names)):
                codes, scales = self._quantize(bundle, w[:, rows, columns], top)
                for (part, out), value in zip(tiled, (self._pack(codes), *scales), strict=True):
                    out[:, _cut(rows, part.rows), _cut(columns, part.columns)] = value
            # a view into the stack would be pickled with the whole of it
            own = {leaf: p.unbind() if len(names) == 1 else [v.clone() for v in p] for leaf, p in parts.items()}
            for i, name in enumerate(names):
                done[name] = QuantTensor({leaf: p[i] for leaf, p in own.items()}, shape)
        return {name: done[name] for name in bundle}

    @torch.no_grad()
    def fake(
        self,
        bundle: Mapping[str, Tensor],
        amax: Mapping[str, Tensor] | None = None,
        out: Mapping[str, Tensor] | None = None,
    ) -> Mapping[str, Tensor]:
        """`decode(encode(w))` of each weight, bf16 [n, k], without the packing in between; into `out` where given.

        Arguments and errors as of `encode`.
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
        finite. What ranks that hold parts of a bundle take the maximum of."""
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
        """(names, [B, n, k] bf16, top [B]) of weights of one shape at a time; a stack of several fits in a tile."""
        alike: defaultdict[tuple[torch.Size, torch.device], list[str]] = defaultdict(list)
        for name, w in bundle.items():
            if not w.is_floating_point():
                raise ValueError(f"{name}: {self.spec.format} holds 2-D float weights, this one is {w.dtype}")
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
        """[B, n, k] of B weights of one shape, each as `decode` gives it; many small ones cost one call."""
        shape = qs[0].shape
        if any(q.shape != shape for q in qs):
            raise ValueError(f"weights of shapes {sorted({q.shape for q in qs})} cannot be stacked")
        n, k = shape
        for leaf, (_, want) in self.layout((n, k)).items():
            if tuple(qs[0].parts[leaf].shape) != want:
                have = tuple(qs[0].parts[leaf].shape)
                raise ValueError(
                    f"{leaf} {have} does not fit a weight {n} x {k} in blocks of {self.block}: want {want}"
                )
        device = next(iter(qs[0].parts.values())).device
        if out is None:
            out = torch.empty(len(qs), n, k, dtype=dtype, device=device)
        together = max(1, tile_elements(device) // (n * k))
        for i in range(0, len(qs), together):
            some = {
                leaf: torch.stack([q.parts[leaf] for q in qs[i : i + together]])
                if together > 1
                else qs[i].parts[leaf][None]
                for leaf in self.parts
            }
            self._decode(some, out[i : i + together], out.dtype)
        return out

    @torch.no_grad()
    def decode_parts(self, parts: Mapping[str, Tensor], out: Tensor) -> Tensor:
        """Parts [B, ...] of B weights of one shape, stacked once for many calls -> out [B, n, k] of any float dtype:
        the bf16 values of `decode`, cast. The shapes are not checked: each weight came through `adopt`."""
        together = max(1, tile_elements(out.device) // (out.shape[1] * out.shape[2]))
        for i in range(0, len(out), together):
            some = {leaf: p[i : i + together] for leaf, p in parts.items()}
            self._decode(some, out[i : i + together], torch.bfloat16)
        return out

    def _decode(self, parts: Mapping[str, Tensor], out: Tensor, dtype: torch.dtype) -> None:
        """parts [B, ...] -> out [B, n, k], with values rounded to `dtype`."""
        top = self._top({leaf: parts[leaf] for leaf, p in self.parts.items() if isinstance(p, Whole)})
        tiled = [(p, parts[leaf]) for leaf, p in self.parts.items() if isinstance(p, Part)]
        shape = (out.shape[1], out.shape[2])
        for rows, columns in tiles(shape, self.block, tile_elements(out.device) // len(out)):
            codes, *scales = (v[:, _cut(rows, p.rows), _cut(columns, p.columns)] for p, v in tiled)
            value = self._scaled(self._unpack(codes), tuple(scales), top, dtype)
            out[:, rows, columns] = value if out.dtype is dtype else value.to(dtype)

    def adopt(self, name: str, parts: Mapping[str, Tensor], shape: tuple[int, int] | None = None) -> QuantTensor:
        """Parts read from a file or a wire -> the weight. `shape`: of the whole weight, where the parts have only some
        whole rows of blocks of it. Raises ValueError naming a part of a wrong shape or dtype, and values that no
        encoder writes."""
        q = self.fit(name, parts)
        self._check_values(name.removesuffix(".weight"), q.parts)
        self._check_whole(name.removesuffix(".weight"), q.parts, shape or (q.shape[0], q.shape[1]))
        return q

    def fit(self, name: str, parts: Mapping[str, Tensor]) -> QuantTensor:
        """As `adopt`, but values are not looked at: tensors on the meta device will do."""
        shape = self.shape_of(parts, name)
        found: dict[str, Tensor] = {}
        for leaf in self.layout(shape, name):
            if leaf in self.dropped:
                found[leaf] = self._whole(shape, None)[leaf]
            else:
                found[leaf] = self.adopt_part(name, leaf, parts[leaf], shape)
        return QuantTensor(found, shape)

    def adopt_part(self, name: str, leaf: str, part: Tensor, shape: Sequence[int]) -> Tensor:
        """One part of the weight `name` [n, k], as this codec writes it. Raises ValueError naming a part of a wrong
        shape or dtype."""
        dtype, want = self.layout(shape, name)[leaf]
        fit = self._accept(leaf, part)
        if tuple(fit.shape) != want or fit.dtype != dtype:
            raise ValueError(
                f"{name.removesuffix('.weight')}.{leaf}: {part.dtype} {tuple(part.shape)}; a weight {tuple(shape)} in "
                f"{self.spec.format} blocks of {self.block} has {str(dtype).removeprefix('torch.')} {want}: is the "
                "quantization_config in config.json that of these weights?"
            )
        return fit

    def _accept(self, leaf: str, part: Tensor) -> Tensor:
        """A part in the dtype and shape that this codec writes, where what came means the same."""
        return part


def _cut(run: slice, per: int) -> slice:
    return slice(run.start // per, -(-run.stop // per))
