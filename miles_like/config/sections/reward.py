"""Reward settings: which rewards, their options, time limits and retries. Torch-free."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import regex
from pydantic import Field, JsonValue, ValidationError, field_validator, model_validator

from miles_like.config.sections.flat import FlatSection, Part, changed
from miles_like.section import Section
from rollout.server_url import ServerUrl, on_loopback

# Keys of RewardConfig that limit the calls of a reward
_PATIENCE = ("timeout_s", "retries", "retry_wait_s")
_CALLS = ("concurrency", *_PATIENCE)


class Reward(Section):
    """A reward and its options. `reads`: the keys of RewardConfig that apply to it."""

    reads: ClassVar[tuple[str, ...]] = ()

    @property
    def compares(self) -> bool:
        """Whether it needs the prompt's answer."""
        return False


class Comparison(Reward):
    """Compares with the prompt's answer."""

    @property
    def compares(self) -> bool:
        return True


class ExactNumber(Comparison):
    pass


class Gsm8k(Comparison):
    pass


class MathVerify(Comparison):
    reads = _PATIENCE  # it may take unbounded time, as every user's pattern


class NoReward(Reward):
    """Always 0."""


class FunctionReward(Reward):
    """A user's function, which is given "" where a prompt has no answer."""

    path: str  # the import path
    style: Literal["own", "sample", "verl", "slime", "trl", "openrlhf"] | None = None  # None: inferred
    unit: Literal["sample", "group", "batch"] | None = None  # of one call; None: inferred
    args: dict[str, JsonValue] = Field({})  # `args` of style "slime"

    reads = ("style", "unit", "args", *_CALLS)


class ExactConfig(Comparison):
    ignore_case: bool = False  # ignore upper and lower case in the comparison


class MultipleChoiceConfig(Comparison):
    choices: str = Field("ABCDEFGHIJ", pattern="^[A-Z]+$")  # capital letters that can be chosen


class RegexConfig(Reward):
    pattern: str  # with (?P<answer>...), its last match must equal the answer; otherwise the pattern must match

    reads = _PATIENCE

    @property
    def compares(self) -> bool:
        return "answer" in regex.compile(self.pattern).groupindex

    @field_validator("pattern")
    @classmethod
    def it_is_a_pattern(cls, given: str) -> str:
        return _pattern(given, "reward.regex.pattern")


THINK = r"\A\s*<think>(?:(?!</?think>).)*</think>(?!.*</?think>)"
ANSWER = r"\A(?:(?!</?answer>).)*<answer>(?:(?!</?answer>).)*</answer>\s*\Z"


class FormatConfig(Reward):
    """Each pattern is a part of the reward; `.` also matches a newline."""

    # name -> regular expression of a response
    patterns: dict[str, str] = Field({"think": THINK, "answer": ANSWER}, min_length=1)

    reads = _PATIENCE

    @field_validator("patterns")
    @classmethod
    def they_are_patterns(cls, given: dict[str, str]) -> dict[str, str]:
        return {name: _pattern(p, f"reward.format.patterns.{name}") for name, p in given.items()}


class LengthConfig(Reward):
    target: int = Field(ge=0)  # response tokens without a penalty
    limit: int = Field(ge=1)  # response tokens with the full penalty; at most rollout.max_new_tokens
    penalty: float = Field(1.0, gt=0)  # largest penalty, at `limit`

    @model_validator(mode="after")
    def there_is_room_between(self) -> LengthConfig:
        if self.limit <= self.target:
            raise ValueError(f"reward.length.limit = {self.limit} must be above target = {self.target}: raise it")
        return self


class EndpointConfig(Reward):
    """A server computes the reward."""

    url: ServerUrl  # http:// or https:// address
    key_file: str | None = None  # file with the bearer token, which must not be in a configuration
    key_over_http: bool = False  # allow sending the key unencrypted to another machine on a trusted network

    reads = (*_CALLS, "outage_s")

    @model_validator(mode="after")
    def a_key_is_not_sent_in_the_open(self) -> EndpointConfig:
        exposed = self.key_file is not None and self.url.startswith("http://") and not on_loopback(self.url)
        if exposed and not self.key_over_http:
            raise ValueError(
                f"key_file with url = {self.url!r} would send the key unencrypted to another machine: use https://, or "
                "set key_over_http = true if the network is trusted"
            )
        if self.key_over_http and not exposed:
            raise ValueError(
                "key_over_http has no effect without a key_file and an http:// url of another machine: remove it"
            )
        return self


class RemoteConfig(EndpointConfig):
    """`url` is the whole address of the POST request."""


class Classify(Part):
    """Raw outputs, SGLang's."""

    chosen_by = "api"
    api: Literal["classify"] = "classify"


class V1Classify(Part):
    """Probabilities."""

    chosen_by = "api"
    api: Literal["v1/classify"]
    model: str  # name under which the server serves the model


class Plain(Part):
    """Plain text, or token ids of the policy."""

    chosen_by = "send"
    send: Literal["text", "tokens"] = "text"


class Chat(Part):
    chosen_by = "send"
    send: Literal["chat"]
    tokenizer: str  # a directory or hub name with the reward model's chat template


class RewardModelConfig(EndpointConfig, FlatSection):
    """`url` is the server's, without a path."""

    # endpoint: raw outputs (SGLang's classify), or probabilities (v1/classify)
    api: Annotated[Classify | V1Classify, Field(discriminator="api")] = Classify()
    # form of the text that is scored: plain text, the policy's token ids, or a chat
    send: Annotated[Plain | Chat, Field(discriminator="send")] = Plain()
    output: int | None = Field(None, ge=0)  # index of the output that is the reward; None: the model has one output

    section = "reward.reward_model"


class Outcome(Part):
    """One value for the whole response."""

    chosen_by = "kind"
    kind: Literal["outcome"] = "outcome"


class Steps(Part):
    """A value for each step of the response."""

    chosen_by = "kind"
    kind: Literal["process"]
    step_separator: str = "\n"  # text between steps; "": each token is a step
    # how the steps' probabilities of being right become the reward
    reduce: Literal["min", "last", "mean", "product"] = "min"


class LocalRewardModelConfig(Reward, FlatSection):
    """A reward model that this process runs."""

    model: str  # Hugging Face directory of a model with a scalar head
    # what the head was trained on: whole responses (reward_model), or steps (process_reward)
    steps: Annotated[Outcome | Steps, Field(discriminator="kind")] = Outcome()
    device: str = "cpu"  # torch device, for example "cuda:0"

    section = "reward.local_reward_model"
    reads = _PATIENCE


JUDGE = """Question:
{prompt}

Reference answer:
{answer}

Response:
{response}

Rate how well the response answers the question, from 0 (not at all) to 10 (fully right). End with a line "Score: N"."""


class JudgeConfig(EndpointConfig):
    """`url` is the server's, without a path."""

    model: str = "default"  # served model name; SGLang accepts any
    template: str = JUDGE  # user message; {prompt}, {answer} and {response} are filled in
    system: str | None = None  # system message; None: none
    pattern: str = r"(?i:score)\W*?:\W*?(-?\d+(?:\.\d+)?)"  # group 1 of its last match is the score
    low: float = 0.0  # score that gives reward 0; a lower score is invalid
    high: float = 10.0  # score that gives reward 1; a higher score is invalid
    temperature: float = Field(0.0, ge=0)  # the judge's sampling temperature
    max_tokens: int = Field(1024, ge=1)  # token limit of the judge's answer

    @property
    def compares(self) -> bool:
        return "{answer}" in self.template

    @model_validator(mode="after")
    def it_can_be_read(self) -> JudgeConfig:
        if self.low >= self.high:
            raise ValueError(f"reward.judge.low = {self.low} must be below high = {self.high}: swap them")
        if "{response}" not in self.template:
            raise ValueError("reward.judge.template has no {response}, so the judge would not see the response: add it")
        if regex.compile(_pattern(self.pattern, "reward.judge.pattern")).groups < 1:
            raise ValueError(
                f"reward.judge.pattern = {self.pattern!r} has no group: put the score in parentheses, (\\d+)"
            )
        return self


class UnitTestsConfig(Reward):
    """Runs the program of a response in the sandbox of [sandbox], with the tests of the prompt's row."""

    tests_key: str = "tests"  # column of the tests (docs/rewards.md)
    entry_key: str = "entry_point"  # column of the function that a test's `check` gets; may be missing
    count: Literal["all", "share"] = "all"  # all: 1 when every test passes, else 0; share: of the tests that pass
    fenced: bool = True  # the program is the last fenced block of Python; false: the whole response

    reads = _CALLS


BuiltIn: TypeAlias = (
    ExactNumber
    | ExactConfig
    | Gsm8k
    | MathVerify
    | MultipleChoiceConfig
    | RegexConfig
    | FormatConfig
    | LengthConfig
    | RemoteConfig
    | RewardModelConfig
    | LocalRewardModelConfig
    | JudgeConfig
    | UnitTestsConfig
    | NoReward
)
# name -> the reward; where it has fields, they are the section [reward.NAME]
BUILT_IN: dict[str, type[BuiltIn]] = {
    "exact_number": ExactNumber,
    "exact": ExactConfig,
    "gsm8k": Gsm8k,
    "math_verify": MathVerify,
    "multiple_choice": MultipleChoiceConfig,
    "regex": RegexConfig,
    "format": FormatConfig,
    "length": LengthConfig,
    "remote": RemoteConfig,
    "reward_model": RewardModelConfig,
    "local_reward_model": LocalRewardModelConfig,
    "judge": JudgeConfig,
    "unit_tests": UnitTestsConfig,
    "none": NoReward,
}
DEFAULT = "exact_number"


def has_options(name: object) -> bool:
    return isinstance(name, str) and name in BUILT_IN and bool(BUILT_IN[name].model_fields)


class RewardConfig(Section):
    name: str | None = None  # a built-in reward or an import path (docs/rewards.md); None: exact_number, or `parts`
    parts: dict[str, float] = Field({})  # name -> weight in the sum of several rewards; 0: only logged
    # signature of a function (docs/rewards.md); None: inferred
    style: Literal["own", "sample", "verl", "slime", "trl", "openrlhf"] | None = None
    unit: Literal["sample", "group", "batch"] | None = None  # what one call of a function scores; None: inferred
    args: dict[str, JsonValue] = Field({})  # the `args` argument of a function of style "slime"
    timeout_s: float | None = Field(None, gt=0)  # time limit per attempt; None: 60 s, for a local reward 10 s
    retries: int | None = Field(None, ge=0)  # retries per sample; None: 2, for a local reward 0
    retry_wait_s: float | None = Field(None, ge=0)  # wait before the first retry, then doubled; None: 1 s
    # seconds for which a reward server may be away (no connection, status 5xx, 408, 429) before samples go without a
    # score; None: 600 in a run, 0 in other commands
    outage_s: float | None = Field(None, ge=0)
    concurrency: int | None = Field(None, ge=1)  # concurrent calls of one reward; None: 64
    exact: ExactConfig | None = None
    multiple_choice: MultipleChoiceConfig | None = None
    regex: RegexConfig | None = None
    format: FormatConfig | None = None
    length: LengthConfig | None = None
    remote: RemoteConfig | None = None
    reward_model: RewardModelConfig | None = None
    local_reward_model: LocalRewardModelConfig | None = None
    judge: JudgeConfig | None = None
    unit_tests: UnitTestsConfig | None = None

    @property
    def weights(self) -> dict[str, float]:
        """name -> weight of every reward."""
        return dict(self.parts) if self.parts else {self.name or DEFAULT: 1.0}

    def part(self, name: str) -> BuiltIn | FunctionReward:
        """The reward `name` with the options that it has here. Raises ValueError if options that it needs are
        missing."""
        if name not in BUILT_IN:
            return FunctionReward(path=name, style=self.style, unit=self.unit, args=self.args)
        given: BuiltIn | None = getattr(self, name) if has_options(name) else None
        try:
            return BUILT_IN[name].model_validate({}) if given is None else given
        except ValidationError as e:
            raise ValueError(
                f"reward {name!r} needs options: add it to reward.parts and set [reward.{name}], with a weight of "
                f"0 if it should only be logged ({e.errors()[0]['msg']})"
            ) from None

    @property
    def runs_programs(self) -> bool:
        """Whether one of the rewards needs a sandbox."""
        return any(BUILT_IN.get(name) is UnitTestsConfig for name in self.weights)

    def compares(self, name: str) -> bool:
        """Whether the reward `name` needs the prompt's answer. False where its options are missing."""
        with contextlib.suppress(ValueError):
            return self.part(name).compares
        return False

    def named(self, name: str) -> RewardConfig:
        """The configuration of the reward `name` alone, with the options, time limits and retries that it has here;
        style, unit and args only if it is one of this configuration's rewards. Raises ValueError as `part` does."""
        options = {name: self.part(name)} if has_options(name) else {}
        keys = self._read_by(name) - (set() if name in self.weights else {"style", "unit", "args"})
        given = {key: value for key in keys if (value := getattr(self, key)) not in (None, {})}
        return RewardConfig.model_validate({**given, "name": name, **options})

    @model_validator(mode="before")
    @classmethod
    def options_have_defaults(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        given = {k: v for k, v in given.items() if not (k == "name" and v == "")}  # --set reward.name= for parts
        parts = given.get("parts")
        names = list(parts) if isinstance(parts, dict) and parts else [given.get("name") or DEFAULT]
        if not parts and "name" not in given:
            given["name"] = DEFAULT
        for name in names:
            if has_options(name):
                given.setdefault(name, {})
        return given

    @model_validator(mode="after")
    def every_key_does_something(self) -> RewardConfig:
        if self.parts and self.name is not None:
            raise ValueError(
                f"reward.name = {self.name!r} and reward.parts are both set: remove one; {self.name!r} can be one "
                'of the parts (reward.name = "" removes an inherited name)'
            )
        if "none" in self.parts:
            raise ValueError("reward.parts has 'none', which adds 0 to every sum: remove it")
        names = ", ".join(self.weights)
        read = {"name", "parts", *self.weights}.union(*(self._read_by(name) for name in self.weights))
        for key, _ in changed(self):
            if key not in read:
                remedy = f"remove it, or add {key!r} to reward.parts" if key in BUILT_IN else "remove it"
                raise ValueError(f"reward.{key} has no effect with reward {names}: {remedy}")
        return self

    def _read_by(self, name: str) -> set[str]:
        """Keys that the reward `name` reads, beside its options."""
        if name in BUILT_IN:
            return set(BUILT_IN[name].reads)
        if ":" not in name:
            return set()
        return set(FunctionReward.reads) - (set() if self.style in (None, "slime") else {"args"})


def _pattern(given: str, where: str) -> str:
    try:
        regex.compile(given)
    except regex.error as e:
        raise ValueError(f"{where} = {given!r} is not a regular expression: {e}") from e
    return given
