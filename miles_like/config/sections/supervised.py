"""Settings of supervised training: SFT, DPO and reward models. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

from pydantic import BaseModel, Field

from miles_like.config.sections.flat import FlatSection, Part, values

SupervisedName: TypeAlias = Literal["sft", "dpo", "reward_model"]
SUPERVISED: tuple[SupervisedName, ...] = get_args(SupervisedName)  # values of algorithm.name without a rollout
PAIRS = ("dpo", "reward_model")  # of these, those trained on preference pairs


class DpoPart(Part):
    chosen_by = "loss"
    loss: Literal["sigmoid", "ipo"]
    beta: float = Field(0.1, gt=0)  # reward per log-ratio to the reference


class Sigmoid(DpoPart):
    loss: Literal["sigmoid"] = "sigmoid"
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)  # assumed share of reversed pairs


class Ipo(DpoPart):
    loss: Literal["ipo"] = "ipo"


class SupervisedConfig(FlatSection):
    """Keys of `algorithm.name` = "sft", "dpo" and "reward_model"; docs/supervised.md has the formulas."""

    messages_key: str = "messages"  # sft: column of whole conversations, used if a row has it
    chosen_key: str = "chosen"  # pairs: column of the preferred answer
    rejected_key: str = "rejected"  # pairs: column of the rejected one
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"  # sft: weight of an example: its tokens, or 1
    dpo: Annotated[Sigmoid | Ipo, Field(discriminator="loss")] = Sigmoid()  # dpo: form of the loss
    center_coefficient: float = Field(0.0, ge=0)  # reward_model: of the squared sum of a pair's rewards

    section = "supervised"
    absent: ClassVar[Mapping[str, object]] = {"label_smoothing": 0.0}


_PAIR_KEYS = {"chosen_key", "rejected_key"}
_KEYS_OF = {
    "sft": {"messages_key", "aggregation"},
    "dpo": _PAIR_KEYS | {"loss", "beta", "label_smoothing"},
    "reward_model": _PAIR_KEYS | {"center_coefficient"},
}


def check_keys(name: str, given: SupervisedConfig) -> None:
    """Raises ValueError for a key of [supervised] that does nothing with `algorithm.name = name`."""
    for key, value, _ in _changes(given, SupervisedConfig(), _KEYS_OF.get(name, set())):
        owners = " or ".join(repr(owner) for owner, keys in _KEYS_OF.items() if key in keys)
        raise ValueError(
            f"supervised.{key} = {value!r} is a key of algorithm.name = {owners}, not of {name!r}: remove it, or "
            f"set algorithm.name = {owners}"
        )


def check_unused(name: str, sections: Mapping[str, tuple[BaseModel, BaseModel, set[str]]]) -> None:
    """Raises ValueError for a changed key that a run without a rollout does not read. sections: name -> (given,
    default, keys that are read)."""
    for section, (given, default, used) in sections.items():
        for key, value, usual in _changes(given, default, used):
            other = f", or set it to {usual!r}" if usual is not None else ""
            raise ValueError(
                f"{section}.{key} = {value!r} does nothing with algorithm.name = {name!r}, which samples no answers: "
                f"remove it{other}"
            )


def without_replay(given: dict[str, Any]) -> dict[str, Any]:
    """The raw sections with replay.mode = "off" for supervised training, which has no rollout routes."""
    algorithm, replay = given.get("algorithm"), given.get("replay", {})
    if not isinstance(algorithm, dict) or algorithm.get("name") not in SUPERVISED or not isinstance(replay, dict):
        return given
    return given | {"replay": {"mode": "off"} | replay}


def _changes(given: BaseModel, default: BaseModel, used: Collection[str] = ()) -> Iterator[tuple[str, object, object]]:
    """(key, value, default) of keys not in `used` that differ; keys of inner sections are dotted."""
    now, usual = values(given), values(default)
    for key in [key for key in now if key not in used and now[key] != usual[key]]:
        value, was = now[key], usual[key]
        if isinstance(value, BaseModel) and isinstance(was, BaseModel):
            yield from ((f"{key}.{inner}", new, old) for inner, new, old in _changes(value, was))
        else:
            yield key, value, was
