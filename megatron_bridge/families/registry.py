"""The registry of model families, one module each, and the lookup by config.json."""

from __future__ import annotations

from typing import Any

from megatron_bridge.families import deepseek, glm_moe, qwen_dense, qwen_moe
from megatron_bridge.families.base import CLASSIFIER, LM, Family, HFConfig, is_scalar

FAMILIES: dict[str, Family] = {
    "deepseek": deepseek.FAMILY,
    "glm_moe": glm_moe.FAMILY,
    "qwen_dense": qwen_dense.FAMILY,
    "qwen_moe": qwen_moe.FAMILY,
}


def family_of(hf_config: HFConfig) -> Family:
    """The family by `architectures`, or by `model_type` without that key; a model with a scalar head has the language
    model's family. The ValueError for an unknown model lists the known architectures."""
    architectures = hf_config.get("architectures") or ()
    if not isinstance(architectures, list | tuple) or not all(isinstance(name, str) for name in architectures):
        raise ValueError(f"config.json: architectures = {architectures!r}: expected a list of names")
    bases = [name.removesuffix(CLASSIFIER) + LM if name.endswith(CLASSIFIER) else name for name in architectures]
    for family in FAMILIES.values():
        if family.architectures.intersection(bases):
            return family
        if not architectures and str(hf_config.get("model_type")) in family.model_types:
            return family
    known = sorted(name for family in FAMILIES.values() for name in family.architectures)
    raise ValueError(
        f"architecture {list(architectures)} (model_type {hf_config.get('model_type')!r}) is not supported: "
        f"config.json must name one of {', '.join(known)}; docs/families.md describes how to add a family"
    )


def with_scalar_head(hf: HFConfig) -> dict[str, Any]:
    """The config.json of the same model with a scalar head, in transformers' format; a copy if it has one already.
    Draft layers are removed, since they predict tokens. Raises ValueError as `family_of`."""
    if is_scalar(hf):
        return dict(hf)
    name = min(family_of(hf).architectures).removesuffix(LM) + CLASSIFIER
    out = {key: value for key, value in hf.items() if key not in ("id2label", "label2id")}
    out |= {"architectures": [name], "num_labels": 1}
    return out | ({"num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in hf else {})
