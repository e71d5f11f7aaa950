"""Settings of supervised training: SFT, DPO and reward models. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from miles_like.config.choices import Choice, Choices, keys
from miles_like.section import Section

SUPERVISED = ("sft", "dpo", "reward_model")  # values of algorithm.name without a rollout
PAIRS = ("dpo", "reward_model")  # of these, those trained on preference pairs


class SupervisedConfig(Section):
    """Keys of `algorithm.name` = "sft", "dpo" and "reward_model"; docs/supervised.md has the formulas."""

    messages_key: str = "messages"  # sft: column of whole conversations, used if a row has it
    chosen_key: str = "chosen"  # pairs: column of the preferred answer
    rejected_key: str = "rejected"  # pairs: column of the rejected one
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"  # sft: weight of an example: its tokens, or 1
    loss: Literal["sigmoid", "ipo"] = "sigmoid"  # dpo
    beta: float = Field(0.1, gt=0)  # dpo: reward per log-ratio to the reference
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)  # dpo: assumed share of reversed pairs
    center_coefficient: float = Field(0.0, ge=0)  # reward_model: of the squared sum of a pair's rewards

    @model_validator(mode="after")
    def ipo_has_no_smoothing(self) -> SupervisedConfig:
        LOSS_CHOICES.check(self)
        return self


LOSS_CHOICES = Choices("supervised", Choice("loss", {"sigmoid": keys("label_smoothing")}))
_KEYS_OF = {
    "sft": keys("messages_key", "aggregation"),
    "dpo": keys("chosen_key", "rejected_key", "loss", "beta", "label_smoothing"),
    "reward_model": keys("chosen_key", "rejected_key", "center_coefficient"),
}
NAME_CHOICES = Choices("supervised", Choice("algorithm.name", _KEYS_OF))


def check_keys(name: str, given: SupervisedConfig) -> None:
    """Raises ValueError for a key of [supervised] that does nothing with `algorithm.name = name`."""
    NAME_CHOICES.check(given, {"algorithm.name": name})


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
    for key in type(given).model_fields:
        value, usual = getattr(given, key), getattr(default, key)
        if key not in used and value != usual:
            if isinstance(value, BaseModel) and isinstance(usual, BaseModel):
                yield from ((f"{key}.{inner}", now, was) for inner, now, was in _changes(value, usual))
            else:
                yield key, value, usual
