"""Which prompts a run is given, and how they are dealt. docs/prompts.md explains the keys. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rollout.config import Section

Decontaminate = Literal["off", "warn", "drop", "refuse"]

TRAIN = "train"  # what the one source of data.train is called


class SourceConfig(Section):
    """One of several sources. What is left out is as [data] says."""

    path: str  # a file or a hub name, as data.train
    weight: float = Field(1.0, gt=0)  # its share of the prompts that are dealt is weight / sum of weights
    prompt_key: str | None = None
    answer_key: str | None = None
    id_key: str | None = None
    template: Literal["plain", "chat"] | None = None
    instruction: str | None = None


class CurriculumConfig(Section):
    """Prompts that teach little rest for a while: those whose last measured pass rate is out of bounds."""

    min_pass_rate: float = Field(0.0, ge=0, le=1)  # below it a prompt rests
    max_pass_rate: float = Field(1.0, ge=0, le=1)  # above it too
    rest_epochs: int = Field(1, ge=1)  # it is passed over in so many epochs of its source, then comes again
    pass_at: float = 1.0  # a sample passes with this reward or more

    @model_validator(mode="after")
    def something_can_rest(self) -> CurriculumConfig:
        low, high = self.min_pass_rate, self.max_pass_rate
        if low > high:
            raise ValueError(
                f"data.curriculum.min_pass_rate = {low} is above max_pass_rate = {high}: every prompt would rest"
            )
        if (low, high) == (0, 1):
            raise ValueError(
                "[data.curriculum] does nothing with min_pass_rate = 0 and max_pass_rate = 1, within which every "
                "prompt is: raise the former, lower the latter, or remove the section"
            )
        return self


class DataConfig(Section):
    train: str | None = None  # a file or a hub name; left out where `sources` are given
    eval: str | None = None
    sources: dict[str, SourceConfig] = Field(default_factory=dict)  # by name, in place of `train`
    # columns, with dots what is in one; None: found by the names that verl, slime and TRL give them
    prompt_key: str | None = None
    answer_key: str | None = None
    id_key: str = "id"
    # None: "chat" for a prompt that is a list of messages, else "plain"
    template: Literal["plain", "chat"] | None = None
    instruction: str = ""  # put after each prompt
    max_prompt_tokens: int = Field(512, ge=1)
    epochs: int | None = Field(None, ge=1)  # every row comes so often, then its source ends; None: for ever
    curriculum: CurriculumConfig | None = None
    decontaminate: Decontaminate = "warn"  # what becomes of prompts that stand in an eval set too

    @model_validator(mode="after")
    def there_is_something_to_train_on(self) -> DataConfig:
        if (self.train is None) == (not self.sources):
            have = "neither data.train nor" if self.train is None else f"data.train = {self.train!r} and also"
            raise ValueError(f"there is {have} [data.sources.NAME]: give one of the two")
        if len(self.sources) == 1 and (only := next(iter(self.sources))) and self.sources[only].weight != 1:
            raise ValueError(f"data.sources.{only}.weight does nothing beside no other source: remove it")
        return self

    def trained(self) -> dict[str, SourceConfig]:
        """The sources by name: `sources`, or `train` alone."""
        return dict(self.sources) or {TRAIN: SourceConfig(path=self.train or "")}

    def of(self, source: SourceConfig) -> DataConfig:
        """As one source reads it: its own keys, and for the rest these."""
        own = source.model_dump(exclude={"path", "weight"}, exclude_none=True)
        return self.model_copy(update=own)

    def check_run(self, *, examined: bool, rewarded: bool) -> None:
        """`examined`: there is an eval set; `rewarded`: rewards are not all 0. Raises ValueError for a key that would
        do nothing."""
        if self.decontaminate in ("drop", "refuse") and not examined:
            raise ValueError(
                f"data.decontaminate = {self.decontaminate!r} does nothing without a set to compare with: give "
                "data.eval or [eval.sets.NAME], or remove it"
            )
        if self.curriculum is not None and not rewarded:
            raise ValueError(
                "[data.curriculum] goes by rewards, and reward.name = 'none' is 0 for every response: name another "
                "reward, or remove the section"
            )
