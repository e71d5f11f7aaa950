"""Settings of the importance weights against the mismatch of trainer and rollout. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from miles_like.config.sections.flat import FlatSection, Part

Level: TypeAlias = Literal["token", "sequence", "geometric", "k3"]
Action: TypeAlias = Literal["truncate", "mask"]


class Weights(Part):
    """A correction that is on."""

    chosen_by = switch = "kind"
    kind: Literal["tis", "mis", "icepop"]
    level: Level  # what the ratio is computed over: a token, or all tokens of a sample
    action: Action  # outside the bounds: set w to the bound (truncate), or to 0 (mask)
    low: float = Field(ge=0)  # lower bound of the ratio
    high: float = Field(gt=0)  # upper bound of the ratio
    veto: float = Field(ge=0, lt=1)  # a sample with any token ratio below this has w = 0; 0: no veto

    @model_validator(mode="after")
    def bounds_leave_a_choice(self) -> Weights:
        low, high, agrees = self.low, self.high, 0.0 if self.level == "k3" else 1.0
        if self.level == "k3" and low:
            raise ValueError(
                f"correction.low = {low} with level = 'k3' masks samples where trainer and rollout agree, "
                "because their k3 is 0: remove it"
            )
        if not low <= agrees <= high:
            raise ValueError(
                f"correction.low = {low} and high = {high} exclude {agrees}, the value where trainer and rollout "
                "agree: set low below it and high above it"
            )
        if low == high:
            raise ValueError(f"correction.low = correction.high = {low} accepts a single ratio: set low below high")
        return self


class CorrectionConfig(FlatSection):
    """Importance weights w against the mismatch of trainer and rollout; docs/corrections.md defines each kind.

    A key that is not given gets the default of the kind, level and action (`BOUNDS_OF`), and the resolved configuration
    shows it.
    """

    weights: Weights | None = None  # kind of the importance weights; None: kind = "off", no weights

    section = "correction"
    absent: ClassVar[Mapping[str, object]] = {"kind": "off"}

    @classmethod
    def implied(cls, given: Mapping[str, object]) -> Mapping[str, object]:
        """Level, action and bounds of the kind. Raises ValueError for a combination that is not defined."""
        ways = [(level, action) for kind, level, action in BOUNDS_OF if kind == given.get("kind")]
        if not ways:
            return {}
        kind, level, action = given["kind"], given.get("level", ways[0][0]), given.get("action", ways[0][1])
        for (known, *way), bounds in BOUNDS_OF.items():
            if (known, *way) == (kind, level, action):
                return dict(zip(("level", "action", "low", "high", "veto"), (level, action, *bounds), strict=True))
        more = "" if kind == "mis" else "; kind 'mis' has more combinations"
        raise ValueError(
            f"correction.kind = {kind!r} with level = {level!r} and action = {action!r}: it is only defined for "
            f"(level, action) = ({'), ('.join(map(', '.join, ways))}){more}"
        )

    @property
    def kind(self) -> str:
        return "off" if self.weights is None else self.weights.kind


# (kind, level, action) -> (low, high, veto); the first entry of a kind is its default
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
