"""What to quantize and how; reads and writes Hugging Face's `quantization_config`. Torch-free.

Names are those of a Hugging Face checkpoint. A tensor is chosen by whole path components, never by substrings: `norm`
or `head` may occur in the name of a module that must be quantized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any


class QuantFormat(StrEnum):
    """How weights are stored."""

    BF16 = "bf16"  # not quantized
    FP8 = "fp8"  # e4m3 codes, one fp32 scale a block


_ATTENTION = frozenset(
    ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
)
_MLP = frozenset(("gate_proj", "up_proj", "down_proj"))
_SHARED = frozenset(("shared_experts", "shared_expert"))
_OTHER_TOWERS = frozenset(("vision_tower", "vision_model", "visual", "mm_projector", "multi_modal_projector"))

EXPERTS_ONLY = ("self_attn", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.shared_experts", "mlp.shared_expert")
"""`QuantSpec.ignore` that leaves only the routed experts quantized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSpec:
    """A format and the modules it is for.

    A pattern of `ignore` is a run of path components (`*` is a wildcard within one): "lm_head", "layers.0.self_attn"
    and "layers.*.mlp.shared_experts" each keep every tensor below such a module out.
    """

    format: QuantFormat
    block: tuple[int, int] = (128, 128)  # rows (out), columns (in) that share a scale
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.block) != 2 or min(self.block) < 1:
            raise ValueError(f"quantization block {self.block}: give two positive sizes, as (128, 128)")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, reading: bool = False) -> QuantSpec | None:
        """Of a whole config.json; None when the model is not quantized. `reading`: to decode only, which scales that
        are powers of two (scale_fmt "ue8m0", DeepSeek-V3.1) do not change.

        Raises ValueError naming the key whose value is not supported.
        """
        q = config.get("quantization_config")
        if q is None:
            return None
        if not isinstance(q, Mapping):
            raise ValueError(f"quantization_config = {q!r} is not supported: it must be an object")
        for key, want in (("quant_method", "fp8"), ("fmt", "e4m3"), ("activation_scheme", "dynamic")):
            if q.get(key, want if key != "quant_method" else None) != want:
                raise ValueError(f"quantization_config.{key} = {q.get(key)!r} is not supported: only {want!r} is")
        if q.get("scale_fmt") is not None and not (reading and q["scale_fmt"] == "ue8m0"):
            raise ValueError(
                f"quantization_config.scale_fmt = {q['scale_fmt']!r} is not supported: "
                "only fp32 scales are, which a config.json says by having no scale_fmt"
            )
        block = q.get("weight_block_size")
        if not isinstance(block, Sequence) or len(block) != 2 or not all(type(n) is int for n in block):
            raise ValueError(
                f"quantization_config.weight_block_size = {block!r} is not supported: "
                "it must be two sizes, as [128, 128]; per-tensor and per-channel scales are not read"
            )
        ignore = q.get("modules_to_not_convert") or []
        if not isinstance(ignore, list) or not all(isinstance(name, str) for name in ignore):
            raise ValueError(f"quantization_config.modules_to_not_convert = {ignore!r}: it must be a list of names")
        return cls(format=QuantFormat.FP8, block=(block[0], block[1]), ignore=tuple(ignore))

    def to_hf(self) -> dict[str, Any]:
        """The value of `quantization_config`. Raises ValueError for bf16, which has none."""
        if self.format is not QuantFormat.FP8:
            raise ValueError(f"{self.format} weights have no quantization_config: leave the key out")
        out: dict[str, Any] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(self.block),
        }
        if self.ignore:
            out["modules_to_not_convert"] = list(self.ignore)
        return out

    def covers(self, name: str, shape: Sequence[int]) -> bool:
        """Whether the tensor `name` of `shape` is stored quantized.

        Linear layers of attention (plain and MLA), dense MLPs, shared and routed experts are, those of the multi-token
        prediction layers too. Embeddings, head, norms, router, biases and everything not 2-D are not.
        """
        if self.format is QuantFormat.BF16 or len(shape) != 2:
            return False
        *module, leaf = name.split(".")
        return leaf == "weight" and _is_quantizable(module) and not any(_has_run(module, p) for p in self.ignore)


def _is_quantizable(module: list[str]) -> bool:
    if len(module) < 3 or not _OTHER_TOWERS.isdisjoint(module):
        return False
    above, parent, proj = module[-3:]
    if proj in _ATTENTION:
        return parent == "self_attn"
    if proj not in _MLP:
        return False
    return parent == "mlp" or (parent in _SHARED and above == "mlp") or (parent.isdecimal() and above == "experts")


def _has_run(module: list[str], pattern: str) -> bool:
    want = pattern.removesuffix(".weight").split(".")
    starts = range(len(module) - len(want) + 1)
    return any(all(fnmatchcase(m, w) for m, w in zip(module[i:], want, strict=False)) for i in starts)
