"""Weights as a checkpoint stores them, and their replacement by name.

The store keeps the tensors that came in, all parts of coded weights included, so its checksums are those of the
published bytes; `prepared.py` makes what the model multiplies with, and what lies there anyway is not kept twice.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from miles_like.hf_checkpoint import HFCheckpoint
from quant.codec import QuantTensor
from quant.hf_config import spec_from_hf
from quant.registry import codec_or_none
from quant.spec import QuantFormat, QuantSpec
from quant.stream import pair_stream, part_of, refuse_foreign, stored_name
from rollout.checksum import engine_checksum, tensor_checksum
from rollout.embedded.architecture import Architecture
from rollout.embedded.projections import Codes
from rollout.embedded.tensors import expected_tensors

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class WeightStore:
    """All weights of one model under their Hugging Face names."""

    def __init__(self, arch: Architecture, spec: QuantSpec | None) -> None:
        self.arch = arch
        self._codec = codec_or_none(spec)
        self.spec = spec if self._codec is not None else None
        self._expected = expected_tensors(arch)
        self._stored: dict[str, Tensor | QuantTensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}  # as they came, of those held in a wider one

    @classmethod
    def load(cls, checkpoint: HFCheckpoint, arch: Architecture) -> WeightStore:
        """Of a whole checkpoint. Raises ValueError naming a tensor that is missing, unknown, damaged or misshapen."""
        store = cls(arch, spec_from_hf(checkpoint.config))
        store._stored = store.paired((n, t) for n, t in checkpoint.stream() if not n.endswith("rotary_emb.inv_freq"))
        missing = sorted(store._expected.keys() - store._stored.keys())
        if missing:
            raise ValueError(f"{checkpoint.path} lacks {missing[0]} ({len(missing)} weights missing): fetch it again")
        return store

    # ---- what comes in

    def skips(self, name: str) -> bool:
        """Known and not served: a multi-token-prediction layer's, a head beside the embedding that is the head, or
        scales of activations that come with some formats."""
        if self.arch.tied and name == "lm_head.weight":
            return True
        if self._codec is not None and name.rpartition(".")[2] in self._codec.dropped - self._codec.parts.keys():
            return True
        m = _LAYER.match(name)
        return m is not None and 0 <= int(m[1]) - self.arch.layers < self.arch.mtp_layers

    def check(self, name: str, tensor: Tensor) -> None:
        """Raises ValueError when a streamed tensor is not one of this model's, before it is paired or kept."""
        refuse_foreign(name, tensor.dtype, self.spec)
        part = part_of(self._codec, name, tensor.dtype)
        weight = name if part is None else part[0]
        want = self._expected.get(weight)
        if want is None:
            raise ValueError(f"{name} is no weight of this model")
        covered = self.spec is not None and self.spec.covers(weight, want)
        if part is None:
            self._check_plain(name, tensor, want, covered)
            return
        assert self._codec is not None and self.spec is not None
        if not covered:
            raise ValueError(
                f"{name} is a part of {self.spec.format} codes, but the quantization_config of the checkpoint that is "
                f"served leaves {weight} unquantized: publish with its ignore rules"
            )
        self._codec.adopt_part(weight, part[1], tensor, want)

    def _check_plain(self, name: str, tensor: Tensor, want: tuple[int, ...], covered: bool) -> None:
        if tuple(tensor.shape) != want:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, this model needs {list(want)}")
        if tensor.dtype not in _FLOATS:
            raise ValueError(f"{name} is {tensor.dtype}: weights are float32, bfloat16, float16 or quantized parts")
        if covered:
            assert self.spec is not None
            raise ValueError(
                f"{name} is {tensor.dtype}, but the quantization_config of the checkpoint that is served says "
                f"{self.spec.format} codes: publish in that format, or have its ignore rules name this module"
            )
        if not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise ValueError(f"{name} has {bad} values that are not finite")

    def paired(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor | QuantTensor]:
        """Checks every tensor and joins the parts of each coded weight. Raises ValueError naming the tensor."""

        def checked() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in tensors:
                if not self.skips(name):
                    self.check(name, tensor)
                    yield name, tensor

        return dict(pair_stream(checked(), self.spec))

    def replaced(self, new: Mapping[str, Tensor | QuantTensor]) -> WeightStore:
        """A store with `new`, each of which has been checked, in the place of its own; this one stays as it is."""
        out = WeightStore(self.arch, self.spec)
        out._stored = self._stored | dict(new)
        out._dtypes = {n: d for n, d in self._dtypes.items() if n not in new}
        return out

    def check_coverage(self, spec: QuantSpec | None, where: object) -> None:
        """Raises ValueError when weights stored as `spec` says are not stored as these are."""
        mine = {n for n, shape in self._expected.items() if self.spec is not None and self.spec.covers(n, shape)}
        theirs = {n for n, shape in self._expected.items() if spec is not None and spec.covers(n, shape)}
        if how(self.spec) != how(spec):
            raise ValueError(f"{where} holds {how(spec)}, this server serves {how(self.spec)}: start a server for it")
        if differing := sorted(mine ^ theirs):
            only = "there" if differing[0] in theirs else "here"
            raise ValueError(
                f"{where} quantizes {len(theirs)} weights, this server {len(mine)}: {differing[0]} only {only}; "
                "start a server for it"
            )

    # ---- what is held

    def __getitem__(self, name: str) -> Tensor | QuantTensor:
        """As it came."""
        value = self._stored[name]
        return value if isinstance(value, QuantTensor) else value.to(self._dtypes.get(name, value.dtype))

    def is_coded(self, name: str) -> bool:
        return isinstance(self._stored[name], QuantTensor)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._expected[name]

    def decoded(self, name: str, dtype: torch.dtype) -> Tensor:
        """The values the model computes with: bf16 by definition where they are codes, cast to `dtype`."""
        value = self._stored[name]
        if isinstance(value, QuantTensor):
            assert self._codec is not None
            return self._codec.decode(value, torch.bfloat16).to(dtype)
        return value.to(dtype)

    def codes(self, names: Sequence[str], *, own: bool) -> Codes | None:
        """Weights of one shape, stacked, or None when one of them is not quantized.

        own: the stack stays in memory, so that the store's own are from now on views of it.
        """
        values = [v for n in names if isinstance(v := self._stored[n], QuantTensor)]
        if len(values) < len(names):
            return None
        assert self._codec is not None
        if len(values) == 1:
            parts = {leaf: p[None] for leaf, p in values[0].parts.items()}
        else:
            parts = {leaf: torch.stack([v.parts[leaf] for v in values]) for leaf in values[0].parts}
        shape = values[0].shape
        if own:
            for i, name in enumerate(names):
                self._stored[name] = QuantTensor({leaf: p[i] for leaf, p in parts.items()}, shape)
        return Codes(self._codec, parts, (shape[0], shape[1]), len(values))

    def share(self, name: str, value: Tensor) -> None:
        """`value` is `decoded(name, value.dtype)` and stays in memory: it is held in place of what came, if it says all
        of that."""
        held = self._stored[name]
        if isinstance(held, QuantTensor):
            return
        came = self._dtypes.get(name, held.dtype)
        if value.dtype is came or (value.dtype is torch.float32 and came in (torch.bfloat16, torch.float16)):
            self._stored[name] = value
            self._dtypes[name] = came

    def fp32_bytes(self) -> list[int]:
        """Of each weight, were it fp32."""
        return [4 * math.prod(shape) for shape in self._expected.values()]

    def tensors(self) -> Iterator[Tensor]:
        """All that is held."""
        for value in self._stored.values():
            if isinstance(value, QuantTensor):
                yield from value.parts.values()
            else:
                yield value

    def checksums(self) -> dict[str, str]:
        """Of every tensor as it came, each part of a coded weight under its stored name. Of the bytes that memory holds
        now: a hash that was kept would not show what has changed since."""
        out = {}
        for name in self._stored:
            value = self[name]
            parts = value.parts if isinstance(value, QuantTensor) else {"weight": value}
            for stored, part in zip(self._names(name), parts.values(), strict=True):
                out[stored] = tensor_checksum(stored, part)
        return out

    def _names(self, name: str) -> list[str]:
        """Of what is stored of a weight."""
        value = self._stored[name]
        return [stored_name(name, leaf) for leaf in value.parts] if isinstance(value, QuantTensor) else [name]

    def checksum(self) -> str:
        return engine_checksum(self.checksums())


def how(spec: QuantSpec | None) -> str:
    """In words."""
    if spec is None or spec.format is QuantFormat.BF16:
        return "unquantized weights"
    return f"{spec.format} weights in blocks of {spec.block[0]} x {spec.block[1]} ({spec.convention})"


@dataclass(slots=True)
class UpdateSession:
    """Tensors between begin and end of an update. Nothing of them is served before `finish`."""

    store: WeightStore
    begun_as: str | None = None  # the version that it was begun with
    version: str | None = None
    touched: float = field(default_factory=time.monotonic)  # when something was last sent for it
    refused: str = ""  # why: an update with a hole in it must not be finished
    staged: dict[str, Tensor] = field(default_factory=dict)

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self.touched

    def touch(self) -> None:
        self.touched = time.monotonic()

    def add(self, name: str, tensor: Tensor) -> None:
        """Raises ValueError when the tensor is not one of the model's or came before; the session is then void."""
        try:
            if self.store.skips(name):
                return
            self.store.check(name, tensor)
            if name in self.staged:
                raise ValueError(f"{name} came twice in one update")
        except ValueError as e:
            self.refused = self.refused or str(e)
            raise
        self.staged[name] = tensor

    def finish(self) -> dict[str, Tensor | QuantTensor]:
        """What to replace. Raises ValueError when a tensor was refused or a code has no scale."""
        if self.refused:
            raise ValueError(f"the update is dropped, the old weights stay: {self.refused}")
        return dict(pair_stream(self.staged.items(), self.store.spec))  # each was checked when it came
