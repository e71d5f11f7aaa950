"""What is optimized: the algorithm's parts, and importance weights. Torch-free."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_bridge.config import Section
from miles_like.supervised_config import SUPERVISED

# Of each kind of advantage and of loss: its keys and their defaults. A user's own (`pkg.module:name`) has none.
ADVANTAGE_KEYS: dict[str, dict[str, Any]] = {
    "grpo": {"normalize_std": True},
    "dr_grpo": {},
    "rloo": {},
    "reinforce": {"batch_baseline": False},
    "reinforce_pp": {"gamma": 1.0},
    "reinforce_pp_baseline": {},
    "ppo": {"gamma": 1.0, "gae_lambda": 1.0, "value_clip": 0.2},
    "maxrl": {},
}
OF_TOKENS = ("reinforce_pp", "ppo")  # the others give a number for a whole sample
OF_GROUPS = ("grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp_baseline")  # nothing where every sample is alone
LOSS_KEYS: dict[str, dict[str, Any]] = {
    "clipped": {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": None},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "clip_dual": None},  # arXiv:2507.18071, 5.1
    "cispo": {"clip_low": 1.0, "clip_high": 4.0},  # no lower bound; weights up to 5, as in ScaleRL, arXiv:2510.13786
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},  # arXiv:2511.20347
    "decoupled": {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": None, "behaviour_cap": 5.0},  # AReaL's own
    "reinforce": {},
}
# Bundles by name. A loss's own bounds come with the loss, so that any part can be swapped.
PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage": "dr_grpo", "aggregation": "constant"},
    "rloo": {"advantage": "rloo", "loss": "reinforce", "aggregation": "sequence_sum"},
    "reinforce": {"advantage": "reinforce", "loss": "reinforce", "aggregation": "sequence_sum"},
    "reinforce_pp": {"advantage": "reinforce_pp", "kl_coefficient": 1e-3, "kl_in": "reward"},
    "reinforce_pp_baseline": {"advantage": "reinforce_pp_baseline", "kl_coefficient": 1e-3, "kl_estimator": "k2"},
    "ppo": {"advantage": "ppo", "kl_in": "reward"},
    "dapo": {"filter": "nonzero_std", "overlong_penalty": 1.0},
    "maxrl": {"advantage": "maxrl"},
    "gspo": {"loss": "gspo", "aggregation": "sequence_mean"},
    "cispo": {"loss": "cispo"},
    "sapo": {"loss": "sapo", "aggregation": "sequence_mean"},
    "decoupled_ppo": {"loss": "decoupled"},
}
_PARTS = {"advantage": "grpo", "loss": "clipped", "aggregation": "token_mean"}
_PENALTY = {
    "loss": {"kl_in": "loss", "kl_estimator": "k3", "kl_unbiased": False},
    "reward": {"kl_in": "reward", "kl_estimator": "k1"},
}


class AlgorithmConfig(Section):
    """A preset's parts and their keys; docs/algorithms.md defines each. What is left out gets the preset's default, or
    that of the part, and the resolved configuration shows it. A key that the chosen parts do not use is None."""

    name: str = "grpo"  # of PRESETS, or of SUPERVISED, which have no parts
    advantage: str | None = None  # of ADVANTAGE_KEYS, or pkg.module:name of one's own (AdvantageFn)
    loss: str | None = None  # of LOSS_KEYS, or pkg.module:name of one's own (LossFn)
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "prompt_mean", "constant"] | None = None
    aggregation_constant: int | None = Field(None, ge=1)  # tokens; None: those of the longest answer
    normalize_std: bool | None = None  # divide advantages by the group's standard deviation
    batch_baseline: bool | None = None  # the mean reward of the rollout is taken off
    gamma: float | None = Field(None, gt=0, le=1)
    gae_lambda: float | None = Field(None, ge=0, le=1)
    value_clip: float | None = Field(None, gt=0)
    clip_low: float | None = Field(None, gt=0, le=1)
    clip_high: float | None = Field(None, gt=0)
    clip_dual: float | None = Field(None, gt=1)  # None: none
    tau_pos: float | None = Field(None, gt=0)
    tau_neg: float | None = Field(None, gt=0)
    behaviour_cap: float | None = Field(None, ge=1)
    kl_coefficient: float = Field(0.0, ge=0)  # of the penalty for leaving the reference; 0: none is kept
    kl_in: Literal["loss", "reward"] | None = None
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    kl_unbiased: bool | None = None  # times p_train / p_rollout
    # Bounds in nats of log(p_train / p_old) and of k3's log-ratio, and of k3's value; None: none. verl has 20 and 10.
    log_ratio_clamp: float | None = Field(None, gt=0)
    k3_clamp: float | None = Field(None, gt=0)
    reference_every: int = Field(0, ge=0)  # rollouts after which the reference is renewed; 0: never
    entropy_coefficient: float = Field(0.0, ge=0)
    off_policy_delta: float | None = Field(None, ge=0)  # nats/token; None: no sample is masked
    filter: str = "off"  # of groups: "nonzero_std", or pkg.module:name of one's own (GroupFilter)
    overlong_penalty: float = Field(0.0, ge=0)  # taken off the reward of a sample at the token limit; 0: none
    overlong_buffer: int | None = Field(None, ge=1)  # tokens below the limit; None: a fifth of it
    mask_truncated: bool = False  # samples that were cut at the token limit are not trained on
    shuffle_advantages: bool = False  # control run: advantages dealt out at random over the batch

    @model_validator(mode="before")
    @classmethod
    def parts_of_the_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        given = {k: v for k, v in given.items() if v is not None}
        name = given.get("name", "grpo")
        if not isinstance(name, str):
            return given
        if name in SUPERVISED:
            return given
        if name not in PRESETS:
            raise ValueError(_unknown("name", name, [*PRESETS, *SUPERVISED]))
        asked = _PARTS | PRESETS[name] | given
        used = _used(asked)
        return used | {k: v for k, v in asked.items() if k in used or k in given or k in _ALWAYS}

    @model_validator(mode="after")
    def parts_are_known(self) -> AlgorithmConfig:
        for key, known in (("advantage", ADVANTAGE_KEYS), ("loss", LOSS_KEYS)):
            value = getattr(self, key)
            if value is not None and value not in known and ":" not in value:
                raise ValueError(_unknown(key, value, known) + " (or pkg.module:name of your own)")
        return self

    @model_validator(mode="after")
    def every_key_does_something(self) -> AlgorithmConfig:
        used = {"name": ""} if self.supervised else dict.fromkeys(_ALWAYS) | _used(vars(self))
        for key, field in type(self).model_fields.items():
            value = getattr(self, key)
            if value != field.default and key not in used:
                raise ValueError(f"algorithm.{key} = {value!r} does nothing with {self._why_unused(key)}: remove it")
        if self.own_loss:
            for key in ("entropy_coefficient", "off_policy_delta"):
                if getattr(self, key):
                    raise ValueError(f"algorithm.{key} does nothing with a loss of your own, {self.loss!r}: remove it")
            if self.kl_coefficient and self.kl_in == "loss":
                raise ValueError(
                    f"algorithm.kl_coefficient = {self.kl_coefficient} does nothing with a loss of your own, "
                    f"{self.loss!r}: set algorithm.kl_in = 'reward', or remove it"
                )
        if self.advantage == "maxrl" and (self.overlong_penalty or self.kl_in == "reward"):
            key = "overlong_penalty" if self.overlong_penalty else "kl_in"
            raise ValueError(
                f"algorithm.{key} = {getattr(self, key)!r} makes rewards below 0, and algorithm.advantage = 'maxrl' "
                "divides by their mean: remove one of them"
            )
        if self.shuffle_advantages and self.advantage in OF_TOKENS:
            raise ValueError(
                f"algorithm.shuffle_advantages with algorithm.advantage = {self.advantage!r}, whose advantages are of "
                "tokens and belong to their places: set it to false, or take an advantage of samples"
            )
        return self

    def _why_unused(self, key: str) -> str:
        if self.supervised:
            return f"algorithm.name = {self.name!r}"
        if key == "k3_clamp" and self.kl_coefficient:
            return f"algorithm.kl_estimator = {self.kl_estimator!r}"
        if key in _PENALTY["loss"] or key == "k3_clamp":
            return "algorithm.kl_in = 'reward'" if self.kl_coefficient else "algorithm.kl_coefficient = 0"
        if key == "overlong_buffer":
            return "algorithm.overlong_penalty = 0"
        if key == "aggregation_constant":
            return f"algorithm.aggregation = {self.aggregation!r}"
        part = "advantage" if any(key in keys for keys in ADVANTAGE_KEYS.values()) else "loss"
        return f"algorithm.{part} = {getattr(self, part)!r}"

    # for whoever wires a run

    @property
    def supervised(self) -> bool:
        """Whether it trains on given answers, without a rollout."""
        return self.name in SUPERVISED

    @property
    def own_loss(self) -> bool:
        """Whether the loss is a user's."""
        return self.loss is not None and self.loss not in LOSS_KEYS

    @property
    def has_critic(self) -> bool:
        return self.advantage == "ppo"

    @property
    def keeps_reference(self) -> bool:
        """Whether the trainer keeps the reference's weights."""
        return self.kl_coefficient > 0 or self.name == "dpo"

    @property
    def reference_stream(self) -> bool:
        """Whether every sample is to have the reference's log-probabilities before its advantage is computed."""
        return self.kl_in == "reward"

    def constant(self, longest_answer: int) -> int | None:
        """What aggregation "constant" divides by, in tokens; None with another."""
        return (self.aggregation_constant or longest_answer) if self.aggregation == "constant" else None

    def check_run(
        self, *, longest_answer: int, group: int | None, taught: bool, correction: str, on_breach: str
    ) -> None:
        """What other sections say of it: the token limit, the samples of a prompt (None: nobody asks for advantages
        of rewards), whether a teacher is the reference, `correction.kind` and `mismatch.on_breach`. Raises ValueError
        for what would silently do nothing.
        """
        if self.reference_every and not (self.keeps_reference or taught):
            raise ValueError(
                f"algorithm.reference_every = {self.reference_every} does nothing without a reference: set "
                "algorithm.kl_coefficient, or take a teacher of kind 'self' with weights = 'reference'"
            )
        if group == 1 and self.filter == "nonzero_std":
            raise ValueError(
                "train.samples_per_group = 1 with algorithm.filter = 'nonzero_std', which leaves out every group of "
                "one: raise it, or set the filter to 'off'"
            )
        if group == 1 and self.advantage in OF_GROUPS:
            raise ValueError(
                f"train.samples_per_group = 1 with algorithm.advantage = {self.advantage!r}, which is 0 for a sample "
                "that nothing is compared with: raise it, or take 'reinforce', 'reinforce_pp' or 'ppo'"
            )
        if (self.overlong_buffer or 1) > longest_answer:
            raise ValueError(
                f"algorithm.overlong_buffer = {self.overlong_buffer} tokens below a limit of {longest_answer} "
                "(rollout.max_new_tokens; of episodes rollout.max_episode_tokens): lower it"
            )
        if correction != "off" and (self.own_loss or self.loss == "decoupled"):
            why = "a loss of your own" if self.own_loss else "a loss that weighs by p_old / p_rollout itself"
            raise ValueError(
                f"correction.kind = {correction!r} does nothing with algorithm.loss = {self.loss!r}, {why}: set it to "
                "'off', or take another loss"
            )
        if on_breach == "down_weight" and self.own_loss:
            raise ValueError(
                f"mismatch.on_breach = 'down_weight' does nothing with a loss of your own, {self.loss!r}: set it to "
                "'warn' or 'stop'"
            )


def _used(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that the parts in `asked` use, and their defaults."""
    out = dict(ADVANTAGE_KEYS.get(asked["advantage"], {})) | LOSS_KEYS.get(asked["loss"], {})
    if asked["loss"] in LOSS_KEYS and asked["loss"] != "reinforce":
        out["log_ratio_clamp"] = None
    if asked.get("kl_coefficient"):
        penalty = _PENALTY["reward" if asked.get("kl_in") == "reward" else "loss"]
        out |= penalty
        if (asked.get("kl_estimator") or penalty["kl_estimator"]) == "k3":
            out |= {"log_ratio_clamp": None, "k3_clamp": None}
    if asked["aggregation"] == "constant":
        out["aggregation_constant"] = None
    if asked.get("overlong_penalty"):
        out["overlong_buffer"] = None
    return out


def _unknown(key: str, value: Any, known: Collection[str]) -> str:
    near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.0)
    return f"unknown algorithm.{key} {value!r}: did you mean {near[0]!r}? Known: {sorted(known)}"


_ALWAYS = (
    "name",
    *_PARTS,
    "kl_coefficient",
    "reference_every",
    "entropy_coefficient",
    "off_policy_delta",
    "filter",
    "overlong_penalty",
    "mask_truncated",
    "shuffle_advantages",
)


class CorrectionConfig(Section):
    """Importance weights w against what trainer and rollout still disagree on; docs/corrections.md defines each kind.

    A key that is left out gets the default of the kind, level and action (`BOUNDS_OF`), and the resolved configuration
    shows it.
    """

    kind: Literal["off", "tis", "mis", "icepop"] = "off"
    level: Literal["token", "sequence", "geometric", "k3"] | None = None  # what is compared with the bounds
    action: Literal["truncate", "mask"] | None = None  # outside of them w is the bound, or 0
    low: float | None = Field(None, ge=0)
    high: float | None = Field(None, gt=0)
    veto: float | None = Field(None, ge=0, lt=1)  # a sample with a token whose ratio is below has w = 0; 0: none

    @model_validator(mode="before")
    @classmethod
    def bounds_of_the_kind(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kind = given.get("kind", "off")
        first = next(((level, action) for k, level, action in BOUNDS_OF if k == kind), None)
        if first is None:
            return given
        out = {"level": first[0], "action": first[1]} | given
        bounds = BOUNDS_OF.get((kind, out["level"], out["action"]))
        return out if bounds is None else dict(zip(("low", "high", "veto"), bounds, strict=True)) | out

    @model_validator(mode="after")
    def every_key_does_something(self) -> CorrectionConfig:
        given = {k: v for k in ("level", "action", "low", "high", "veto") if (v := getattr(self, k)) is not None}
        if self.kind == "off":
            if given:
                key, value = next(iter(given.items()))
                raise ValueError(
                    f"correction.{key} = {value!r} does nothing with correction.kind = 'off': remove it or set a kind"
                )
            return self
        if (self.kind, self.level, self.action) not in BOUNDS_OF:
            ways = [f"{level}, {action}" for kind, level, action in BOUNDS_OF if kind == self.kind]
            raise ValueError(
                f"correction.kind = {self.kind!r} with level = {self.level!r} and action = {self.action!r}: it is "
                f"defined for (level, action) = ({'), ('.join(ways)}); kind 'mis' has the most"
            )
        low, high, agrees = self.low, self.high, 0.0 if self.level == "k3" else 1.0
        assert low is not None and high is not None
        if self.level == "k3" and low:
            raise ValueError(f"correction.low = {low} with level 'k3', which is 0 where both sides agree: remove it")
        if not low <= agrees <= high:
            raise ValueError(
                f"correction.low = {low} and high = {high} shut out {agrees}, where trainer and rollout agree: give "
                "low below it and high above it"
            )
        if low == high:
            raise ValueError(
                f"correction.low = correction.high = {low} leaves no ratio to choose from: widen the bounds"
            )
        return self


# (low, high, veto) of each (kind, level, action) there is; the first of a kind is its default
BOUNDS_OF: dict[tuple[str, str, str], tuple[float, float, float]] = {
    ("tis", "token", "truncate"): (0.0, 2.0, 0.0),
    ("mis", "token", "mask"): (0.5, 2.0, 1e-4),
    ("mis", "token", "truncate"): (0.0, 2.0, 1e-4),
    ("mis", "sequence", "mask"): (0.5, 2.0, 1e-4),
    ("mis", "sequence", "truncate"): (0.0, 2.0, 1e-4),
    ("mis", "geometric", "mask"): (0.999, 1.001, 1e-4),
    ("mis", "geometric", "truncate"): (0.0, 1.001, 1e-4),
    ("mis", "k3", "mask"): (0.0, 0.01, 1e-4),
    ("icepop", "token", "mask"): (0.5, 5.0, 0.0),
}
