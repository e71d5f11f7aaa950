"""What is optimized: the algorithm's parts, and importance weights. Torch-free."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from megatron_bridge.config import Section

# (clip_low, clip_high) where the algorithm's own paper has others than the defaults below
CLIP_OF = {"gspo": (3e-4, 4e-4)}  # arXiv:2507.18071, 5.1


class AlgorithmConfig(Section):
    name: str = "grpo"
    clip_low: float = Field(0.2, gt=0)  # gspo: 3e-4, of the geometric mean over a sample
    clip_high: float = Field(0.28, gt=0)  # gspo: 4e-4
    kl_coefficient: float = Field(0.0, ge=0)  # of the penalty for leaving the weights the run began with; 0: no copy
    normalize_std: bool = True  # divide advantages by the group's standard deviation
    shuffle_advantages: bool = False  # control run: advantages dealt out at random over the batch

    @model_validator(mode="before")
    @classmethod
    def bounds_of_the_algorithm(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("name") not in CLIP_OF:
            return given
        low, high = CLIP_OF[given["name"]]
        return {"clip_low": low, "clip_high": high} | given


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
