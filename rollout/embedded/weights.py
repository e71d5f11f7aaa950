"""Weights as a checkpoint stores them, and their replacement by name.

The store keeps the tensors that came in, codes and scales included, so its checksums are those of the published bytes;
`prepared.py` makes what the model multiplies with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from miles_like.hf_checkpoint import HFCheckpoint
from quant.codec import QuantTensor
from quant.fp8_block import SCALE_SUFFIX
from quant.registry import make_codec
from quant.spec import QuantFormat, QuantSpec
from quant.stream import pair_stream
from rollout.checksum import engine_checksum, tensor_checksum
from rollout.embedded.architecture import Architecture
from rollout.embedded.tensors import expected_tensors

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class WeightStore:
    """All weights of one model under their Hugging Face names."""

    def __init__(self, arch: Architecture, spec: QuantSpec | None) -> None:
        self.arch = arch
        self.spec = spec
        self._codec = make_codec(spec) if spec is not None and spec.format is not QuantFormat.BF16 else None
        self._expected = expected_tensors(arch)
        self._stored: dict[str, Tensor | QuantTensor] = {}
        self._hashes: dict[str, str] = {}  # of stored tensors, made when asked for

    @classmethod
    def load(cls, checkpoint: HFCheckpoint, arch: Architecture) -> WeightStore:
        """Of a whole checkpoint. Raises ValueError naming a tensor that is missing, unknown, damaged or misshapen."""
        store = cls(arch, QuantSpec.from_hf(checkpoint.config))
        store._stored = store.paired((n, t) for n, t in checkpoint.stream() if not n.endswith("rotary_emb.inv_freq"))
        missing = sorted(store._expected.keys() - store._stored.keys())
        if missing:
            raise ValueError(f"{checkpoint.path} lacks {missing[0]} ({len(missing)} weights missing): fetch it again")
        return store

    def skips(self, name: str) -> bool:
        """Known and not served: a multi-token-prediction layer's, or a head beside the embedding that is the head."""
        if self.arch.tied and name == "lm_head.weight":
            return True
        m = _LAYER.match(name)
        return m is not None and 0 <= int(m[1]) - self.arch.layers < self.arch.mtp_layers

    def check(self, name: str, tensor: Tensor) -> None:
        """Raises ValueError when a streamed tensor is not one of this model's, before it is paired or kept."""
        weight = name.removesuffix(SCALE_SUFFIX)
        want = self._expected.get(weight)
        if want is None:
            raise ValueError(f"{name} is no weight of this model")
        if name != weight:
            if self._codec is None:
                raise ValueError(f"{name}: a scale, but this model's config.json has no quantization_config")
            return
        if tuple(tensor.shape) != want:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, this model needs {list(want)}")
        old, coded = self._stored.get(name), tensor.dtype == torch.float8_e4m3fn
        if not coded and tensor.dtype not in _FLOATS:
            raise ValueError(
                f"{name} is {tensor.dtype}: weights are float32, bfloat16, float16 or FP8 codes with scales"
            )
        if old is not None and isinstance(old, QuantTensor) != coded:
            held = "FP8 codes" if isinstance(old, QuantTensor) else "unquantized values"
            raise ValueError(f"{name} is {tensor.dtype}, but the checkpoint that is served holds {held} for it")
        if not coded and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise ValueError(f"{name} has {bad} values that are not finite")

    def paired(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor | QuantTensor]:
        """Checks every tensor and joins codes with scales. Raises ValueError naming the tensor."""

        def checked() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in tensors:
                if not self.skips(name):
                    self.check(name, tensor)
                    yield name, tensor

        return dict(pair_stream(checked(), self.spec))

    def replace(self, new: Mapping[str, Tensor | QuantTensor]) -> None:
        """`new` comes from `paired`, so nothing here can fail half-way."""
        self._stored.update(new)
        for name in new:
            self._hashes.pop(name, None)
            self._hashes.pop(name + SCALE_SUFFIX, None)

    def __getitem__(self, name: str) -> Tensor | QuantTensor:
        return self._stored[name]

    def decoded(self, name: str, dtype: torch.dtype) -> Tensor:
        """The values the model computes with: codes times scales in fp32, rounded once to `dtype`."""
        value = self._stored[name]
        if isinstance(value, QuantTensor):
            assert self._codec is not None
            return self._codec.decode(value, torch.float32).to(dtype)
        return value.to(dtype)

    def decoded_stack(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        """[B, n, k] of B stored weights of one shape, each as `decoded` gives it."""
        values = [self._stored[n] for n in names]
        quantized = [v for v in values if isinstance(v, QuantTensor)]
        if len(quantized) == len(values):
            assert self._codec is not None
            return self._codec.decode_stack(quantized, torch.float32).to(dtype)
        return torch.stack([self.decoded(n, dtype) for n in names])

    def checksums(self) -> dict[str, str]:
        """Of every stored tensor, scales under their own names."""
        for name, value in self._stored.items():
            if name not in self._hashes:
                codes = value.codes if isinstance(value, QuantTensor) else value
                self._hashes[name] = tensor_checksum(name, codes)
                for suffix, scale in (value.scales if isinstance(value, QuantTensor) else {}).items():
                    self._hashes[name + suffix] = tensor_checksum(name + suffix, scale)
        return dict(self._hashes)

    def checksum(self) -> str:
        return engine_checksum(self.checksums())


@dataclass(slots=True)
class UpdateSession:
    """Tensors between begin and end of an update. Nothing of them is served before `finish`."""

    store: WeightStore
    version: str | None = None
    refused: str = ""  # why: an update with a hole in it must not be finished
    staged: dict[str, Tensor] = field(default_factory=dict)

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
        return self.store.paired(self.staged.items())
