"""`QuantSpec`: a quantized format and the modules it applies to. Torch-free; `hf_config` converts it from and to
config.json.

Names are those of a Hugging Face checkpoint. A tensor is matched by whole path components, never by substrings: `norm`
or `head` may occur in the name of a module that must be quantized.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cache
from typing import Literal


class QuantFormat(StrEnum):
    """Storage format of weights."""

    BF16 = "bf16"  # not quantized
    FP8 = "fp8"  # e4m3 codes, one fp32 scale per block
    FP8_UE8M0 = "fp8-ue8m0"  # the same, scales are powers of two
    INT4 = "int4"  # -7 .. 7, one bf16 scale per group
    MXFP8 = "mxfp8"  # e4m3 codes, one power-of-two scale per group
    MXFP4 = "mxfp4"  # e2m1 codes, one power-of-two scale per group
    NVFP4 = "nvfp4"  # e2m1 codes, one e4m3 scale per group, one fp32 scale per weight


FOUR_BIT = frozenset((QuantFormat.INT4, QuantFormat.MXFP4, QuantFormat.NVFP4))
_BLOCKS = {
    QuantFormat.BF16: (1, 1),
    QuantFormat.FP8: (128, 128),
    QuantFormat.FP8_UE8M0: (128, 128),
    QuantFormat.INT4: (1, 32),
    QuantFormat.MXFP8: (1, 32),
    QuantFormat.MXFP4: (1, 32),
    QuantFormat.NVFP4: (1, 16),
}
_FIXED = frozenset((QuantFormat.MXFP8, QuantFormat.MXFP4, QuantFormat.NVFP4))  # the group is part of the format
CONVENTIONS: Mapping[QuantFormat, tuple[str, ...]] = {
    QuantFormat.FP8: ("deepseek",),
    QuantFormat.FP8_UE8M0: ("deepseek",),
    QuantFormat.INT4: ("compressed-tensors",),
    QuantFormat.MXFP8: ("sglang", "compressed-tensors"),
    QuantFormat.MXFP4: ("compressed-tensors",),
    QuantFormat.NVFP4: ("compressed-tensors", "modelopt"),
}
"""Naming schemes of stored tensors and config.json keys, the default first."""

_ATTENTION = frozenset(
    ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
)
_MLP = frozenset(("gate_proj", "up_proj", "down_proj"))
_SHARED = frozenset(("shared_experts", "shared_expert"))
OTHER_TOWERS = ("vision_tower", "vision_model", "visual", "mm_projector", "multi_modal_projector")
FUSED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"} | dict.fromkeys(
    ("q_proj", "k_proj", "v_proj"), "qkv_proj"
)
"""Linears that engines fuse -> the name of the fused module."""

EXPERTS_ONLY = ("self_attn", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.shared_experts", "mlp.shared_expert")
"""`QuantSpec.ignore` that leaves only the routed experts quantized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSpec:
    """A format and the modules it applies to.

    block: rows (out) and columns (in) of a weight that share a scale; (0, 0) is the format's default. ignore: modules
    that are not quantized. A plain pattern is a run of path components (`*` is a wildcard within one): "lm_head",
    "layers.0.self_attn" and "layers.*.mlp.shared_experts" each exclude every tensor below such a module. "re:..." is a
    regular expression matched from the start of a module's whole name (compressed-tensors), "glob:..." a shell pattern
    of the whole name (ModelOpt). convention: one of `CONVENTIONS` of the format.
    """

    format: QuantFormat
    block: tuple[int, int] = (0, 0)
    ignore: tuple[str, ...] = ()
    convention: str = ""

    def __post_init__(self) -> None:
        own = _BLOCKS[self.format]
        if self.block == (0, 0):
            object.__setattr__(self, "block", own)
        if len(self.block) != 2 or min(self.block) < 1:
            raise ValueError(f"quantization block {self.block}: expected two positive sizes, for example {own}")
        if self.format in _FIXED and self.block != own:
            raise ValueError(f"{self.format} uses groups of {own[1]} columns, not blocks of {self.block}")
        if self.format is QuantFormat.INT4 and (self.block[0] != 1 or self.block[1] % 8):
            raise ValueError(f"INT4 uses groups of a multiple of 8 columns, not blocks of {self.block}")
        for pattern in self.ignore:
            _check_pattern(pattern)
        known = CONVENTIONS.get(self.format, ("",))
        if not self.convention:
            object.__setattr__(self, "convention", known[0])
        if self.convention not in known:
            raise ValueError(
                f"{self.format} does not support the convention {self.convention!r}: expected {' or '.join(known)}"
            )

    @classmethod
    def of(
        cls,
        format: QuantFormat,
        scope: Literal["all", "experts"] | None = None,
        *,
        block: tuple[int, int] = (0, 0),
        convention: str = "",
    ) -> QuantSpec:
        """The spec of a scope. scope: None is the usual one, routed experts for 4-bit formats, else every linear."""
        experts = format in FOUR_BIT if scope is None else scope == "experts"
        return cls(format=format, block=block, ignore=EXPERTS_ONLY if experts else (), convention=convention)

    def covers(self, name: str, shape: Sequence[int]) -> bool:
        """Whether the tensor `name` of `shape` is stored quantized.

        Linear layers of attention (plain and MLA), dense MLPs, shared and routed experts are, also in multi-token
        prediction layers. Embeddings, head, norms, router, biases and tensors that are not 2-D are not.
        """
        if self.format is QuantFormat.BF16 or len(shape) != 2:
            return False
        *module, leaf = name.split(".")
        return leaf == "weight" and _is_quantizable(module) and not self._is_ignored(module)

    def ignores(self, name: str) -> bool:
        """Whether `ignore` is the only reason that the tensor is not stored quantized."""
        *module, leaf = name.split(".")
        return leaf == "weight" and _is_quantizable(module) and self._is_ignored(module)

    @property
    def may_split_experts(self) -> bool:
        """Whether `ignore` may exclude some experts of a layer and not others. False only for plain patterns whose
        digits and single-character wildcards stand directly after "layers"."""
        return any(_may_split_experts(p) for p in self.ignore)

    def _is_ignored(self, module: list[str]) -> bool:
        return any(_ignored(module, p) for p in self.ignore)


def _is_quantizable(module: list[str]) -> bool:
    if len(module) < 3 or not set(OTHER_TOWERS).isdisjoint(module):
        return False
    above, parent, proj = module[-3:]
    if proj in _ATTENTION:
        return parent == "self_attn"
    if proj not in _MLP:
        return False
    return parent == "mlp" or (parent in _SHARED and above == "mlp") or (parent.isdecimal() and above == "experts")


def _check_pattern(pattern: str) -> None:
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as e:
            raise ValueError(f"ignore = {pattern!r} is not a regular expression: {e}") from None


def _ignored(module: list[str], pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], ".".join(module)) is not None
    if pattern.startswith("glob:"):
        return fnmatchcase(".".join(module), pattern[5:])
    want, literal = _components(pattern)
    if not literal.issubset(module):  # fast path: true for most of a large model's tens of thousands of modules
        return False
    starts = range(len(module) - len(want) + 1)
    return any(all(fnmatchcase(m, w) for m, w in zip(module[i:], want, strict=False)) for i in starts)


def _may_split_experts(pattern: str) -> bool:
    if pattern.startswith(("re:", "glob:")):
        return True
    before = ["", *_components(pattern)[0]]
    return any(
        above != "layers" and any(c.isdecimal() or c in "?[" for c in component)
        for above, component in itertools.pairwise(before)
    )


@cache
def _components(pattern: str) -> tuple[list[str], frozenset[str]]:
    """The patterns that a run of a module's components must match, and those of them without wildcards."""
    want = pattern.removesuffix(".weight").split(".")
    return want, frozenset(w for w in want if not set(w) & set("*?["))
