"""Which family a config.json belongs to: one dict, one file a family."""

from __future__ import annotations

from rollout.embedded.architecture import Architecture
from rollout.embedded.families import deepseek, glm, qwen
from rollout.embedded.families.base import Family, HFConfig

FAMILIES: dict[str, Family] = {f.architecture: f for f in (deepseek.FAMILY, qwen.MOE, qwen.DENSE, glm.FAMILY)}


_MALFORMED = (TypeError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError)


def architecture_of(config: HFConfig, *, eos_ids: tuple[int, ...] | None = None) -> Architecture:
    """By `architectures`, or by `model_type` where that is absent. `eos_ids` end a sample too, beside the config's own.

    Raises ValueError naming the architecture, option or size that this engine does not compute, or the error that a
    value of another type makes.
    """
    try:
        return _architecture_of(config, eos_ids)
    except _MALFORMED as e:
        raise ValueError(f"config.json has a value of another type than its key wants ({type(e).__name__}: {e})") from e


def _architecture_of(config: HFConfig, eos_ids: tuple[int, ...] | None) -> Architecture:
    kind, model_type = next(iter(config.get("architectures") or ()), None), config.get("model_type")
    for family in FAMILIES.values():
        if kind == family.architecture or (kind is None and model_type in family.model_types):
            return family.read(config, eos_ids)
    raise ValueError(
        f"the embedded engine computes {', '.join(sorted(FAMILIES))}, not {kind} (model_type {model_type}); "
        "serve that model with rollout.engine = sglang"
    )
