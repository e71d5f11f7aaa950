"""Configuration of a run's prompts and of their order. docs/prompts.md explains the keys. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from miles_like.section import Section

Decontaminate = Literal["off", "warn", "drop", "refuse"]

TRAIN = "train"  # name of the source that data.train makes


class SourceConfig(Section):
    """One of several sources. Keys that are not set have the values of [data]."""

    path: str  # a file or a hub name, as data.train
    weight: float = Field(1.0, gt=0)  # its share of the prompts is weight / sum of weights
    prompt_key: str | None = None  # None: as in [data]
    answer_key: str | None = None  # None: as in [data]
    id_key: str | None = None  # None: as in [data]
    template: Literal["plain", "chat"] | None = None  # None: as in [data]
    instruction: str | None = None  # None: as in [data]


class CurriculumConfig(Section):
    """Prompts whose last measured pass rate is out of bounds rest: they are skipped for some epochs."""

    min_pass_rate: float = Field(0.0, ge=0, le=1)  # a prompt below it rests
    max_pass_rate: float = Field(1.0, ge=0, le=1)  # a prompt above it rests
    rest_epochs: int = Field(1, ge=1)  # epochs of its source in which a resting prompt is skipped
    pass_at: float = 1.0  # a sample with at least this reward passes

    @model_validator(mode="after")
    def something_can_rest(self) -> CurriculumConfig:
        low, high = self.min_pass_rate, self.max_pass_rate
        if low > high:
            raise ValueError(
                f"data.curriculum.min_pass_rate = {low} is above max_pass_rate = {high}: every prompt would rest"
            )
        if (low, high) == (0, 1):
            raise ValueError(
                "[data.curriculum] does nothing with min_pass_rate = 0 and max_pass_rate = 1, which every prompt "
                "satisfies: raise the former, lower the latter, or remove the section"
            )
        return self


class DataConfig(Section):
    train: str | None = None  # a file or a hub name; not set if `sources` are given
    # held-out prompts, a file or a hub name; None: no evaluation, unless [eval.sets.NAME] is given
    eval: str | None = None
    sources: dict[str, SourceConfig] = Field(default_factory=dict)  # name -> source, instead of `train`
    # column of the prompt, with dots for a nested value; None: the names that verl, slime and TRL use
    prompt_key: str | None = None
    answer_key: str | None = None  # column of the answer, likewise
    id_key: str = "id"  # column of the prompt's id
    # None: "chat" for a prompt that is a list of messages, else "plain"
    template: Literal["plain", "chat"] | None = None
    instruction: str = ""  # appended to each prompt
    max_prompt_tokens: int = Field(512, ge=1)  # a longer prompt is refused
    epochs: int | None = Field(None, ge=1)  # epochs after which a source ends; None: it never ends
    curriculum: CurriculumConfig | None = None
    decontaminate: Decontaminate = "warn"  # what to do about training prompts that are in an eval set

    @model_validator(mode="after")
    def there_is_something_to_train_on(self) -> DataConfig:
        if (self.train is None) == (not self.sources):
            if self.train is None:
                raise ValueError("neither data.train nor [data.sources.NAME] is set: set one of the two")
            raise ValueError(f"data.train = {self.train!r} and [data.sources.NAME] are both set: remove one of the two")
        if len(self.sources) == 1 and (only := next(iter(self.sources))) and self.sources[only].weight != 1:
            raise ValueError(f"data.sources.{only}.weight does nothing with a single source: remove it")
        return self

    def train_sources(self) -> dict[str, SourceConfig]:
        """Name -> source: `sources`, or `train` alone."""
        return dict(self.sources) or {TRAIN: SourceConfig(path=self.train or "")}

    def for_source(self, source: SourceConfig) -> DataConfig:
        """This section with the keys that the source sets."""
        return self.model_copy(update=source.model_dump(exclude={"path", "weight"}, exclude_none=True))

    def check_run(self, *, has_eval_set: bool, has_reward: bool) -> None:
        """Raises ValueError for a key without effect. has_reward: not all rewards are 0."""
        if self.decontaminate in ("drop", "refuse") and not has_eval_set:
            raise ValueError(
                f"data.decontaminate = {self.decontaminate!r} does nothing without an eval set: set "
                "data.eval or [eval.sets.NAME], or remove it"
            )
        if self.curriculum is not None and not has_reward:
            raise ValueError(
                "[data.curriculum] needs rewards, and reward.name = 'none' gives 0 for every response: set another "
                "reward, or remove the section"
            )
