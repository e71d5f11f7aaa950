"""Which family a config.json belongs to: one dict, one file a family."""

from __future__ import annotations

from megatron_bridge.families import deepseek, glm_moe, qwen_dense, qwen_moe
from megatron_bridge.families.base import Family, HFConfig

FAMILIES: dict[str, Family] = {
    "deepseek": deepseek.FAMILY,
    "glm_moe": glm_moe.FAMILY,
    "qwen_dense": qwen_dense.FAMILY,
    "qwen_moe": qwen_moe.FAMILY,
}


def family_of(hf_config: HFConfig) -> Family:
    """The family by `architectures`, or by `model_type` where that is absent. ValueError names the known ones."""
    architectures = hf_config.get("architectures") or ()
    if not isinstance(architectures, list | tuple) or not all(isinstance(name, str) for name in architectures):
        raise ValueError(f"config.json: architectures = {architectures!r}: want a list of names")
    for family in FAMILIES.values():
        if family.architectures.intersection(architectures):
            return family
        if not architectures and str(hf_config.get("model_type")) in family.model_types:
            return family
    known = sorted(name for family in FAMILIES.values() for name in family.architectures)
    raise ValueError(
        f"architecture {list(architectures)} (model_type {hf_config.get('model_type')!r}) is not supported: "
        f"config.json must name one of {known}"
    )
