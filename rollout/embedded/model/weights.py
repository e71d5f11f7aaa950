"""The weights of a model as a checkpoint stores them, and updates of them.

The store keeps the tensors as received, including all stored tensors of quantized weights, so its checksums are those
of the published bytes. `prepared.py` builds the model's weights from it; memory is shared where both hold the same.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from miles_like.hf.checkpoint import HFCheckpoint
from quant.formats.codec import QuantTensor
from quant.hf_config import spec_from_hf
from quant.registry import codec_or_none
from quant.spec import QuantFormat, QuantSpec
from quant.stream import coded_weight_of, pair_stream, refuse_foreign, stored_name
from rollout.embedded.families.architecture import Architecture
from rollout.embedded.model.projections import Codes
from rollout.embedded.model.tensors import expected_tensors
from rollout.wire.checksum import engine_checksum, tensor_checksum

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
        self._dtypes: dict[str, torch.dtype] = {}  # received dtypes of tensors that are held in a wider one

    @classmethod
    def load(cls, checkpoint: HFCheckpoint, arch: Architecture) -> WeightStore:
        """Loads a whole checkpoint. Raises ValueError naming a tensor that is missing, unknown, damaged or of a wrong
        shape."""
        store = cls(arch, spec_from_hf(checkpoint.config))
        store._stored = store.paired((n, t) for n, t in checkpoint.stream() if not n.endswith("rotary_emb.inv_freq"))
        missing = sorted(store._expected.keys() - store._stored.keys())
        if missing:
            raise ValueError(f"{checkpoint.path} lacks {missing[0]} ({len(missing)} weights missing): fetch it again")
        return store

    # ---- received tensors

    def skips(self, name: str) -> bool:
        """Whether a tensor is known but not served: of a multi-token-prediction layer, a head beside a tied embedding,
        or scales of activations that some formats have."""
        if self.arch.tied and name == "lm_head.weight":
            return True
        if self._codec is not None and name.rpartition(".")[2] in self._codec.dropped - self._codec.stored.keys():
            return True
        m = _LAYER.match(name)
        return m is not None and 0 <= int(m[1]) - self.arch.layers < self.arch.mtp_layers

    def check(self, name: str, tensor: Tensor) -> None:
        """Raises ValueError when a streamed tensor does not fit this model, before it is paired or kept."""
        refuse_foreign(name, tensor.dtype, self.spec)
        coded = coded_weight_of(self._codec, name, tensor.dtype)
        weight = name if coded is None else coded[0]
        want = self._expected.get(weight)
        if want is None:
            raise ValueError(f"{name} is not a weight of this model")
        covered = self.spec is not None and self.spec.covers(weight, want)
        if coded is None:
            self._check_plain(name, tensor, want, covered)
            return
        assert self._codec is not None and self.spec is not None
        if not covered:
            raise ValueError(
                f"{name} is a stored tensor of {self.spec.format} weights, but the quantization_config of the served "
                f"checkpoint leaves {weight} unquantized: publish with its ignore rules"
            )
        self._codec.adopt_tensor(weight, coded[1], tensor, want)

    def _check_plain(self, name: str, tensor: Tensor, want: tuple[int, ...], covered: bool) -> None:
        if tuple(tensor.shape) != want:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, this model needs {list(want)}")
        if tensor.dtype not in _FLOATS:
            raise ValueError(f"{name} is {tensor.dtype}: weights are float32, bfloat16, float16 or quantized parts")
        if covered:
            assert self.spec is not None
            raise ValueError(
                f"{name} is {tensor.dtype}, but the quantization_config of the served checkpoint requires "
                f"{self.spec.format} codes: publish in that format, or have its ignore rules name this module"
            )
        if not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise ValueError(f"{name} has {bad} values that are not finite")

    def paired(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor | QuantTensor]:
        """Checks every tensor and joins the stored tensors of each quantized weight. Raises ValueError naming the
        tensor."""

        def checked() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in tensors:
                if not self.skips(name):
                    self.check(name, tensor)
                    yield name, tensor

        return dict(pair_stream(checked(), self.spec))

    def replaced(self, new: Mapping[str, Tensor | QuantTensor]) -> WeightStore:
        """A copy of the store in which `new`, checked before, replaces the weights of these names."""
        out = WeightStore(self.arch, self.spec)
        out._stored = self._stored | dict(new)
        out._dtypes = {n: d for n, d in self._dtypes.items() if n not in new}
        return out

    def without_values(self) -> WeightStore:
        """A store of the same model that holds nothing: `replaced` with all weights makes it complete."""
        return WeightStore(self.arch, self.spec)

    def check_coverage(self, spec: QuantSpec | None, where: object) -> None:
        """Raises ValueError when weights stored according to `spec` are stored differently from these."""
        mine = {n for n, shape in self._expected.items() if self.spec is not None and self.spec.covers(n, shape)}
        theirs = {n for n, shape in self._expected.items() if spec is not None and spec.covers(n, shape)}
        if (own := _describe(self.spec)) != (other := _describe(spec)):
            raise ValueError(f"{where} holds {other}, this server serves {own}: start a server for it")
        if differing := sorted(mine ^ theirs):
            only = "there" if differing[0] in theirs else "here"
            raise ValueError(
                f"{where} quantizes {len(theirs)} weights, this server {len(mine)}: {differing[0]} only {only}; "
                "start a server for it"
            )

    # ---- held tensors

    def __getitem__(self, name: str) -> Tensor | QuantTensor:
        """The weight as received."""
        value = self._stored[name]
        return value if isinstance(value, QuantTensor) else value.to(self._dtypes.get(name, value.dtype))

    def is_coded(self, name: str) -> bool:
        return isinstance(self._stored[name], QuantTensor)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._expected[name]

    def decoded(self, name: str, dtype: torch.dtype) -> Tensor:
        """The values the model computes with, cast to `dtype`; those of codes are bf16 by definition."""
        value = self._stored[name]
        if isinstance(value, QuantTensor):
            assert self._codec is not None
            return self._codec.decode(value, torch.bfloat16).to(dtype)
        return value.to(dtype)

    def codes(self, names: Sequence[str], *, own: bool) -> Codes | None:
        """Weights of one shape, stacked, or None when one of them is not quantized.

        own: the caller keeps the stack in memory, so the store replaces its tensors by views of it.
        """
        values = [v for n in names if isinstance(v := self._stored[n], QuantTensor)]
        if len(values) < len(names):
            return None
        assert self._codec is not None
        if len(values) == 1:
            stacked = {leaf: t[None] for leaf, t in values[0].stored.items()}
        else:
            stacked = {leaf: torch.stack([v.stored[leaf] for v in values]) for leaf in values[0].stored}
        shape = values[0].shape
        if own:
            for i, name in enumerate(names):
                self._stored[name] = QuantTensor({leaf: t[i] for leaf, t in stacked.items()}, shape)
        return Codes(self._codec, stacked, (shape[0], shape[1]), len(values))

    def share(self, name: str, value: Tensor) -> None:
        """Holds `value`, which is `decoded(name, value.dtype)` and stays in memory, in place of the received tensor, if
        that can be recovered from it."""
        held = self._stored[name]
        if isinstance(held, QuantTensor):
            return
        received = self._dtypes.get(name, held.dtype)
        if value.dtype is received or (value.dtype is torch.float32 and received in (torch.bfloat16, torch.float16)):
            self._stored[name] = value
            self._dtypes[name] = received

    def names(self) -> Set[str]:
        """Names of all weights of the model."""
        return self._expected.keys()

    def fp32_bytes(self) -> list[int]:
        """Size of each weight in fp32."""
        return [4 * math.prod(shape) for shape in self._expected.values()]

    def tensors(self) -> Iterator[Tensor]:
        """All tensors held."""
        for value in self._stored.values():
            if isinstance(value, QuantTensor):
                yield from value.stored.values()
            else:
                yield value

    def checksums(self) -> dict[str, str]:
        """Checksum of every tensor as received, under its stored name. They are computed from memory at each call: a
        cached hash would not show later changes."""
        out: dict[str, str] = {}
        for name in self._stored:
            value = self[name]
            if isinstance(value, QuantTensor):
                tensors = {stored_name(name, leaf): t for leaf, t in value.stored.items()}
            else:
                tensors = {name: value}
            out |= {stored: tensor_checksum(stored, t) for stored, t in tensors.items()}
        return out

    def checksum(self) -> str:
        return engine_checksum(self.checksums())


def _describe(spec: QuantSpec | None) -> str:
    if spec is None or spec.format is QuantFormat.BF16:
        return "unquantized weights"
    return f"{spec.format} weights in blocks of {spec.block[0]} x {spec.block[1]} ({spec.convention})"


@dataclass(slots=True)
class UpdateSession:
    """Tensors received between begin and end of an update. They are not served before `finish`."""

    store: WeightStore
    begun_as: str | None = None  # version given at the begin
    version: str | None = None
    touched: float = field(default_factory=time.monotonic)  # time of the last request of the update
    refused: str = ""  # why a tensor was refused: an incomplete update must not be finished
    staged: dict[str, Tensor] = field(default_factory=dict)

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self.touched

    def touch(self) -> None:
        self.touched = time.monotonic()

    def add(self, name: str, tensor: Tensor) -> None:
        """Raises ValueError when the tensor does not fit the model or was sent before; `finish` then raises too."""
        try:
            if self.store.skips(name):
                return
            self.store.check(name, tensor)
            if name in self.staged:
                raise ValueError(f"{name} was sent twice in one update")
        except ValueError as e:
            self.refused = self.refused or str(e)
            raise
        self.staged[name] = tensor

    def finish(self) -> dict[str, Tensor | QuantTensor]:
        """The weights to replace. Raises ValueError when a tensor was refused or codes have no scale."""
        if self.refused:
            raise ValueError(f"the update is dropped, the old weights stay: {self.refused}")
        return dict(pair_stream(self.staged.items(), self.store.spec))  # tensors were checked in `add`
