"""Distillation settings: teachers, the prompts of each, and how their log-probs enter the loss. Torch-free."""

from __future__ import annotations

import string
from typing import Literal, TypeAlias

from pydantic import Field, model_validator

from miles_like.config.algorithm import NAMED, AlgorithmConfig, Named, Ppo
from miles_like.config.choices import Choice, Choices, changed, keys, keys_of
from miles_like.config.make import MakeConfig
from miles_like.section import Section
from rollout.server_url import ServerUrl

Kind = Literal["server", "weights", "self"]


class RunningServer(Section):
    """A server with SGLang's interface and the student's tokenizer."""

    url: ServerUrl
    key_file: str | None = None

    def described(self) -> str:
        return f"the server at {self.url}"


class StartedServer(Section):
    """A server that the run starts on a Hugging Face directory, or on the checkpoint that the section describes."""

    source: str | MakeConfig

    def described(self) -> str:
        return f"an embedded server of {self.source if isinstance(self.source, str) else 'what the run makes'}"


class SwappedWeights(Section):
    """Weights of the student's architecture, a Hugging Face or a torch_dist directory, swapped with the trainer's."""

    path: str

    def described(self) -> str:
        return f"{self.path}, beside the trainer's weights"


class PromptedPolicy(Section):
    """The policy or the reference, with a separate prompt."""

    prompt: str
    reference: bool = False  # the initial weights, unless algorithm.reference_every updates them

    def described(self) -> str:
        weights = "the run's reference weights" if self.reference else "the policy"
        return f"{weights}, asked {self.prompt!r}"


TeacherPart: TypeAlias = RunningServer | StartedServer | SwappedWeights | PromptedPolicy


class TeacherConfig(Section):
    """One teacher; docs/distillation.md has a complete example of each kind.

    * server: a server with SGLang's interface and the student's tokenizer, at `url` or started by this run on the
      Hugging Face directory `path` or the checkpoint that `make` describes.
    * weights: weights of the student's architecture at `path`, a Hugging Face or a converted torch_dist directory,
      which are swapped with the trainer's.
    * self: the policy, or the reference (the initial weights, unless algorithm.reference_every updates it), with the
      prompt that the template `prompt` gives.
    """

    kind: Kind = "server"
    url: ServerUrl | None = None
    key_file: str | None = None  # of the server at `url`: a file of mode 0600 with its key (docs/security.md)
    path: str | None = None
    make: MakeConfig | None = None
    prompt: str | None = None  # template of {prompt}, {answer} and the prompt's other columns
    weights: Literal["current", "reference"] | None = None  # of kind self; None: current
    sources: tuple[str, ...] = ()  # prompt sources that it teaches; (): all sources without another teacher

    @model_validator(mode="after")
    def every_key_does_something(self) -> TeacherConfig:
        TEACHER_CHOICES.check(self)
        if self.kind == "server":
            given = [key for key in ("make", "path", "url") if getattr(self, key) is not None]
            if len(given) != 1:
                raise ValueError(
                    f"a teacher of kind 'server' has {' and '.join(given) or 'neither url nor path nor make'}: give "
                    "the url of a running server, or the path of a Hugging Face directory or a make section to start "
                    "one on"
                )
        if self.kind == "weights" and self.path is None:
            raise ValueError("a teacher of kind 'weights' has no path: give a Hugging Face or a converted directory")
        if self.kind == "self":
            self._check_template()
        return self

    def _check_template(self) -> None:
        if self.prompt is None:
            raise ValueError(
                "a teacher of kind 'self' has no prompt: with the student's own prompt the teacher equals the student; "
                'give a template with information for the teacher only, e.g. "{prompt}\\nHint: {answer}\\n"'
            )
        try:
            fields = {name for _, name, _, _ in string.Formatter().parse(self.prompt) if name is not None}
        except ValueError as e:
            raise ValueError(
                f"prompt = {self.prompt!r} is not a valid template ({e}): write {{{{ and }}}} for braces"
            ) from None
        if "prompt" not in fields or len(fields) < 2:
            raise ValueError(
                f"prompt = {self.prompt!r} has the fields {sorted(fields)}: give {{prompt}} and at least one for the "
                "teacher only, e.g. {answer}"
            )

    @property
    def part(self) -> TeacherPart:
        """The keys of this kind."""
        if self.kind == "self":
            assert self.prompt is not None, "checked above"
            return PromptedPolicy(prompt=self.prompt, reference=self.weights == "reference")
        if self.url is not None:
            return RunningServer(url=self.url, key_file=self.key_file)
        source = self.make if self.path is None else self.path
        assert source is not None, "checked above"
        if self.kind == "weights":
            assert isinstance(source, str), "TEACHER_CHOICES"
            return SwappedWeights(path=source)
        return StartedServer(source=source)

    @property
    def by_reference(self) -> bool:
        return isinstance(self.part, PromptedPolicy) and self.part.reference

    @property
    def by_server(self) -> bool:
        """Whether a server scores, at temperature 1; otherwise the trainer scores, at the run's temperature."""
        return not isinstance(self.part, SwappedWeights) and not self.by_reference


TEACHER_CHOICES = Choices(
    "teacher",
    Choice("kind", {"server": keys("url", "path", "make"), "weights": keys("path"), "self": keys("prompt", "weights")}),
    Choice("url", otherwise=keys("key_file")),
)


class DistillationConfig(Section):
    """On-policy distillation: the student samples, teachers score its tokens."""

    mode: Literal["off", "alone", "added"] = "off"  # replaces the reward's advantages, or is added to them
    coefficient: float = Field(1.0, gt=0)  # factor of the teachers' part
    # 0: the advantage of a sampled token is log p_teacher - log p_student. k: instead a differentiable loss over the
    # teacher's k most likely tokens at each position
    top_k: int = Field(0, ge=0)
    beta: float | None = Field(None, ge=0, le=1)  # with top_k: 1 reverse KL, 0 forward KL, between: Jensen-Shannon
    sequences_per_request: int = Field(64, ge=1)  # to a teacher's server
    request_timeout_s: float = Field(300.0, gt=0)
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)

    @property
    def on(self) -> bool:
        return self.mode != "off"

    @property
    def reference(self) -> bool:
        """Whether the trainer keeps reference weights for a teacher."""
        return self.on and any(t.by_reference for t in self.teachers.values())

    def described(self) -> list[str]:
        """One line per teacher."""
        return [
            f"teacher {name} of {', '.join(map(repr, t.sources)) or 'all other sources'}: {t.part.described()}"
            for name, t in self.teachers.items()
        ]

    def teacher_of(self, source: str) -> str | None:
        """The teacher of a prompt source; None: it is trained by the reward only."""
        others = next((name for name, t in self.teachers.items() if not t.sources), None)
        return next((name for name, t in self.teachers.items() if source in t.sources), others)

    @model_validator(mode="after")
    def every_key_does_something(self) -> DistillationConfig:
        CHOICES.check(self)
        if not self.on:
            return self
        if not self.teachers:
            raise ValueError(
                f"distillation.mode = {self.mode!r} without a teacher: add a section [distillation.teachers.NAME]"
            )
        return self

    @model_validator(mode="after")
    def requests_are_sent(self) -> DistillationConfig:
        asked = {
            "sequences_per_request": [t for t in self.teachers.values() if t.by_server],
            "request_timeout_s": [
                t for t in self.teachers.values() if isinstance(t.part, RunningServer | StartedServer)
            ],
        }
        for key, users in asked.items():
            if self.on and not users and (value := getattr(self, key)) != type(self).model_fields[key].default:
                raise ValueError(
                    f"distillation.{key} = {value} does nothing without a teacher of kind 'server' (one of kind 'self' "
                    "uses rollout.request_timeout_s): remove it"
                )
        return self

    @model_validator(mode="after")
    def one_teacher_a_source(self) -> DistillationConfig:
        taught: dict[str, str] = {}
        for name, teacher in self.teachers.items():
            for source in teacher.sources or ("",):
                if source in taught:
                    what = f"the source {source!r}" if source else "all sources that no teacher lists"
                    raise ValueError(
                        f"distillation.teachers.{taught[source]} and .{name} both teach {what}: give each different "
                        "sources"
                    )
                taught[source] = name
        return self

    @model_validator(mode="after")
    def candidates_come_from_servers(self) -> DistillationConfig:
        for name, teacher in self.teachers.items():
            if self.top_k and not teacher.by_server:
                raise ValueError(
                    f"distillation.top_k = {self.top_k}, but the trainer scores teacher {name!r} and gives log-probs "
                    "of sampled tokens only: set kind = 'server' (with a path the run starts one), or top_k = 0"
                )
        return self

    def check_run(self, *, temperature: float, algorithm: AlgorithmConfig, corrected: bool, embedded: bool) -> None:
        """Check against the other sections; raises ValueError. temperature: rollout.temperature; corrected: whether a
        [correction] is on; embedded: whether the rollout uses the embedded engine."""
        for name, teacher in self.teachers.items():
            if teacher.by_server and temperature != 1:
                raise ValueError(
                    f"rollout.temperature = {temperature:g}, but servers score at temperature 1, so teacher {name!r} "
                    "and the student would be compared at two temperatures: set rollout.temperature = 1, or have the "
                    "trainer score (kind = 'weights', or 'self' with weights = 'reference')"
                )
            if isinstance(teacher.part, StartedServer) and not embedded:
                raise ValueError(
                    f"teacher {name!r} has no url, and a run starts servers of teachers only with rollout.engine = "
                    "'embedded', on CPUs: start an SGLang server for it and give its url"
                )
        if self.on and algorithm.shuffle_advantages:
            raise ValueError(
                "algorithm.shuffle_advantages shuffles one number per sample, and distillation gives one per token: "
                "set it to false, or distillation.mode = 'off'"
            )
        if self.mode == "alone":
            self._check_alone(algorithm, corrected)

    def _check_alone(self, algorithm: AlgorithmConfig, corrected: bool) -> None:
        """Refuse keys of advantages from rewards, which are not computed; with candidates also keys that weight
        advantages."""
        part = algorithm.advantage_part
        own = isinstance(part, Ppo) or (isinstance(part, Named) and part.name not in NAMED)
        idle = {
            "algorithm.advantage": algorithm.advantage if own else None,
            "algorithm.kl_in": algorithm.kl_in if algorithm.reference_stream else None,
            "algorithm.overlong_penalty": algorithm.overlong_penalty or None,
            "algorithm.filter": algorithm.filter if algorithm.filter == "nonzero_std" else None,
            **({} if isinstance(part, Named) else {f"algorithm.{key}": value for key, value in changed(part)}),
        }
        if self.top_k:
            idle |= {"correction": "a kind" if corrected else None}
            idle |= {"algorithm.off_policy_delta": algorithm.off_policy_delta}
        for key, value in idle.items():
            if value is not None:
                mode = "'alone'" + (f" and top_k = {self.top_k}" if self.top_k else "")
                raise ValueError(
                    f"{key} = {value!r} does nothing with distillation.mode = {mode}, which computes no advantages "
                    "from rewards: remove it, or set mode = 'added'"
                )


_COMMON = {key: default for key, default in keys_of(DistillationConfig).items() if key not in ("mode", "beta")}
CHOICES = Choices(
    "distillation", Choice("mode", {"off": keys()}, otherwise=_COMMON), Choice("top_k", otherwise=keys("beta"))
)
