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

    min_pass_rate: float = Field(0.0, ge=0, le=1)  # a prompt with a lower pass rate rests
    max_pass_rate: float = Field(1.0, ge=0, le=1)  # a prompt with a higher pass rate rests
    rest_epochs: int = Field(1, ge=1)  # epochs of its source in which a resting prompt is skipped
    pass_at: float = 1.0  # lowest reward of a sample that passes

    @model_validator(mode="after")
    def something_can_rest(self) -> CurriculumConfig:
        low, high = self.min_pass_rate, self.max_pass_rate
        if low > high:
            raise ValueError(
                f"data.curriculum.min_pass_rate = {low} is above max_pass_rate = {high}: every prompt would rest"
            )
        if (low, high) == (0, 1):
            raise ValueError(
                "[data.curriculum] has no effect with min_pass_rate = 0 and max_pass_rate = 1, which every "
                "prompt satisfies: raise the former, lower the latter, or remove the section"
            )
        return self


class DataConfig(Section):
    train: str | None = None  # file or hub name of the training prompts; not set if `sources` is
    # file or hub name of held-out prompts; None: no evaluation, unless [eval.sets.NAME] is set
    eval: str | None = None
    sources: dict[str, SourceConfig] = Field(default_factory=dict)  # name -> source, instead of `train`
    # column of the prompt, with dots for a nested value; None: the names that verl, slime and TRL use
    prompt_key: str | None = None
    # column of the answer, with dots for a nested value; None: the names that verl, slime and TRL use
    answer_key: str | None = None
    id_key: str = "id"  # column of the prompt's id
    # how a prompt becomes text; None: "chat" for a list of messages, else "plain"
    template: Literal["plain", "chat"] | None = None
    instruction: str = ""  # appended to each prompt
    max_prompt_tokens: int = Field(512, ge=1)  # longest prompt; a longer one is rejected
    epochs: int | None = Field(None, ge=1)  # epochs after which a source ends; None: never
    curriculum: CurriculumConfig | None = None
    decontaminate: Decontaminate = "warn"  # what to do with training prompts that are also in an eval set

    @model_validator(mode="after")
    def there_is_something_to_train_on(self) -> DataConfig:
        if (self.train is None) == (not self.sources):
            if self.train is None:
                raise ValueError("neither data.train nor [data.sources.NAME] is set: set one of them")
            raise ValueError(f"data.train = {self.train!r} and [data.sources.NAME] are both set: remove one of the two")
        if len(self.sources) == 1 and (only := next(iter(self.sources))) and self.sources[only].weight != 1:
            raise ValueError(f"data.sources.{only}.weight has no effect with a single source: remove it")
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
                f"data.decontaminate = {self.decontaminate!r} has no effect without an eval set: set data.eval or "
                "[eval.sets.NAME], or remove it"
            )
        if self.curriculum is not None and not has_reward:
            raise ValueError(
                "[data.curriculum] needs rewards, and reward.name = 'none' gives 0 for every response: set another "
                "reward, or remove the section"
            )
