"""What training on given answers or pairs of them asks beside [train], [optimizer] and [data]. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from megatron_bridge.config import Section

SUPERVISED = ("sft", "dpo", "reward_model")  # values of algorithm.name that train without a rollout
PAIRS = ("dpo", "reward_model")  # of these, those whose rows are a preferred and another answer


class SupervisedConfig(Section):
    """Keys of `algorithm.name` = "sft", "dpo" and "reward_model"; docs/supervised.md has the formulas."""

    messages_key: str = "messages"  # sft: column of whole conversations, used where a row has it
    chosen_key: str = "chosen"  # pairs: column of the preferred answer
    rejected_key: str = "rejected"  # pairs: column of the other
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"  # sft: what an example weighs: its tokens, or 1
    loss: Literal["sigmoid", "ipo"] = "sigmoid"  # dpo
    beta: float = Field(0.1, gt=0)  # dpo: what a log-ratio to the reference counts as reward
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)  # dpo: share of pairs that are taken to be the wrong way round
    center_coefficient: float = Field(0.0, ge=0)  # reward_model: pulls the sum of a pair's rewards to 0

    @model_validator(mode="after")
    def ipo_has_no_smoothing(self) -> SupervisedConfig:
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError(
                f"supervised.label_smoothing = {self.label_smoothing} does nothing with supervised.loss = 'ipo': set "
                "it to 0, or loss = 'sigmoid'"
            )
        return self


_KEYS_OF = {
    "sft": {"messages_key", "aggregation"},
    "dpo": {"chosen_key", "rejected_key", "loss", "beta", "label_smoothing"},
    "reward_model": {"chosen_key", "rejected_key", "center_coefficient"},
}


def check_keys(name: str, given: SupervisedConfig) -> None:
    """Raises ValueError for a key of [supervised] that does nothing with `algorithm.name = name`."""
    for key, value, _ in _changes(given, SupervisedConfig(), _KEYS_OF.get(name, set())):
        users = [repr(n) for n in SUPERVISED if key in _KEYS_OF[n]]
        raise ValueError(
            f"supervised.{key} = {value!r} does nothing with algorithm.name = {name!r}: remove it, or set "
            f"algorithm.name = {' or '.join(users)}"
        )


def check_unused(name: str, sections: Mapping[str, tuple[Section, Section, set[str]]]) -> None:
    """Raises ValueError for a key that a run without rollout does not look at and that was changed all the same:
    `sections` are by name what was given, what it is by default, and the keys that are looked at."""
    for section, (given, default, used) in sections.items():
        for key, value, usual in _changes(given, default, used):
            other = f", or set it to {usual!r}" if usual is not None else ""
            raise ValueError(
                f"{section}.{key} = {value!r} does nothing with algorithm.name = {name!r}, which samples no answers: "
                f"remove it{other}"
            )


def without_replay(given: dict[str, Any]) -> dict[str, Any]:
    """A run's sections as they are read; there are no routes of a rollout where nothing is sampled."""
    algorithm, replay = given.get("algorithm"), given.get("replay", {})
    if not isinstance(algorithm, dict) or algorithm.get("name") not in SUPERVISED or not isinstance(replay, dict):
        return given
    return given | {"replay": {"mode": "off"} | replay}


def _changes(given: BaseModel, default: BaseModel, used: Collection[str] = ()) -> Iterator[tuple[str, Any, Any]]:
    """(key, what it is, what it is by default) of keys not in `used` that differ; keys of inner sections are dotted."""
    for key in type(given).model_fields:
        value, usual = getattr(given, key), getattr(default, key)
        if key not in used and value != usual:
            if isinstance(value, BaseModel) and isinstance(usual, BaseModel):
                yield from ((f"{key}.{inner}", *rest) for inner, *rest in _changes(value, usual))
            else:
                yield key, value, usual
