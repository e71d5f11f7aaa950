"""Settings of supervised training: SFT, preferences and reward models. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

from pydantic import BaseModel, Field

from miles_like.config.sections.flat import FlatSection, Part, values

SupervisedName: TypeAlias = Literal["sft", "dpo", "kto", "orpo", "simpo", "reward_model", "process_reward"]
SUPERVISED: tuple[SupervisedName, ...] = get_args(SupervisedName)  # values of algorithm.name without a rollout
PAIRS = ("dpo", "orpo", "simpo", "reward_model")  # of these, those trained on preference pairs
WITH_SCALAR_HEAD = ("reward_model", "process_reward")
FROM_REFERENCE = ("dpo", "kto")  # those that measure from reference weights


class DpoPart(Part):
    chosen_by = "loss"
    loss: Literal["sigmoid", "ipo"]


class Sigmoid(DpoPart):
    loss: Literal["sigmoid"] = "sigmoid"
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)  # assumed share of pairs with swapped labels


class Ipo(DpoPart):
    loss: Literal["ipo"] = "ipo"


class SupervisedConfig(FlatSection):
    """Keys of `algorithm.name` = "sft", "dpo", "kto", "orpo", "simpo", "reward_model" and "process_reward";
    docs/supervised.md has the formulas."""

    messages_key: str = "messages"  # sft, kto: column of whole conversations, used if a row has it
    chosen_key: str = "chosen"  # pairs: column of the preferred answer
    rejected_key: str = "rejected"  # pairs: column of the rejected answer
    label_key: str = "label"  # kto: column that is true for a desirable answer; a row without this column is a pair
    steps_key: str = "steps"  # process_reward: column with the list of an answer's steps
    step_labels_key: str = "labels"  # process_reward: column with one label per step: true, false or a share in [0, 1]
    step_separator: str = "\n"  # process_reward: text after each step except the last
    # sft: weight of an example: its tokens, or 1; process_reward: its steps, or 1
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    # dpo, kto: reward per log-ratio to the reference; simpo: per nat of the mean log-probability; orpo: weight of the
    # odds ratio
    beta: float = Field(0.1, gt=0)
    dpo: Annotated[Sigmoid | Ipo, Field(discriminator="loss")] = Sigmoid()  # dpo: form of the loss
    desirable_weight: float = Field(1.0, gt=0)  # kto: weight of the loss of a desirable answer
    undesirable_weight: float = Field(1.0, gt=0)  # kto: weight of the loss of an undesirable answer
    nll_of: Literal["text", "answer"] = "text"  # orpo: what the NLL covers: prompt and chosen answer, or the answer
    margin: float = Field(0.5, ge=0)  # simpo: margin between the rewards of chosen and rejected answers
    center_coefficient: float = Field(0.0, ge=0)  # reward_model: coefficient of the squared sum of a pair's rewards

    section = "supervised"
    absent: ClassVar[Mapping[str, object]] = {"label_smoothing": 0.0}


_PAIR_KEYS = {"chosen_key", "rejected_key"}
_KEYS_OF = {
    "sft": {"messages_key", "aggregation"},
    "dpo": _PAIR_KEYS | {"loss", "beta", "label_smoothing"},
    "kto": _PAIR_KEYS | {"messages_key", "label_key", "beta", "desirable_weight", "undesirable_weight"},
    "orpo": _PAIR_KEYS | {"beta", "nll_of"},
    "simpo": _PAIR_KEYS | {"beta", "margin", "label_smoothing"},
    "reward_model": _PAIR_KEYS | {"center_coefficient"},
    "process_reward": {"steps_key", "step_labels_key", "step_separator", "aggregation"},
}


def check_keys(name: str, given: SupervisedConfig, groups_per_step: int) -> None:
    """Raises ValueError for a key of [supervised] that does nothing with `algorithm.name = name`, and for KTO with one
    example a step."""
    if name == "kto" and groups_per_step == 1:
        raise ValueError(
            "train.groups_per_step = 1 with algorithm.name = 'kto', whose baseline pairs the prompt of each "
            "example with the answer of another example in the step: raise it to 2 or more"
        )
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
                f"{section}.{key} = {value!r} has no effect with algorithm.name = {name!r}, which samples no "
                f"answers: remove it{other}"
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
