"""Check everything that a run needs before its first stage: plug-ins, files, rows, machines.

A dry run makes the checks that need no GPU, network or other machine; a run makes all. Checks of the rows that need the
fetched checkpoint's tokenizer are made right after the fetch stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_like.check_results import CheckResult, NotCheckedError, Outcome, run_check
from miles_like.config.run import RunConfig
from miles_like.config.sections.algorithm import CustomAdvantage, CustomLoss
from miles_like.config.sections.distillation import (
    MadeServer,
    PromptedPolicy,
    RunningServer,
    StartedServer,
    SwappedWeights,
)
from miles_like.config.sections.make import MakeConfig
from miles_like.config.sections.reward import EndpointConfig, Reward, RewardModelConfig
from miles_like.hf.tokenizer import LazyTokenizer
from miles_like.pipeline.stages import Stage
from miles_like.preflight.machine import Cluster, Machines, check_url
from miles_like.preflight.observers import check_packages
from miles_like.protocols import RewardFn
from miles_like.types import Prompt, SampleGroup, Unit
from rollout.prompts.config import DataConfig
from rollout.prompts.dataset import is_hub_name

if TYPE_CHECKING:
    from miles_like.preflight.trial_calls import Trial

ROWS = 100  # rows of each source that are read and templated
DRY_CALL_S, CALL_S = 5.0, 60.0  # time limits of a call of a user's plug-in on a row
_HUB = "its rows are on the hub and not fetched yet"


class Preflight:
    """The checks of one run. `stages`: all planned stages; `to_do`: names of those that will run.

    memory: refuses a run that does not fit its devices; its argument is the fetched checkpoint, None before that.
    """

    def __init__(
        self,
        config: RunConfig,
        stages: Sequence[Stage],
        to_do: Sequence[str],
        cluster: Cluster,
        *,
        online: bool,
        memory: Callable[[Path | None], None] = lambda _: None,
    ) -> None:
        self.config, self.to_do, self.online, self._memory = config, to_do, online, memory
        self.machines = Machines(config, stages, to_do, cluster)
        self.prompts: list[Prompt] = []  # of all readable sources, training's before evaluation's
        self.trained: list[Prompt] = []  # of the training sources
        self.examples: list[SampleGroup] = []
        model = config.model
        if model.make is not None:
            self.tokenizer_dir: Path | None = Path(model.make.tokenizer)
        else:
            self.tokenizer_dir = Path(model.path) if Path(model.path).is_dir() else None

    def run(self) -> list[CheckResult]:
        """The results of all checks. Raises nothing."""
        out: list[CheckResult] = []
        if "fetch" in self.to_do:
            out += self._model()
        if "train" in self.to_do:
            out.append(run_check("memory", lambda: self._memory(None)))
            out.append(run_check("trackers", lambda: check_packages(self.config.trackers, self.config.trace)))
            out += self._sandbox()
            out += self._sources()
            out += self._rewards() if self.config.servers is not None else []
            out += self._plugins()
            out += self._teachers()
        if not self.online:
            return [*out, *self.machines.local_checks()]
        if any(c.outcome is Outcome.WRONG for c in out):  # reported without starting a cluster
            return out
        return [*out, *self.machines.cluster_checks()]

    def fetched(self, root: Path) -> list[CheckResult]:
        """The checks that need the fetched checkpoint's config.json or tokenizer."""
        if "train" not in self.to_do:
            return []
        fits = run_check("memory", lambda: self._memory(root))
        if self.tokenizer_dir is not None:
            return [fits]
        self.tokenizer_dir = root
        self.__dict__.pop("tokenizer", None)
        self.prompts, self.trained, self.examples = [], [], []
        sources = self._sources()
        late = self._reward_names() if self.config.servers is not None else []
        return [
            fits,
            *sources,
            *(self._checked_reward(name) for name in late if _sends_tokens(self.config.reward.part(name))),
            *self._teacher_prompts(),
        ]

    @cached_property
    def tokenizer(self) -> LazyTokenizer | CharacterTokenizer:
        """The model's; before it is fetched, a stand-in."""
        return CharacterTokenizer() if self.tokenizer_dir is None else LazyTokenizer(self.tokenizer_dir)

    def _prompting(self) -> Any:
        """The tokenizer with which prompts describe the tools. Raises ValueError as `load_tools`."""
        from rollout.tools.load import prompting

        return prompting(self.tokenizer, self.config.rollout.tools)

    # the model

    def _model(self) -> list[CheckResult]:
        model = self.config.model
        if model.make is not None:
            return self._make("model.make", model.make)
        path = Path(model.path)
        if path.is_dir():
            from miles_like.hf.checkpoint import HFCheckpoint

            return [run_check(f"model {model.path}", lambda: HFCheckpoint(path))]
        if path.is_absolute() or model.path.startswith((".", "~")) or model.path.count("/") > 1:
            text = f"model.path = {model.path!r}: neither a directory nor a hub name (owner/name)"
            return [CheckResult(f"model {model.path}", Outcome.WRONG, text)]
        return (
            []
            if self.online
            else [CheckResult(f"model {model.path}", Outcome.NOT_CHECKED, "it is on the hub and not fetched yet")]
        )

    def _make(self, key: str, make: MakeConfig) -> list[CheckResult]:
        """Check the files and rows that a checkpoint is made from."""
        from miles_like.config.sections.supervised import SupervisedConfig
        from miles_like.supervised.data import ExampleReader

        tokenizer = LazyTokenizer(Path(make.tokenizer))

        def read(path: str, answer_key: str) -> None:
            most = self.config.max_pack_tokens
            data = DataConfig(train=path, answer_key=answer_key, max_prompt_tokens=most)
            keys = SupervisedConfig()
            ExampleReader(tokenizer=tokenizer, data=data, keys=keys, algorithm="sft", max_tokens=most).read(path, ROWS)

        files = [*((path, make.answer_key) for path in make.corpora), (make.validation, "answer")]
        out = [run_check(f"{key}.tokenizer", lambda: tokenizer.encode("0", add_special_tokens=False))]
        for path, column in dict.fromkeys(files):
            if is_hub_name(path) and not self.online:
                out.append(CheckResult(path, Outcome.NOT_CHECKED, _HUB))
            else:
                out.append(run_check(path, partial(read, path, column)))
        return out

    def _sandbox(self) -> list[CheckResult]:
        config = self.config.sandbox
        if config.kind is None or self.config.servers is None:
            return []

        def check() -> None:
            from miles_like.sandbox.make import try_sandbox

            if config.kind == "remote" and not self.online:
                raise NotCheckedError(f"the server at {config.url}")
            try_sandbox(config)

        return [run_check("sandbox", check)]

    # the rows

    def _sources(self) -> list[CheckResult]:
        c = self.config
        if c.servers is None:
            assert c.data.train is not None, "RunConfig requires it"
            read = self._read_examples
            return [self._source(path, c.data, read) for path in (c.data.train, *(s.path for s in c.eval_sets))]
        # the reward that compares with the prompt's answer, which `RewardFn.compares` will name
        own = next((name for name in c.reward.weights if c.reward.compares(name)), None)
        out = []
        for name, source in c.data.train_sources().items():
            name = name if c.data.sources else ""
            train = partial(self._read_prompts, name=name, compared_by=own, trained=True)
            out.append(self._source(source.path, c.data.for_source(source), train))
        for one in c.eval_sets:
            compared = own if one.reward is None else one.reward if c.reward.compares(one.reward) else None
            out.append(self._source(one.path, c.data, partial(self._read_prompts, compared_by=compared)))
        return out

    def _source(self, path: str, data: DataConfig, read: Callable[[str, DataConfig], None]) -> CheckResult:
        def check() -> None:
            if is_hub_name(path) and not self.online:
                raise NotCheckedError(_HUB)
            if self.tokenizer_dir is None:  # checks the columns, but not the lengths
                read(path, data.model_copy(update={"max_prompt_tokens": 1 << 40}))
                raise NotCheckedError(f"the first {ROWS} rows were read, but the model's tokenizer is not fetched yet")
            read(path, data)

        return run_check(path, check)

    def _read_prompts(
        self, path: str, data: DataConfig, *, name: str = "", compared_by: str | None, trained: bool = False
    ) -> None:
        from rollout.prompts.source import Source

        tokenizer = self.tokenizer if self.tokenizer_dir is None else self._prompting()
        source = Source(data, tokenizer, path, name=name, weight=1.0, seed=0, compared_by=compared_by, limit=ROWS)
        self.prompts += source.prompts
        self.trained += source.prompts if trained else ()

    def _read_examples(self, path: str, data: DataConfig) -> None:
        from miles_like.supervised.data import ExampleReader

        most = self.config.max_pack_tokens if self.tokenizer_dir is not None else 1 << 40
        reader = ExampleReader(
            tokenizer=self.tokenizer,
            data=data,
            keys=self.config.supervised,
            algorithm=self.config.algorithm.name,
            max_tokens=most,
        )
        self.examples += reader.read(path, ROWS)

    # rewards

    def _rewards(self) -> list[CheckResult]:
        from miles_like.rewards.load import Rewards

        c = self.config
        out = [run_check("reward", lambda: check_over_sampling(c, Rewards(c.reward, sandbox=c.sandbox)(None)))]
        if out[0].outcome is Outcome.WRONG:
            return out
        return [*out, *map(self._checked_reward, self._reward_names())]

    def _reward_names(self) -> list[str]:
        """Names of the rewards of training and of the evaluations."""
        c = self.config
        return list(dict.fromkeys([*c.reward.weights, *(s.reward for s in c.eval_sets if s.reward is not None)]))

    def _checked_reward(self, name: str) -> CheckResult:
        return run_check(f"reward {name}", lambda: self._reward(name))

    def _reward(self, name: str) -> None:
        from miles_like.rewards.load import make_reward

        config = self.config.reward.named(name)
        reward = config.part(name)
        if isinstance(reward, EndpointConfig):
            if not self.online:
                make_reward(config)  # checks its options and its key file
                raise NotCheckedError(f"the server at {reward.url}")
            check_url(f"reward.{name}.url", reward.url)  # for a clearer message than a failed call's
            if self.tokenizer_dir is None and _sends_tokens(reward):
                raise NotCheckedError(
                    f"the server at {reward.url} is only called once the model's tokenizer is fetched"
                )
        limit_s = min(config.timeout_s or CALL_S, CALL_S if self.online else DRY_CALL_S)
        once = config.model_copy(update={"retries": 0, "timeout_s": limit_s, "outage_s": 0.0})
        scorer = make_reward(once, sandbox=self.config.sandbox)
        prompt = self._row()
        n = 1 if scorer.unit is Unit.SAMPLE else min(2, self.config.train.samples_per_group)
        from miles_like.preflight.trial_calls import samples_of

        samples = samples_of(prompt, self.tokenizer, n, longest=self.config.rollout.max_new_tokens)
        # the scorer applies limit_s itself
        self._trial(spare_s=5.0).reward(f"reward {name!r}", scorer, prompt, samples)

    def _row(self) -> Prompt:
        if not self.prompts:
            raise NotCheckedError("it was imported, but not called, because no row of the data could be read")
        return self.prompts[0]

    def _trial(self, spare_s: float = 0.0) -> Trial:
        from miles_like.preflight.trial_calls import Trial

        return Trial((CALL_S if self.online else DRY_CALL_S) + spare_s, self.online)

    # other plug-ins

    def _plugins(self) -> Iterator[CheckResult]:
        c = self.config
        if c.servers is None:
            from miles_like.supervised.steps import make_objective

            yield run_check(f"algorithm {c.algorithm.name}", lambda: make_objective(c.algorithm.name, c.supervised))
            return
        yield run_check("algorithm.advantage and algorithm.loss", self._algorithm)
        yield run_check("algorithm.filter", self._filter)
        if c.rollout.has_episode_runner:
            yield run_check(c.rollout.episode_key, self._episode)

    def _algorithm(self) -> None:
        from miles_like.algorithms.distillation import with_teachers
        from miles_like.algorithms.registry import make_algorithm

        c = self.config
        algorithm = make_algorithm(c.algorithm, c.correction, c.mismatch)
        with_teachers(algorithm, c.distillation)  # composes what the run will compute
        if isinstance(c.algorithm.parts.loss, CustomLoss):
            self._trial().loss(algorithm)
        if isinstance(c.algorithm.parts.advantage, CustomAdvantage):
            self._trial().advantage(algorithm, [self._scored()])

    def _filter(self) -> None:
        from miles_like.algorithms.filters import make_filter

        name = self.config.algorithm.parts.filter
        refuse = make_filter(name)
        if ":" in name:
            self._trial().group_filter(refuse, self._scored())

    def _scored(self) -> SampleGroup:
        from miles_like.preflight.trial_calls import samples_of, scored

        prompt, c = self._row(), self.config
        n = c.train.samples_per_group
        return scored(prompt, samples_of(prompt, self.tokenizer, n, longest=c.rollout.max_new_tokens))

    def _episode(self) -> None:
        from miles_like.sandbox.make import use_sandbox
        from rollout.episodes.runner import make_episode_runner

        use_sandbox(self.config.sandbox)
        c = self.config.rollout
        if self.tokenizer_dir is None and (c.tools.given or c.agent.given or c.renderer is not None):
            if c.tools.given:
                self._prompting()
            raise NotCheckedError("it was not called: the model's chat template is not fetched yet")
        make_episode_runner(c, self.tokenizer)
        if c.agent.given:
            raise NotCheckedError("it was loaded, but not called: an agent may take minutes, and act outside")
        self._trial().episode(self.config.rollout, self.tokenizer, self._row())

    # teachers

    def _teachers(self) -> list[CheckResult]:
        section = self.config.distillation
        out: list[CheckResult] = []
        for name, config in section.teachers.items():
            key = f"distillation.teachers.{name}"
            match config.part:
                case RunningServer(url=url) if self.online:
                    out.append(run_check(key, partial(check_url, f"{key}.url", url)))
                case RunningServer(url=url):
                    out.append(CheckResult(key, Outcome.NOT_CHECKED, f"the server at {url}"))
                case MadeServer(make=make):
                    out += self._make(f"{key}.make", make)
                case StartedServer(path=path) | SwappedWeights(path=path):
                    out.append(run_check(key, partial(self._weights, f"{key}.path", path)))
                case PromptedPolicy():
                    pass
        return [*out, *self._teacher_prompts()]

    def _weights(self, key: str, path: str) -> None:
        if Path(path).is_dir():
            return
        if Path(path).is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
            raise ValueError(f"{key} = {path!r}: neither a directory nor a hub name (owner/name)")
        if not self.online:
            raise NotCheckedError(f"{path} is on the hub")

    def _teacher_prompts(self) -> list[CheckResult]:
        """Check the teachers' templates on every training row that was read, and that each row has a teacher where the
        mode requires one."""
        section = self.config.distillation
        if section.teaching is None or not self.trained:
            return []
        from miles_like.hf.teacher_prompt import privileged

        def templates() -> None:
            for prompt in self.trained:
                name = section.teacher_of(prompt.source)
                if name is None and section.mode == "alone":
                    raise ValueError(
                        f"no teacher has prompts of source {prompt.source!r}, and with distillation.mode = "
                        "'alone' they would train nothing: add it to a teacher's sources, or set mode = 'added'"
                    )
                if name is not None and isinstance(part := section.teachers[name].part, PromptedPolicy):
                    privileged(name, part.prompt, self.tokenizer, prompt)

        return [run_check("teachers' prompts", templates)]


def _sends_tokens(reward: Reward) -> bool:
    """Whether the reward sends token ids to a server, which only the model's tokenizer gives."""
    return isinstance(reward, RewardModelConfig) and reward.send.send == "tokens"


class CharacterTokenizer:
    """Stands in for a tokenizer that is not fetched yet: a token is a character, a chat the text of its messages."""

    eos_token_id = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(t) for t in token_ids)

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        text = "".join(f"{m['role']}: {m['content']}\n" for m in conversation)
        return text + ("assistant: " if add_generation_prompt else "")


def check_over_sampling(config: RunConfig, reward: RewardFn) -> None:
    """Raises ValueError where over-sampling is set, but the reward scores all groups at once, so that no group can end
    before the last."""
    c = config
    if reward.unit is Unit.BATCH and c.groups_end_by_themselves and not c.in_flight_at_publication:
        raise ValueError(
            f"buffer.over_sampling = {c.buffer.over_sampling:g} would end a step before its slowest prompts, but "
            "the reward scores all samples of a step at once and waits for them: remove it, set buffer.lockstep "
            "= true, or set reward.unit to less"
        )
