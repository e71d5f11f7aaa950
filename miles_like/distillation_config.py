"""Who teaches the policy, which prompts, and what becomes of what they say. Torch-free."""

from __future__ import annotations

import string
from typing import Literal

from pydantic import Field, model_validator

from megatron_bridge.config import Section
from miles_like.algorithm_config import ADVANTAGE_KEYS, AlgorithmConfig
from miles_like.make_config import MakeConfig
from miles_like.server_url import ServerUrl

Kind = Literal["server", "weights", "self"]


class TeacherConfig(Section):
    """One teacher; docs/distillation.md has a complete example of each kind.

    * server: any server with SGLang's interface that has the student's tokenizer. At `url`, or started by this run: on
      the Hugging Face directory `path`, or on the checkpoint that `make` describes.
    * weights: weights of the student's own architecture at `path`, a Hugging Face directory or a converted torch_dist
      one, which change places with the trainer's.
    * self: the policy itself, or the reference (the weights it began with, unless algorithm.reference_every moves it),
      given the prompt that `prompt` makes.
    """

    kind: Kind = "server"
    url: ServerUrl | None = None
    key_file: str | None = None  # of the server at `url`: a file of mode 0600 with its key (docs/security.md)
    path: str | None = None
    make: MakeConfig | None = None
    prompt: str | None = None  # template of {prompt}, {answer} and the prompt's other columns
    weights: Literal["current", "reference"] | None = None  # of self; None: current
    sources: tuple[str, ...] = ()  # prompt sources that it teaches; none: those that nobody else teaches

    @model_validator(mode="after")
    def every_key_does_something(self) -> TeacherConfig:
        given = {key for key in ("url", "path", "make", "prompt", "weights") if getattr(self, key) is not None}
        wrong = sorted(given - _USED[self.kind])
        if wrong:
            raise ValueError(
                f"{wrong[0]} does nothing for a teacher of kind {self.kind!r}, which reads "
                f"{', '.join(sorted(_USED[self.kind]))}: remove it or set another kind"
            )
        if self.key_file is not None and self.url is None:
            raise ValueError(
                f"key_file = {self.key_file!r} does nothing without url: remove it, or give the server's url"
            )
        if self.kind == "server" and len(given) != 1:
            raise ValueError(
                f"a teacher of kind 'server' has {' and '.join(sorted(given)) or 'neither url nor path nor make'}: "
                "give the url of a running server, or the path of a Hugging Face directory or a make section to start "
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
                "a teacher of kind 'self' has no prompt: it would tell the student what it says itself; give a "
                'template with what only the teacher sees, e.g. "{prompt}\\nHint: {answer}\\n"'
            )
        try:
            fields = {name for _, name, _, _ in string.Formatter().parse(self.prompt) if name is not None}
        except ValueError as e:
            raise ValueError(f"prompt = {self.prompt!r} is no template ({e}): write {{{{ and }}}} for braces") from None
        if "prompt" not in fields or len(fields) < 2:
            raise ValueError(
                f"prompt = {self.prompt!r} has the fields {sorted(fields)}: give {{prompt}} and at least one that only "
                "the teacher sees, e.g. {answer}"
            )

    def described(self) -> str:
        """One line for a reader."""
        if self.kind == "self":
            weights = "the run's reference weights" if self.by_reference else "the policy"
            return f"{weights}, asked {self.prompt!r}"
        if self.kind == "weights":
            return f"{self.path}, beside the trainer's weights"
        return f"the server at {self.url}" if self.url else f"an embedded server of {self.path or 'what the run makes'}"

    @property
    def by_reference(self) -> bool:
        return self.kind == "self" and self.weights == "reference"

    @property
    def by_server(self) -> bool:
        """Whether a server scores, at temperature 1; the others are scored by the trainer, at the run's."""
        return self.kind == "server" or (self.kind == "self" and not self.by_reference)


_USED: dict[Kind, set[str]] = {
    "server": {"url", "path", "make"},
    "weights": {"path"},
    "self": {"prompt", "weights"},
}


class DistillationConfig(Section):
    """On-policy distillation: the student samples, teachers score its tokens."""

    mode: Literal["off", "alone", "added"] = "off"  # instead of the reward's advantages, or added to them
    coefficient: float = Field(1.0, gt=0)  # of the teachers' part
    # 0: the advantage of a sampled token is log p_teacher - log p_student. k: a loss over the teacher's k likeliest
    # tokens at each place instead, through which the gradient goes
    top_k: int = Field(0, ge=0)
    beta: float | None = Field(None, ge=0, le=1)  # with top_k: 1 reverse KL, 0 forward KL, between: Jensen-Shannon
    sequences_per_request: int = Field(64, ge=1)  # that a server is sent at once
    request_timeout_s: float = Field(300.0, gt=0)
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)

    @property
    def on(self) -> bool:
        return self.mode != "off"

    @property
    def reference(self) -> bool:
        """Whether the trainer is to keep the weights that the run began with."""
        return self.on and any(t.by_reference for t in self.teachers.values())

    @property
    def rest(self) -> str | None:
        """Who teaches the sources that nobody names; None: nobody."""
        return next((name for name, t in self.teachers.items() if not t.sources), None)

    def described(self) -> list[str]:
        """A line for each teacher."""
        return [
            f"teacher {name} of {', '.join(map(repr, t.sources)) or 'all other sources'}: {t.described()}"
            for name, t in self.teachers.items()
        ]

    def teacher_of(self, source: str) -> str | None:
        """None: nobody teaches it, and it is left to the reward."""
        return next((name for name, t in self.teachers.items() if source in t.sources), self.rest)

    @model_validator(mode="after")
    def every_key_does_something(self) -> DistillationConfig:
        if not self.on:
            defaults = {
                key: field.get_default(call_default_factory=True) for key, field in type(self).model_fields.items()
            }
            for key, default in defaults.items():
                if getattr(self, key) != default:
                    raise ValueError(
                        f"distillation.{key} does nothing with distillation.mode = 'off': remove it, or set mode to "
                        "'alone' or 'added'"
                    )
            return self
        if not self.teachers:
            raise ValueError(
                f"distillation.mode = {self.mode!r} without a teacher: add a section [distillation.teachers.NAME]"
            )
        if self.beta is not None and not self.top_k:
            raise ValueError(
                f"distillation.beta = {self.beta} does nothing with distillation.top_k = 0, whose advantage is the "
                "reverse KL's: set top_k, or remove it"
            )
        return self

    @model_validator(mode="after")
    def requests_are_sent(self) -> DistillationConfig:
        asked = {
            "sequences_per_request": [t for t in self.teachers.values() if t.by_server],
            "request_timeout_s": [t for t in self.teachers.values() if t.kind == "server"],
        }
        for key, users in asked.items():
            if self.on and not users and (value := getattr(self, key)) != type(self).model_fields[key].default:
                raise ValueError(
                    f"distillation.{key} = {value} does nothing without a teacher of kind 'server' (one of kind 'self' "
                    "is asked with rollout.request_timeout_s): remove it"
                )
        return self

    @model_validator(mode="after")
    def one_teacher_a_source(self) -> DistillationConfig:
        taught: dict[str, str] = {}
        for name, teacher in self.teachers.items():
            for source in teacher.sources or ("",):
                if source in taught:
                    what = f"the source {source!r}" if source else "the sources that nobody names"
                    raise ValueError(
                        f"distillation.teachers.{taught[source]} and .{name} both teach {what}: give each its own "
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
        """Against the other sections. temperature: rollout.temperature; corrected: whether there is a [correction];
        embedded: whether the rollout's servers are the CPU engine. Raises ValueError."""
        for name, teacher in self.teachers.items():
            if teacher.by_server and temperature != 1:
                raise ValueError(
                    f"rollout.temperature = {temperature:g}, but servers score at temperature 1, so teacher {name!r} "
                    "and the student would be compared at two temperatures: set rollout.temperature = 1, or have the "
                    "trainer score (kind = 'weights', or 'self' with weights = 'reference')"
                )
            if teacher.kind == "server" and teacher.url is None and not embedded:
                raise ValueError(
                    f"teacher {name!r} has no url, and a run starts teachers' servers on CPUs, by the embedded engine, "
                    "only where the rollout's are too: start an SGLang server for it and give its url"
                )
        if self.on and algorithm.shuffle_advantages:
            raise ValueError(
                "algorithm.shuffle_advantages deals one number a sample out over the batch, distillation gives one a "
                "token: set it to false, or distillation.mode = 'off'"
            )
        if self.mode == "alone":
            self._check_alone(algorithm, corrected)

    def _check_alone(self, algorithm: AlgorithmConfig, corrected: bool) -> None:
        """Advantages made of rewards are not asked for, and with candidates there are none to weigh."""
        usual = ADVANTAGE_KEYS.get(algorithm.advantage or "", {})
        own = algorithm.advantage not in ADVANTAGE_KEYS or algorithm.has_critic
        idle = {
            "algorithm.advantage": algorithm.advantage if own else None,
            "algorithm.kl_in": algorithm.kl_in if algorithm.reference_stream else None,
            "algorithm.overlong_penalty": algorithm.overlong_penalty or None,
            "algorithm.filter": algorithm.filter if algorithm.filter == "nonzero_std" else None,
            **{f"algorithm.{key}": v for key, at in usual.items() if (v := getattr(algorithm, key)) != at},
        }
        if self.top_k:
            idle |= {"correction": "a kind" if corrected else None}
            idle |= {"algorithm.off_policy_delta": algorithm.off_policy_delta}
        for key, value in idle.items():
            if value is not None:
                mode = "'alone'" + (f" and top_k = {self.top_k}" if self.top_k else "")
                raise ValueError(
                    f"{key} = {value!r} does nothing with distillation.mode = {mode}, where no advantage is made of "
                    "rewards: remove it, or set mode = 'added'"
                )
