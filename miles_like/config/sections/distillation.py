"""Distillation settings: teachers, the prompts of each, and how their log-probs enter the loss. Torch-free."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from miles_like.config.sections.algorithm import AdvantagePart, CustomAdvantage, Ppo, RolloutAlgorithm
from miles_like.config.sections.flat import FlatSection, Part, changed, defaults
from miles_like.config.sections.make import MakeConfig
from rollout.config import RolloutConfig, SGLangFlags
from rollout.server_url import ServerUrl


class AnyTeacher(Part):
    chosen_by = "kind"
    kind: str


class AnyServer(AnyTeacher):
    kind: Literal["server"] = "server"


class RunningServer(AnyServer):
    """A server that is already running."""

    url: ServerUrl  # address of a running server with SGLang's API and the student's tokenizer
    key_file: str | None = None  # file with the server's key, mode 0600 (docs/security.md)

    def described(self) -> str:
        return f"the server at {self.url}"


class LaunchedServer(AnyServer):
    """A server that the run starts."""

    # "sglang": stock SGLang on GPUs of [cluster.pools.teachers], or on CPU in a run without GPUs; "embedded": on CPU.
    # None: rollout.engine if that pool has GPUs, else embedded
    engine: Literal["embedded", "sglang"] | None = None
    sglang: SGLangFlags | None = None  # flags of a stock server; None: those of [rollout.sglang]

    @model_validator(mode="after")
    def flags_are_of_a_stock_server(self) -> LaunchedServer:
        if self.sglang is None:
            return self
        if self.engine != "sglang":
            raise ValueError(f"engine = {self.engine!r} does not use [sglang] flags: set engine = 'sglang'")
        for key in ("dist_init_port", "enable_memory_saver"):
            if (value := getattr(self.sglang, key)) is not None:
                raise ValueError(
                    f"sglang.{key} = {value!r} cannot be set for one teacher server: the run assigns the ports of "
                    "all its servers from rollout.sglang.dist_init_port, and teacher servers never release their "
                    "memory; remove it"
                )
        return self

    def rollout_of(self, run: RolloutConfig, *, gpus: bool) -> RolloutConfig:
        """The settings of its one server. run: those of the rollout's. gpus: the teachers' pool has GPUs."""
        flags, own = self.sglang or run.sglang, run.sglang
        never = {"enable_memory_saver": False, "dist_init_port": own.dist_init_port}
        return run.model_copy(
            update={
                "engine": self.engine or ("sglang" if gpus and run.engine == "sglang" else "embedded"),
                "servers": 1,
                "sglang": flags.model_copy(update=never | {"python": flags.python or own.python}),
                "embedded": run.embedded.model_copy(
                    update={"device": "cpu", "return_gates": False, "tp_size": 1, "ep_size": 1}
                ),
            }
        )


class StartedServer(LaunchedServer):
    """A server that the run starts on a Hugging Face directory."""

    path: str  # Hugging Face directory of the model that the run's teacher server loads

    def described(self) -> str:
        return f"a server of {self.path}, which the run starts"


class MadeServer(LaunchedServer):
    """A server that the run starts on the checkpoint that the section describes."""

    make: MakeConfig

    def described(self) -> str:
        return "a server of a model that the run makes"


class SwappedWeights(AnyTeacher):
    """Weights of the student's architecture, a Hugging Face or a torch_dist directory, swapped with the trainer's."""

    kind: Literal["weights"]
    path: str  # Hugging Face or torch_dist directory of a model with the student's architecture

    def described(self) -> str:
        return f"{self.path}, beside the trainer's weights"


class PromptedPolicy(AnyTeacher):
    """The policy or the reference, with a separate prompt: with the student's own the teacher would equal it."""

    kind: Literal["self"]
    # template with {prompt}, {answer} and the prompt's other columns
    prompt: str = Field(
        description='a template with information for the teacher only, e.g. "{prompt}\\nHint: {answer}\\n"'
    )
    # reference: the initial weights, or those of algorithm.reference_every; None: current
    weights: Literal["current", "reference"] | None = None

    @field_validator("prompt")
    @classmethod
    def it_tells_the_teacher_more(cls, prompt: str) -> str:
        try:
            fields = {name for _, name, _, _ in string.Formatter().parse(prompt) if name is not None}
        except ValueError as e:
            raise ValueError(f"it is not a valid template ({e}): write {{{{ and }}}} for literal braces") from None
        if "prompt" not in fields or len(fields) < 2:
            raise ValueError(
                f"it has the fields {sorted(fields)}: use {{prompt}} and at least one for the teacher only, e.g. "
                "{answer}"
            )
        return prompt

    def described(self) -> str:
        weights = "the run's reference weights" if self.weights == "reference" else "the policy"
        return f"{weights}, prompted with {self.prompt!r}"


def _kind(part: AnyTeacher) -> str:
    """Of a part that is built: the kinds of server have one name."""
    return part.kind


TeacherServer: TypeAlias = RunningServer | StartedServer | MadeServer
TeacherPart: TypeAlias = Annotated[
    Annotated[TeacherServer, Tag("server")]
    | Annotated[SwappedWeights, Tag("weights")]
    | Annotated[PromptedPolicy, Tag("self")],
    Discriminator(_kind),
]


class TeacherConfig(FlatSection):
    """One teacher; docs/distillation.md has a complete example of each kind. A server is the one at `url`, or is
    started by this run on the Hugging Face directory `path` or on the checkpoint that `make` describes."""

    part: TeacherPart  # a server, weights that the trainer loads, or the trained model itself with another prompt
    sources: tuple[str, ...] = ()  # prompt sources that this teacher scores; empty: all sources without another teacher

    section = "teacher"

    @property
    def by_reference(self) -> bool:
        return isinstance(self.part, PromptedPolicy) and self.part.weights == "reference"

    @property
    def by_policy(self) -> bool:
        """Whether the rollout's servers score."""
        return isinstance(self.part, PromptedPolicy) and not self.by_reference

    @property
    def by_server(self) -> bool:
        """Whether a server scores, at temperature 1; otherwise the trainer scores, at the run's temperature."""
        return not isinstance(self.part, SwappedWeights) and not self.by_reference


class Candidates(Part):
    """A differentiable loss over the teacher's `top_k` most likely tokens at each position."""

    switch = "top_k"
    # number of the teacher's most likely tokens that the loss uses at each position; 0: only the sampled token
    top_k: int = Field(gt=0)
    # 1: reverse KL; 0: forward KL; between: generalized Jensen-Shannon divergence
    beta: float | None = Field(None, ge=0, le=1)


class Teaching(Part):
    """The student samples, teachers score its tokens."""

    chosen_by = switch = "mode"
    mode: Literal["alone", "added"]  # replaces the reward's advantages, or is added to them
    coefficient: float = Field(1.0, gt=0)  # factor of the distillation advantage or loss
    candidates: Candidates | None = None  # None: the advantage of a sampled token is log p_teacher - log p_student
    sequences_per_request: int = Field(64, ge=1)  # sequences in one request to a teacher's server
    request_timeout_s: float = Field(300.0, gt=0)  # time limit of a request to a teacher's server
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)

    @model_validator(mode="after")
    def there_is_a_teacher(self) -> Teaching:
        if not self.teachers:
            raise ValueError(
                f"distillation.mode = {self.mode!r} without a teacher: add a section [distillation.teachers.NAME]"
            )
        return self

    @model_validator(mode="after")
    def requests_are_sent(self) -> Teaching:
        asked = {
            "sequences_per_request": [t for t in self.teachers.values() if t.by_server],
            "request_timeout_s": [t for t in self.teachers.values() if isinstance(t.part, AnyServer)],
        }
        for key, users in asked.items():
            if not users and (value := getattr(self, key)) != type(self).model_fields[key].default:
                raise ValueError(
                    f"distillation.{key} = {value} has no effect without a teacher of kind 'server' (one of kind "
                    "'self' uses rollout.request_timeout_s): remove it"
                )
        return self

    @model_validator(mode="after")
    def one_teacher_a_source(self) -> Teaching:
        taught: dict[str, str] = {}
        for name, teacher in self.teachers.items():
            for source in teacher.sources or ("",):
                if source in taught:
                    what = f"the source {source!r}" if source else "all sources that no teacher lists"
                    raise ValueError(
                        f"distillation.teachers.{taught[source]} and .{name} both teach {what}: assign each "
                        "source to one teacher"
                    )
                taught[source] = name
        return self

    @model_validator(mode="after")
    def candidates_come_from_servers(self) -> Teaching:
        for name, teacher in self.teachers.items():
            if (of := self.candidates) is not None and not teacher.by_server:
                raise ValueError(
                    f"distillation.top_k = {of.top_k}, but the trainer scores teacher {name!r} and returns "
                    "log-probs of sampled tokens only: set kind = 'server' (with path the run starts one), or "
                    "top_k = 0"
                )
        return self

    def check_run(
        self,
        *,
        temperature: float,
        algorithm: RolloutAlgorithm,
        corrected: bool,
        startable: Callable[[LaunchedServer], bool],
    ) -> None:
        """Check against the other sections; raises ValueError. temperature: rollout.temperature; corrected: whether a
        [correction] is on; startable: whether the run has CPUs or GPUs for a teacher's server."""
        for name, teacher in self.teachers.items():
            if teacher.by_server and temperature != 1:
                raise ValueError(
                    f"rollout.temperature = {temperature:g}, but servers score at temperature 1, so teacher {name!r} "
                    "and the student would be compared at two temperatures: set rollout.temperature = 1, or have the "
                    "trainer score (kind = 'weights', or 'self' with weights = 'reference')"
                )
            if isinstance(teacher.part, StartedServer | MadeServer) and not startable(teacher.part):
                raise ValueError(
                    f"teacher {name!r} has no url, and a run starts teacher servers only on GPUs of "
                    "[cluster.pools.teachers] or, with rollout.engine = 'embedded' or the teacher's engine = "
                    "'embedded', on CPUs: add that pool, or start an SGLang server for this teacher and set its "
                    "url"
                )
        if algorithm.shuffle_advantages:
            raise ValueError(
                "algorithm.shuffle_advantages shuffles one number per sample, but distillation produces one per "
                "token: set it to false, or distillation.mode = 'off'"
            )
        if self.mode == "alone":
            self._check_alone(algorithm, corrected)

    def _check_alone(self, algorithm: RolloutAlgorithm, corrected: bool) -> None:
        """Refuse keys of advantages from rewards, which are not computed; with candidates also keys that weight
        advantages."""
        part, overlong = algorithm.advantage, algorithm.overlong
        idle: dict[str, object] = {
            "algorithm.advantage": part.advantage if isinstance(part, Ppo | CustomAdvantage) else None,
            "algorithm.kl_in": "reward" if algorithm.reference_stream else None,
            "algorithm.overlong_penalty": overlong and overlong.overlong_penalty,
            "algorithm.filter": algorithm.filter if algorithm.filter == "nonzero_std" else None,
            **{f"algorithm.{key}": value for key, value in changed(part) if key != AdvantagePart.chosen_by},
        }
        if self.candidates is not None:
            idle |= {"correction": "a kind" if corrected else None}
            idle |= {"algorithm.off_policy_delta": getattr(algorithm.loss, "off_policy_delta", None)}
        for key, value in idle.items():
            if value is not None:
                mode = "'alone'" + ("" if self.candidates is None else f" and top_k = {self.candidates.top_k}")
                raise ValueError(
                    f"{key} = {value!r} has no effect with distillation.mode = {mode}, which computes no "
                    "advantages from rewards: remove it, or set mode = 'added'"
                )


class DistillationConfig(FlatSection):
    """On-policy distillation."""

    teaching: Teaching | None = None  # alone: instead of the reward's advantages; added: in addition to them

    section = "distillation"
    absent: ClassVar[Mapping[str, object]] = defaults(Teaching) | {"mode": "off", "top_k": 0}

    @property
    def mode(self) -> str:
        return "off" if self.teaching is None else self.teaching.mode

    @property
    def teachers(self) -> Mapping[str, TeacherConfig]:
        return {} if self.teaching is None else self.teaching.teachers

    @property
    def policy_teachers(self) -> list[str]:
        """Those that are the policy itself, on the rollout's servers."""
        return [name for name, teacher in self.teachers.items() if teacher.by_policy]

    @property
    def top_k(self) -> int:
        """Candidates at each position; 0: none."""
        return 0 if self.teaching is None or self.teaching.candidates is None else self.teaching.candidates.top_k

    @property
    def reference(self) -> bool:
        """Whether the trainer keeps reference weights for a teacher."""
        return any(t.by_reference for t in self.teachers.values())

    @property
    def started(self) -> dict[str, StartedServer | MadeServer]:
        """Teachers for which the run starts a server, in the order of the servers' numbers."""
        return {name: t.part for name, t in self.teachers.items() if isinstance(t.part, StartedServer | MadeServer)}

    @property
    def servers(self) -> int:
        """Servers that the run starts for teachers."""
        return len(self.started)

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
