"""The Hugging Face tensors in a `torch_dist` directory, their location, and the job of `to_hf` that writes one output
file."""

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

from megatron_bridge.convert.directory.boxes import checkpoint_key
from megatron_bridge.convert.directory.torch_dist import TorchDist
from megatron_bridge.convert.units import HashedFile
from megatron_bridge.families.base import HFConfig, Place, Split, TensorMap
from megatron_bridge.families.registry import family_of
from miles_like.hf.checkpoint import DTYPE_NAMES
from miles_like.types import REFERENCE
from quant.formats.codec import Codec
from quant.registry import codec_or_none, make_codec
from quant.spec import QuantSpec
from quant.stream import stored_name

_ADAPTERS = (".lora_a", ".lora_b")
_BESIDE = ("optimizer.", f"{REFERENCE}.")  # key prefixes of what a trainer saves in addition to its weights
_KEPT_FRAMING = 1 << 16  # bytes of an archive besides its tensor
_OTHER_MODEL = "set hf_config to the directory of the model in the checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A Hugging Face tensor and the location of its rows in the checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # before quantization
    key: str
    lead: tuple[int, ...]  # (expert,) in the tensor of all experts
    runs: tuple[tuple[int, int, int], ...]  # (first row here, first row in the checkpoint's tensor, rows)
    quantized: bool
    adapted: bool  # the checkpoint holds adapters for it

    @property
    def row_elements(self) -> int:
        return math.prod(self.shape[1:])


def bind(source: TorchDist, config: HFConfig) -> TensorMap:
    """The family's table for the checkpoint, with draft layers if it has any."""
    family = family_of(config)
    tensors = family.bind(config, mtp=True)
    drafts = any(p.depth is not None and checkpoint_key(p) in source for p in tensors.places())
    return tensors if drafts else family.bind(config)


def outputs(source: TorchDist, tensors: TensorMap, spec: QuantSpec, *, merge: bool) -> list[Output]:
    """Every Hugging Face tensor, including copies in draft layers, in natural order of their names.

    Raises ValueError naming a tensor that the checkpoint lacks, that does not belong to the model, or whose shape
    differs from config.json; for adapters unless `merge`; and for `merge` without adapters.
    """
    adapters = {key.rpartition(".")[0] for key in source.names() if key.endswith(_ADAPTERS)}
    adapters = {key for key in adapters if not key.startswith(_BESIDE)}
    if adapters and not merge:
        raise ValueError(
            f"{source.path} contains LoRA adapters of {len(adapters)} weights, the first is {min(adapters)}: set "
            "lora_alpha to the run's lora.alpha, to merge them into the weights"
        )
    if merge and not adapters:
        raise ValueError(f"{source.path} contains no LoRA adapters: remove lora_alpha")
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
                runs=tuple(tensors.runs(place.entry, place.index)),
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
        raise ValueError(f"{source.path} lacks {key}, from which {place.hf_name} is written: {_OTHER_MODEL}")
    stored = source.stored(key)
    lead = () if place.expert is None else (tensors.dims["experts"],)
    want = (*lead, *tensors.megatron_shape(place.entry))
    have = stored.shape
    if place.entry.split is Split.VOCAB and len(have) == len(want) and have[0] > want[0]:
        have = (want[0], *have[1:])  # padding after the vocabulary
    if have != want:
        raise ValueError(
            f"{source.path}: {key} has shape {list(stored.shape)}, but config.json requires {list(want)}: "
            f"{_OTHER_MODEL}"
        )
    if stored.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{source.path}: {key} is {stored.dtype}: only bfloat16 and float32 are supported")


def shards(outputs: Sequence[Output], spec: QuantSpec, shard_bytes: int) -> list[list[Output]]:
    """Group outputs into files of about `shard_bytes`; a larger tensor gets a separate file."""
    files: list[list[Output]] = [[]]
    size = 0
    for output in outputs:
        nbytes = stored_bytes(output, spec)
        if files[-1] and size + nbytes > shard_bytes:
            files.append([])
            size = 0
        files[-1].append(output)
        size += nbytes
    return files


def stored_tensors(output: Output, spec: QuantSpec) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    """(name, dtype, shape) of the tensors stored for an output: itself, or its codes followed by scales.

    Raises ValueError for a shape that the format does not support.
    """
    if not output.quantized:
        yield output.name, output.dtype, output.shape
        return
    for leaf, (dtype, shape) in make_codec(spec).layout(output.shape, output.name).items():
        yield stored_name(output.name, leaf), dtype, shape


def stored_bytes(output: Output, spec: QuantSpec) -> int:
    return sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in stored_tensors(output, spec))


def held_bytes(output: Output, spec: QuantSpec) -> int:
    """Bytes of what is stored for an output in addition to its codes."""
    _, *others = stored_tensors(output, spec)
    return sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in others)


class WriteShards:
    """The output's files as a job (`units.Job`). Each process opens the checkpoint separately."""

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
        """`identity`: a hash of the checkpoint's contents."""
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

    @property
    def nbytes(self) -> int:
        """Of the tensors that are written."""
        return sum(stored_bytes(output, self.spec) for file in self.files for output in file)

    def file(self, number: int) -> str:
        if self.count == 1:
            return "model.safetensors"
        return f"model-{number + 1:05d}-of-{self.count:05d}.safetensors"

    def proof(self, number: int) -> str:
        described = [[asdict(o) for o in self.files[number]], asdict(self.spec), self.lora_alpha, self.identity]
        return hashlib.sha256(json.dumps(described, default=str).encode()).hexdigest()

    def write(self, number: int, out: HashedFile) -> list[list[Any]]:
        """Write a file; returns [name, dtype, shape, start, size, checksum] of each tensor. Raises as `TorchDist.read`,
        and ValueError naming a tensor that is not finite."""
        if self._source is None:
            self._source = TorchDist(self.path, keep_bytes=self.chunk_bytes + _KEPT_FRAMING)
        out.write(self._header(number))
        out.cut()
        facts = []
        buffer = torch.empty(self.chunk_bytes, dtype=torch.uint8)  # fresh memory for each band costs as much as reading
        for output in self.files[number]:
            if output.quantized:
                written: Iterator[Iterable[Tensor]] = self._coded(self._source, output, buffer)
            else:
                written = iter([self._bands(self._source, output, buffer)])
            for (name, dtype, shape), bands in zip(stored_tensors(output, self.spec), written, strict=True):
                for value in bands:
                    out.write(_bytes(value))
                facts.append([name, str(dtype).removeprefix("torch."), shape, *out.cut()])
        self._source.close()
        return facts

    def _header(self, number: int) -> bytes:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for output in self.files[number]:
            for name, dtype, shape in stored_tensors(output, self.spec):
                start, end = end, end + math.prod(shape) * dtype.itemsize
                header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        return len(raw).to_bytes(8, "little") + raw

    def _coded(self, source: TorchDist, output: Output, buffer: Tensor) -> Iterator[Iterable[Tensor]]:
        """The bands of each stored tensor of a weight: the codes, then the scales, which are held until then."""
        codec = make_codec(self.spec)
        codes, amax = codec.leaves[0], self._amax(source, output, codec, buffer)
        held: defaultdict[str, list[Tensor]] = defaultdict(list)

        def encoded() -> Iterator[Tensor]:
            for band in self._bands(source, output, buffer):
                q = codec.encode({output.name: band}, None if amax is None else {output.name: amax})[output.name]
                for leaf, value in q.stored.items():
                    held[leaf].append(value)
                yield held.pop(codes)[0]

        yield encoded()
        whole = codec.whole((output.shape[0], output.shape[1]), amax)
        for leaf in codec.leaves[1:]:
            yield [whole[leaf]] if leaf in whole else held[leaf]

    def _amax(self, source: TorchDist, output: Output, codec: Codec, buffer: Tensor) -> Tensor | None:
        """The largest magnitude of a weight's bundle if its scales depend on it, else None. It takes one more read of
        the bundle, shared by consecutive weights of a bundle."""
        if not codec.shared_amax:
            return None
        bundle = codec.bundle_of(output.name)
        if bundle not in self._amax_of:
            if not self._named:
                self._named = {o.name: o for file in self.files for o in file}
            each = [codec.amax(band) for name in bundle for band in self._bands(source, self._named[name], buffer)]
            self._amax_of = {bundle: torch.stack(each).max()}
        return self._amax_of[bundle]

    def _bands(self, source: TorchDist, output: Output, buffer: Tensor) -> Iterator[Tensor]:
        """The tensor in its dtype, in bands of rows; a quantized tensor's bands are complete rows of blocks."""
        rows, unit = output.shape[0], self.spec.block[0] if output.quantized else 1
        held = source.stored(output.key).dtype
        # the encoder and the adapters work in fp32
        wide = 4 if output.quantized or output.adapted else held.itemsize
        step = max(1, self.chunk_bytes // max(1, output.row_elements * wide) // unit) * unit
        for a in range(0, rows, step):
            b = min(rows, a + step)
            elements = (b - a) * output.row_elements
            band = _view_of_buffer(buffer, elements, held).view(b - a, *output.shape[1:])
            for inside, key_row, n in _cut(output.runs, a, b):
                self._read(source, output, band[inside : inside + n], key_row)
            if output.adapted:
                band = self._merged(source, output, band, a)
            value = band.to(output.dtype)
            # tensors of a manifest were finite when converted, and their checksums are verified
            if (source.manifest is None or output.adapted) and not bool(torch.isfinite(value).all()):
                raise ValueError(
                    f"{source.path}: {output.key}, from which {output.name} is written, has non-finite values in "
                    f"rows {a} to {b - 1}: use an earlier checkpoint"
                )
            yield value

    @staticmethod
    def _read(source: TorchDist, output: Output, out: Tensor, row: int) -> None:
        ones, zeros = [1] * len(output.lead), [0] * (len(output.shape) - 1)
        source.read(output.key, [*output.lead, row, *zeros], [*ones, *out.shape], out)

    def _merged(self, source: TorchDist, output: Output, band: Tensor, a: int) -> Tensor:
        """W + lora_alpha / rank B A, summed in fp32 and rounded once, like the trainer's weight."""
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
    """(row in the band, row in the checkpoint's tensor, rows) of each run's overlap with rows [a, b)."""
    for first, target, rows in runs:
        low, high = max(a, first), min(b, first + rows)
        if low < high:
            yield low - a, target + low - first, high - low


def _view_of_buffer(buffer: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
    nbytes = elements * dtype.itemsize
    return (buffer[:nbytes] if nbytes <= len(buffer) else torch.empty(nbytes, dtype=torch.uint8)).view(dtype)


def _bytes(value: Tensor) -> memoryview:
    return value.contiguous().view(-1).view(torch.uint8).numpy().data
