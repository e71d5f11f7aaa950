"""Base class of the codecs of quantized formats.

A codec is the only door to its format: checkpoint conversion, the trainer's fake quantization and weight publication
all call it, so they cannot disagree. Every codec rounds its input to bf16 first, so that an fp32 master and its bf16
copy give the same codes. Where `uses_triton` says so, the kernels of `quant/kernels` compute the bits of the hooks.

Letters: B weights of one shape, n rows (out), k columns (in), r x c a tile of a weight.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from quant.formats.quant_tensor import Layout, PerBlock, PerWeight, QuantTensor
from quant.formats.stored import StoredTensors
from quant.formats.tiles import amax_bits, tile_elements, tiles
from quant.kernels.choice import uses_triton
from quant.kernels.tally import ENCODED

if TYPE_CHECKING:
    from quant.kernels.launch import Kernels

__all__ = ["NOT_FINITE", "Codec", "Layout", "PerBlock", "PerWeight", "QuantTensor"]

_DAMAGED = (
    "NaN or infinite values; nothing was quantized. Check the source checkpoint, or the gradient norm of the last step"
)
NOT_FINITE = 0x7F80  # bits of infinity in bf16; those of a NaN are greater


class Codec(StoredTensors):
    """Encoder and decoder of one format. The hooks work on tiles of whole blocks. `_pack` and `_levels` may overwrite
    the codes of `_choose`, and `_scaled` the levels: each result is used once."""

    shared_amax: ClassVar[bool] = False  # whether scales depend on the largest magnitude of a whole bundle
    of_weight: str = ""  # the `PerWeight` leaf that holds the result of `_shared`; "": there is none
    divides: bool = False  # whether decoding divides by it
    bf16_values: ClassVar[bool] = False  # whether decoded values are bf16 in every dtype of computation

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

    def _shared(self, amax: Tensor) -> Tensor:
        """Largest magnitudes [B] of bundles -> the scale that the weights of a bundle share, as stored, fp32 [B]."""
        return amax

    # ---- encode

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
        for some, top in self._alike(bundle, amax):
            kernels = self._kernels(some)
            encoded = self._encode(some, top) if kernels is None else self._encode_by(kernels, some, top)
            done |= dict(zip(some, encoded, strict=True))
            size = sum(w.numel() for w in some.values())
            if kernels is None:
                ENCODED.torch += size
            else:
                ENCODED.triton += size
        return {name: done[name] for name in bundle}

    def _encode(self, some: Mapping[str, Tensor], top: Tensor | None) -> Iterator[QuantTensor]:
        for names, w, tops in self._stacks(some, top):
            shape = (w.shape[1], w.shape[2])
            stacked = self._empty(shape, tops, len(names), w.device)
            tiled = [(kind, stacked[leaf]) for leaf, kind in self.stored.items() if isinstance(kind, PerBlock)]
            for rows, columns in tiles(shape, self.block, tile_elements(w.device) // len(names)):
                codes, scales = self._quantize(some, w[:, rows, columns], tops)
                for (kind, out), value in zip(tiled, (self._pack(codes), *scales), strict=True):
                    out[:, _cut(rows, kind.rows), _cut(columns, kind.columns)] = value
            # copies: a view into the stack would be pickled with the whole stack
            own = {leaf: t.unbind() if len(names) == 1 else [v.clone() for v in t] for leaf, t in stacked.items()}
            for i in range(len(names)):
                yield QuantTensor({leaf: t[i] for leaf, t in own.items()}, shape)

    def _encode_by(self, kernels: Kernels, some: Mapping[str, Tensor], top: Tensor | None) -> Iterator[QuantTensor]:
        weights = [_on_device(w) for w in some.values()]
        device, shape = weights[0].device, (weights[0].shape[0], weights[0].shape[1])
        layout = self.layout(shape)
        (code, codes), (scale, scales) = (
            layout[leaf] for leaf, kind in self.stored.items() if isinstance(kind, PerBlock)
        )
        stored = [
            (torch.empty(codes, dtype=code, device=device), torch.empty(scales, dtype=scale, device=device))
            for _ in weights
        ]
        damaged = kernels.encode(weights, stored, top)
        tops = [None] * len(weights) if top is None else [torch.full((1,), t, device=device) for t in top.tolist()]
        found = []
        for tensors, one in zip(stored, tops, strict=True):
            tiled, whole = iter(tensors), self._whole(shape, one)
            found.append(
                QuantTensor(
                    {
                        leaf: whole[leaf].expand(1, *kind.shape)[0] if isinstance(kind, PerWeight) else next(tiled)
                        for leaf, kind in self.stored.items()
                    },
                    shape,
                )
            )
        self._refuse(some, damaged)
        return iter(found)

    def _empty(self, shape: tuple[int, int], top: Tensor | None, count: int, device: torch.device) -> dict[str, Tensor]:
        """Stored tensors [B, ...] of B = `count` weights: those of blocks are not written yet."""
        whole, layout = self._whole(shape, top), self.layout(shape)
        return {
            leaf: whole[leaf].expand(count, *kind.shape)
            if isinstance(kind, PerWeight)
            else torch.empty(count, *layout[leaf][1], dtype=kind.dtype, device=device)
            for leaf, kind in self.stored.items()
        }

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
        for some, top in self._alike(bundle, amax):
            kernels = self._kernels(some)
            if kernels is None:
                self._fake(some, top, done)
            else:
                self._fake_by(kernels, some, top, done)
        return {name: done[name] for name in bundle}

    def _fake(self, some: Mapping[str, Tensor], top: Tensor | None, done: dict[str, Tensor]) -> None:
        for names, w, tops in self._stacks(some, top):
            shape = (w.shape[1], w.shape[2])
            alone = len(names) == 1 and names[0] in done
            into = done[names[0]].view(w.shape) if alone else torch.empty_like(w)
            for rows, columns in tiles(shape, self.block, tile_elements(w.device) // len(names)):
                codes, scales = self._quantize(some, w[:, rows, columns], tops)
                into[:, rows, columns] = self._scaled(self._levels(codes), scales, tops, torch.bfloat16)
            if not alone:
                _keep(done, names, into.unbind())

    def _fake_by(
        self, kernels: Kernels, some: Mapping[str, Tensor], top: Tensor | None, done: dict[str, Tensor]
    ) -> None:
        weights = [_on_device(w) for w in some.values()]
        into = [
            given if (given := done.get(name)) is not None and _is_plain(given) else torch.empty_like(w)
            for name, w in zip(some, weights, strict=True)
        ]
        self._refuse(some, kernels.fake(weights, into, top))
        _keep(done, list(some), into)

    def amax(self, w: Tensor) -> Tensor:
        """The largest magnitude of the bf16 copy of a weight, fp32, 0-d; NaN or infinite when the weight is not
        finite. Ranks that hold shards of a bundle reduce it by maximum."""
        return self._amaxes({"": w})[""]

    def _amaxes(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`amax` of each; one launch of a kernel for all weights of one size."""
        found: dict[str, Tensor] = {}
        alike: defaultdict[tuple[int, torch.device], dict[str, Tensor]] = defaultdict(dict)
        for name, w in weights.items():
            w = w.detach().to(torch.bfloat16)
            if uses_triton(w) and _is_plain(w) and not w.numel() % 2:
                alike[w.numel(), w.device][name] = w
            else:
                found[name] = w.view(torch.int16).bitwise_and(0x7FFF).amax().view(torch.bfloat16).float()
        for some in alike.values():
            from quant.kernels import launch

            found |= dict(zip(some, launch.amax(list(some.values())).unbind(), strict=True))
        return found

    def _quantize(
        self, bundle: Mapping[str, Tensor], w: Tensor, top: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        bits = amax_bits(w, self.block)
        self._refuse(bundle, bits.amax() >= NOT_FINITE)
        return self._choose(w, bits, top)

    def _refuse(self, bundle: Mapping[str, Tensor], damaged: Tensor) -> None:
        """Raises ValueError naming a weight that is not finite, where one of the flags is set."""
        if any(damaged.flatten().tolist()):
            bad = next(n for n, x in bundle.items() if not bool(torch.isfinite(x.to(torch.bfloat16)).all()))
            raise ValueError(f"{bad}: the weight has {_DAMAGED}")

    def _alike(
        self, bundle: Mapping[str, Tensor], amax: Mapping[str, Tensor] | None
    ) -> Iterator[tuple[dict[str, Tensor], Tensor | None]]:
        """Yields the weights of one shape and device, and the result of `_shared` [B], on the CPU."""
        alike: defaultdict[tuple[torch.Size, torch.device], dict[str, Tensor]] = defaultdict(dict)
        for name, w in bundle.items():
            if not w.is_floating_point():
                raise ValueError(f"{name}: {self.spec.format} supports 2-D float weights, but this dtype is {w.dtype}")
            self._check_shape(name, w.shape)
            alike[w.shape, w.device][name] = w
        tops = self._tops(bundle, amax) if self.shared_amax else None
        for some in alike.values():
            yield some, None if tops is None else self._shared(torch.tensor([tops[n] for n in some]))

    def _stacks(
        self, some: Mapping[str, Tensor], top: Tensor | None
    ) -> Iterator[tuple[list[str], Tensor, Tensor | None]]:
        """Yields (names, [B, n, k] bf16, top [B]) of weights of one shape; a stack of several fits in a tile."""
        names, first = list(some), next(iter(some.values()))
        together = max(1, tile_elements(first.device) // first.numel())
        for i in range(0, len(names), together):
            ws = [some[n].detach().to(torch.bfloat16) for n in names[i : i + together]]
            w = torch.stack(ws) if len(ws) > 1 else ws[0].contiguous()[None]
            yield names[i : i + together], w, None if top is None else top[i : i + together].to(w.device)

    def _kernels(self, some: Mapping[str, Tensor]) -> Kernels | None:
        """The Triton kernels that encode weights of one shape and device; None: PyTorch encodes them."""
        w = next(iter(some.values()))
        if not uses_triton(w):
            return None
        from quant.kernels.launch import Kernels

        kernels = Kernels(self.spec.format.value, self.block, self.divides)
        return kernels if kernels.serve((w.shape[0], w.shape[1])) else None

    def _tops(self, bundle: Mapping[str, Tensor], amax: Mapping[str, Tensor] | None) -> Mapping[str, float]:
        """The largest magnitude of each weight's bundle. One copy from the device for all."""
        given = self._amaxes(bundle) if amax is None else amax
        if not given:
            return {}
        tops = dict(zip(given, torch.stack(list(given.values())).tolist(), strict=True))
        if amax is None:
            own, tops = tops, {}
            for name in bundle:
                names = self.bundle_of(name)
                if missing := [n for n in names if n not in own]:
                    raise ValueError(f"{name} shares a scale with {missing[0]}: encode them together")
                tops[name] = next((own[n] for n in names if not math.isfinite(own[n])), max(own[n] for n in names))
        for name, value in tops.items():
            if not math.isfinite(value):
                raise ValueError(f"{name}: the weight, or one that shares its scale, has {_DAMAGED}")
        return tops

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
        if (kernels := self._decoders(out, device)) is not None:
            self._decode_by(kernels, {leaf: [q.stored[leaf] for q in qs] for leaf in self.stored}, out, out.dtype)
            return out
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
        if (kernels := self._decoders(out, next(iter(stacked.values())).device)) is not None:
            self._decode_by(kernels, {leaf: t.unbind() for leaf, t in stacked.items()}, out, torch.bfloat16)
            return out
        together = max(1, tile_elements(out.device) // (out.shape[1] * out.shape[2]))
        for i in range(0, len(out), together):
            some = {leaf: t[i : i + together] for leaf, t in stacked.items()}
            self._decode(some, out[i : i + together], torch.bfloat16)
        return out

    def _decoders(self, out: Tensor, device: torch.device) -> Kernels | None:
        """The Triton kernels that decode what lies on `device` to out [B, n, k]; None: PyTorch does."""
        if out.dtype not in (torch.bfloat16, torch.float32) or not out.is_contiguous() or out.device != device:
            return None
        return self._kernels({"": out[0]}) if out.numel() else None

    def _decode_by(
        self, kernels: Kernels, stored: Mapping[str, Sequence[Tensor]], out: Tensor, dtype: torch.dtype
    ) -> None:
        """Stored tensors of each of B weights -> out [B, n, k], with values rounded to `dtype`."""
        tiled = [leaf for leaf, kind in self.stored.items() if isinstance(kind, PerBlock)]
        codes, scales = ([t.contiguous() for t in stored[leaf]] for leaf in tiled)
        top = torch.stack(list(stored[self.of_weight])).flatten() if self.of_weight else None
        kernels.decode(codes, scales, out.unbind(), top, rounded=self.bf16_values or dtype is torch.bfloat16)

    def _decode(self, stacked: Mapping[str, Tensor], out: Tensor, dtype: torch.dtype) -> None:
        """Stored tensors [B, ...] -> out [B, n, k], with values rounded to `dtype`."""
        top = stacked[self.of_weight].flatten() if self.of_weight else None
        tiled = [(kind, stacked[leaf]) for leaf, kind in self.stored.items() if isinstance(kind, PerBlock)]
        shape = (out.shape[1], out.shape[2])
        for rows, columns in tiles(shape, self.block, tile_elements(out.device) // len(out)):
            codes, *scales = (t[:, _cut(rows, kind.rows), _cut(columns, kind.columns)] for kind, t in tiled)
            value = self._scaled(self._unpack(codes), tuple(scales), top, dtype)
            out[:, rows, columns] = value if out.dtype is dtype else value.to(dtype)


def _cut(run: slice, per: int) -> slice:
    return slice(run.start // per, -(-run.stop // per))


def _keep(done: dict[str, Tensor], names: Sequence[str], values: Sequence[Tensor]) -> None:
    """Enters values, or copies them to the tensors that `done` has for their names."""
    for name, value in zip(names, values, strict=True):
        if name not in done:
            done[name] = value
        elif done[name] is not value:
            done[name].copy_(value)


def _on_device(w: Tensor) -> Tensor:
    """A weight as kernels read it: bf16, contiguous, at a multiple of 16 bytes."""
    if not _is_plain(w):
        w = w.detach().to(torch.bfloat16).contiguous()
    return w if _is_plain(w) else w.clone()


def _is_plain(w: Tensor) -> bool:
    return w.dtype is torch.bfloat16 and w.is_contiguous() and w.data_ptr() % 16 == 0
