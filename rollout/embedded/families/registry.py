"""The supported families, one module each, and the choice of the family of a config.json."""

from __future__ import annotations

from rollout.embedded.families import deepseek, glm, qwen
from rollout.embedded.families.architecture import Architecture
from rollout.embedded.families.base import Family, HFConfig

FAMILIES: dict[str, Family] = {f.architecture: f for f in (deepseek.FAMILY, qwen.MOE, qwen.DENSE, glm.FAMILY)}


_MALFORMED = (TypeError, KeyError, AttributeError, IndexError, ArithmeticError, RecursionError)


def architecture_of(config: HFConfig, *, eos_ids: tuple[int, ...] | None = None) -> Architecture:
    """The family is chosen by `architectures`, or by `model_type` if that is absent. eos_ids: added to those of the
    config.

    Raises ValueError naming the architecture, option or size that is not supported, or the error that a value of a
    wrong type causes.
    """
    try:
        return _architecture_of(config, eos_ids)
    except _MALFORMED as e:
        raise ValueError(f"config.json has a value of a wrong type ({type(e).__name__}: {e})") from e


def _architecture_of(config: HFConfig, eos_ids: tuple[int, ...] | None) -> Architecture:
    kind, model_type = next(iter(config.get("architectures") or ()), None), config.get("model_type")
    for family in FAMILIES.values():
        if kind == family.architecture or (kind is None and model_type in family.model_types):
            return family.read(config, eos_ids)
    raise ValueError(
        f"the embedded engine supports {', '.join(sorted(FAMILIES))}, not {kind} (model_type {model_type}): set "
        "rollout.engine = 'sglang' for this model"
    )
