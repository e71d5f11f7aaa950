"""Which Hugging Face tensors a `torch_dist` directory holds, where each lies, and how they are written: `to_hf`'s work
on one file of the output."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.convert.boxes import checkpoint_key
from megatron_bridge.convert.torch_dist import TorchDist
from megatron_bridge.convert.units import HashedFile
from megatron_bridge.families.base import HFConfig, Place, Split, TensorMap
from megatron_bridge.families.registry import family_of
from miles_like.hf_checkpoint import DTYPE_NAMES
from miles_like.types import REFERENCE
from quant.codec import Codec
from quant.registry import codec_or_none, make_codec
from quant.spec import QuantSpec
from quant.stream import stored_name

_ADAPTERS = (".lora_a", ".lora_b")
_BESIDE = ("optimizer.", f"{REFERENCE}.")  # what a trainer saves beside its weights
_KEPT_FRAMING = 1 << 16  # of an archive, beside its tensor
_OTHER_MODEL = "is hf_config that of the model in the checkpoint?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A Hugging Face tensor and where its rows lie in the checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # before quantization
    key: str
    lead: tuple[int, ...]  # (expert,) in the tensor of all experts
    runs: tuple[tuple[int, int, int], ...]  # (first row here, first row there, rows)
    quantized: bool
    adapted: bool  # the checkpoint holds adapters of it

    @property
    def row_elements(self) -> int:
        return math.prod(self.shape[1:])


def bind(source: TorchDist, config: HFConfig) -> TensorMap:
    """The family's table for what the checkpoint holds: with draft layers where it has any."""
    family = family_of(config)
    tensors = family.bind(config, mtp=True)
    drafts = any(p.depth is not None and checkpoint_key(p) in source for p in tensors.places())
    return tensors if drafts else family.bind(config)


def outputs(source: TorchDist, tensors: TensorMap, spec: QuantSpec, *, merge: bool) -> list[Output]:
    """Every Hugging Face tensor, copies in draft layers included, in the order of their names' numbers.

    Raises ValueError naming a tensor that the checkpoint lacks, that it has beside the model's, or that has another
    shape than config.json wants; for adapters, unless they are to be merged; and where there are none to be merged.
    """
    adapters = {key.rpartition(".")[0] for key in source.names() if key.endswith(_ADAPTERS)}
    adapters = {key for key in adapters if not key.startswith(_BESIDE)}
    if adapters and not merge:
        raise ValueError(
            f"{source.path} holds LoRA adapters of {len(adapters)} weights, first {min(adapters)}: give lora_alpha, "
            "the run's lora.alpha, to merge them into the weights"
        )
    if merge and not adapters:
        raise ValueError(f"{source.path} holds no LoRA adapters: leave lora_alpha out")
    out: list[Output] = []
    known: set[str] = set()
    for place in tensors.places():
        key = checkpoint_key(place)
        if key not in known:
            _check(source, tensors, place, key)
            known.add(key)
        out += [
            Output(
                name=name,
                shape=place.shape,
                dtype=tensors.dtype(place.entry),
                key=key,
                lead=() if place.expert is None else (place.expert,),
                runs=tuple(tensors.runs(place.entry, place.part)),
                quantized=spec.covers(name, place.shape),
                adapted=key.removesuffix(".weight") in adapters,
            )
            for name in (place.hf_name, *tensors.copies_of(place.entry))
        ]
    extra = {k for k in source.names() if not k.startswith(_BESIDE) and not k.endswith(_ADAPTERS)} - known
    if extra:
        raise ValueError(
            f"{source.path} has {len(extra)} tensors that are not in the model of config.json, first {min(extra)}: "
            f"{_OTHER_MODEL}"
        )
    if (codec := codec_or_none(spec)) is not None:
        coded = {o.name for o in out if o.quantized}
        for name in sorted(coded):
            codec.check_bundle(name, coded)
    return sorted(out, key=lambda o: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", o.name)])


def _check(source: TorchDist, tensors: TensorMap, place: Place, key: str) -> None:
    if key not in source:
        raise ValueError(f"{source.path} lacks {key}, which {place.hf_name} is written from: {_OTHER_MODEL}")
    stored = source.stored(key)
    lead = () if place.expert is None else (tensors.dims["experts"],)
    want = (*lead, *tensors.megatron_shape(place.entry))
    have = stored.shape
    if place.entry.split is Split.VOCAB and len(have) == len(want) and have[0] > want[0]:
        have = (want[0], *have[1:])  # padding after the vocabulary
    if have != want:
        raise ValueError(
            f"{source.path}: {key} has shape {list(stored.shape)}, config.json wants {list(want)}: {_OTHER_MODEL}"
        )
    if stored.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{source.path}: {key} is {stored.dtype}: bfloat16 and float32 are read")


def shards(outputs: Sequence[Output], spec: QuantSpec, shard_bytes: int) -> list[list[Output]]:
    """Runs of about `shard_bytes`; a larger tensor has a file of its own."""
    files: list[list[Output]] = [[]]
    size = 0
    for output in outputs:
        nbytes = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in parts(output, spec))
        if files[-1] and size + nbytes > shard_bytes:
            files.append([])
            size = 0
        files[-1].append(output)
        size += nbytes
    return files


def parts(output: Output, spec: QuantSpec) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    """(name, dtype, shape) of what is stored of a tensor: itself, or codes and what belongs to them.

    Raises ValueError for a shape that the format cannot hold.
    """
    if not output.quantized:
        yield output.name, output.dtype, output.shape
        return
    for leaf, (dtype, shape) in make_codec(spec).layout(output.shape, output.name).items():
        yield stored_name(output.name, leaf), dtype, shape


def held_bytes(output: Output, spec: QuantSpec) -> int:
    """Of what is stored of a tensor beside its codes."""
    _, *others = parts(output, spec)
    return sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in others)


class WriteShards:
    """The files of the output as a job (`units.Job`). Each process opens the checkpoint for itself."""

    def __init__(
        self,
        path: Path,
        files: Sequence[Sequence[Output]],
        spec: QuantSpec,
        *,
        chunk_bytes: int,
        lora_alpha: float | None,
        identity: str,
    ) -> None:
        """`identity`: of the checkpoint's contents."""
        self.path, self.files, self.spec = path, files, spec
        self.chunk_bytes, self.lora_alpha, self.identity = chunk_bytes, lora_alpha, identity
        self._source: TorchDist | None = None
        self._named: dict[str, Output] = {}
        self._amax_of: dict[tuple[str, ...], Tensor] = {}  # of the last bundle

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_source": None, "_named": {}, "_amax_of": {}}

    @property
    def count(self) -> int:
        return len(self.files)

    def file(self, number: int) -> str:
        if self.count == 1:
            return "model.safetensors"
        return f"model-{number + 1:05d}-of-{self.count:05d}.safetensors"

    def proof(self, number: int) -> str:
        described = [[asdict(o) for o in self.files[number]], asdict(self.spec), self.lora_alpha, self.identity]
        return hashlib.sha256(json.dumps(described, default=str).encode()).hexdigest()

    def write(self, number: int, out: HashedFile) -> list[list[Any]]:
        """[name, dtype, shape, start, size, checksum] of each tensor. Raises as `TorchDist.read`, and ValueError naming
        a tensor that is not finite."""
        if self._source is None:
            self._source = TorchDist(self.path, keep_bytes=self.chunk_bytes + _KEPT_FRAMING)
        out.write(self._header(number))
        out.cut()
        facts = []
        room = torch.empty(self.chunk_bytes, dtype=torch.uint8)  # fresh memory for each band costs as much as reading
        for output in self.files[number]:
            if output.quantized:
                written: Iterator[Iterable[Tensor]] = self._coded(self._source, output, room)
            else:
                written = iter([self._bands(self._source, output, room)])
            for (name, dtype, shape), bands in zip(parts(output, self.spec), written, strict=True):
                for value in bands:
                    out.write(_bytes(value))
                facts.append([name, str(dtype).removeprefix("torch."), shape, *out.cut()])
        self._source.close()
        return facts

    def _header(self, number: int) -> bytes:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for output in self.files[number]:
            for name, dtype, shape in parts(output, self.spec):
                start, end = end, end + math.prod(shape) * dtype.itemsize
                header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        return len(raw).to_bytes(8, "little") + raw

    def _coded(self, source: TorchDist, output: Output, room: Tensor) -> Iterator[Iterable[Tensor]]:
        """Each part of what a weight is stored as, by bands: the codes, then what belongs to them, which is held."""
        codec = make_codec(self.spec)
        codes, amax = codec.leaves[0], self._amax(source, output, codec, room)
        held: defaultdict[str, list[Tensor]] = defaultdict(list)

        def encoded() -> Iterator[Tensor]:
            for band in self._bands(source, output, room):
                q = codec.encode({output.name: band}, None if amax is None else {output.name: amax})[output.name]
                for leaf, value in q.parts.items():
                    held[leaf].append(value)
                yield held.pop(codes)[0]

        yield encoded()
        whole = codec.whole((output.shape[0], output.shape[1]), amax)
        for leaf in codec.leaves[1:]:
            yield [whole[leaf]] if leaf in whole else held[leaf]

    def _amax(self, source: TorchDist, output: Output, codec: Codec, room: Tensor) -> Tensor | None:
        """The largest magnitude of all that is encoded with a weight, where its scales depend on it: one reading more
        of each, once for two that follow each other."""
        if not codec.shared_amax:
            return None
        bundle = codec.bundle_of(output.name)
        if bundle not in self._amax_of:
            if not self._named:
                self._named = {o.name: o for file in self.files for o in file}
            each = [codec.amax(band) for name in bundle for band in self._bands(source, self._named[name], room)]
            self._amax_of = {bundle: torch.stack(each).max()}
        return self._amax_of[bundle]

    def _bands(self, source: TorchDist, output: Output, room: Tensor) -> Iterator[Tensor]:
        """The tensor in its dtype, some rows at a time; whole rows of blocks where it is quantized."""
        rows, unit = output.shape[0], self.spec.block[0] if output.quantized else 1
        held = source.stored(output.key).dtype
        # the encoder and the adapters work in fp32
        wide = 4 if output.quantized or output.adapted else held.itemsize
        step = max(1, self.chunk_bytes // max(1, output.row_elements * wide) // unit) * unit
        for a in range(0, rows, step):
            b = min(rows, a + step)
            elements = (b - a) * output.row_elements
            band = _room(room, elements, held).view(b - a, *output.shape[1:])
            for inside, key_row, n in _cut(output.runs, a, b):
                self._read(source, output, band[inside : inside + n], key_row)
            if output.adapted:
                band = self._merged(source, output, band, a)
            value = band.to(output.dtype)
            # a manifest's tensors were finite when they were converted, and are what they were
            if (source.manifest is None or output.adapted) and not bool(torch.isfinite(value).all()):
                raise ValueError(
                    f"{source.path}: {output.key}, the {output.name} of it, has values in rows {a} to {b - 1} that are "
                    "not finite: take a checkpoint from before they appeared"
                )
            yield value

    @staticmethod
    def _read(source: TorchDist, output: Output, out: Tensor, row: int) -> None:
        ones, zeros = [1] * len(output.lead), [0] * (len(output.shape) - 1)
        source.read(output.key, [*output.lead, row, *zeros], [*ones, *out.shape], out)

    def _merged(self, source: TorchDist, output: Output, band: Tensor, a: int) -> Tensor:
        """W + lora_alpha / rank B A, the sum in fp32 and rounded once, as the trainer computes with it."""
        assert self.lora_alpha is not None
        base = output.key.removesuffix(".weight")
        low, high = (replace(output, key=base + name) for name in _ADAPTERS)
        lead = len(output.lead)
        (rank, inputs), stored = source.stored(low.key).shape[lead:], source.stored(low.key).dtype
        down = torch.empty(rank, inputs, dtype=stored)
        self._read(source, low, down, 0)
        up = torch.empty(len(band), rank, dtype=stored)
        for inside, key_row, n in _cut(output.runs, a, a + len(band)):
            self._read(source, high, up[inside : inside + n], key_row)
        return (band.float() + self.lora_alpha / rank * (up.float() @ down.float())).to(band.dtype)


def _cut(runs: Sequence[tuple[int, int, int]], a: int, b: int) -> Iterator[tuple[int, int, int]]:
    """(row in the band, row in the checkpoint's tensor, rows) of what rows [a, b) have of each run."""
    for first, target, rows in runs:
        low, high = max(a, first), min(b, first + rows)
        if low < high:
            yield low - a, target + low - first, high - low


def _room(room: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
    nbytes = elements * dtype.itemsize
    return (room[:nbytes] if nbytes <= len(room) else torch.empty(nbytes, dtype=torch.uint8)).view(dtype)


def _bytes(value: Tensor) -> memoryview:
    return value.contiguous().view(-1).view(torch.uint8).numpy().data
