"""Everything that a run needs, checked before its first stage: parts, files, rows, machines.

`from_here` is what a dry run can tell without GPU, network or another machine; `at_start` asks those too. What only the
fetched checkpoint can tell, its tokenizer's view of the rows, is checked right after the fetch stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from miles_like.checks import Check, NotCheckedError, Outcome, checked
from miles_like.config import RunConfig
from miles_like.distillation_config import TeacherConfig
from miles_like.make_config import MakeConfig
from miles_like.pipeline import Stage
from miles_like.preflight_machine import Machines, check_url
from miles_like.protocols import RewardFn
from miles_like.reward_config import REMOTE
from miles_like.tokenizer import LazyTokenizer
from miles_like.types import Prompt, SampleGroup, Unit
from rollout.data_config import DataConfig
from rollout.rows import is_hub_name

ROWS = 100  # of each source, that are read and templated
DRY_CALL_S, CALL_S = 5.0, 60.0  # that a user's part may take for a row
_HUB = "its rows are on the hub"


class Preflight:
    """The checks of one run. `stages` are all of its plan, `to_do` the names of those that will run."""

    def __init__(
        self,
        config: RunConfig,
        stages: Sequence[Stage],
        to_do: Sequence[str],
        ray_address: str | None,
        *,
        online: bool,
    ) -> None:
        self.config, self.to_do, self.online = config, to_do, online
        self.machines = Machines(config, stages, to_do, ray_address)
        self.prompts: list[Prompt] = []  # of the first sources that could be read, training's before evaluation's
        self.trained: list[Prompt] = []  # those of training, which teachers speak of
        self.examples: list[SampleGroup] = []
        model = config.model
        if model.make is not None:
            self.tokenizer_dir: Path | None = Path(model.make.tokenizer)
        else:
            self.tokenizer_dir = Path(model.path) if Path(model.path).is_dir() else None

    def run(self) -> list[Check]:
        """All findings; none of them raises."""
        out: list[Check] = []
        if "fetch" in self.to_do:
            out += self._model()
        if "train" in self.to_do:
            out += self._sources()
            out += self._rewards() if self.config.servers is not None else []
            out += self._parts()
            out += self._teachers()
        if not self.online:
            return [*out, *self.machines.from_here()]
        if any(c.outcome is Outcome.WRONG for c in out):  # no cluster need be started to say so
            return out
        return [*out, *self.machines.of_cluster()]

    def fetched(self, root: Path) -> list[Check]:
        """What needed the fetched checkpoint's tokenizer."""
        if "train" not in self.to_do or self.tokenizer_dir is not None:
            return []
        self.tokenizer_dir = root
        self.__dict__.pop("tokenizer", None)
        self.prompts, self.trained, self.examples = [], [], []
        sources = self._sources()
        late = self._reward_names() if self.config.servers is not None else []
        return [
            *sources,
            *(self._checked_reward(name) for name in late if self._sends_tokens(name)),
            *self._teacher_prompts(),
        ]

    @cached_property
    def tokenizer(self) -> Any:
        """Without the model's, one that only counts letters."""
        return Letters() if self.tokenizer_dir is None else LazyTokenizer(self.tokenizer_dir)

    # the model

    def _model(self) -> list[Check]:
        model = self.config.model
        if model.make is not None:
            return self._make("model.make", model.make)
        path = Path(model.path)
        if path.is_dir():
            from miles_like.hf_checkpoint import HFCheckpoint

            return [checked(f"model {model.path}", lambda: HFCheckpoint(path))]
        if path.is_absolute() or model.path.startswith((".", "~")) or model.path.count("/") > 1:
            said = f"model.path = {model.path!r}: no such directory, and no name of the hub (owner/name)"
            return [Check(f"model {model.path}", Outcome.WRONG, said)]
        return [] if self.online else [Check(f"model {model.path}", Outcome.NOT_CHECKED, "it is on the hub")]

    def _make(self, key: str, make: MakeConfig) -> list[Check]:
        """Files and rows that a checkpoint is made of."""
        from miles_like.supervised_config import SupervisedConfig
        from miles_like.supervised_data import ExampleReader

        tokenizer = LazyTokenizer(Path(make.tokenizer))

        def read(path: str, answer_key: str) -> None:
            most = self.config.max_pack_tokens
            data = DataConfig(train=path, answer_key=answer_key, max_prompt_tokens=most)
            keys = SupervisedConfig()
            ExampleReader(tokenizer=tokenizer, data=data, keys=keys, algorithm="sft", max_tokens=most).read(path, ROWS)

        files = [*((path, make.answer_key) for path in make.corpora), (make.validation, "answer")]
        out = [checked(f"{key}.tokenizer", lambda: tokenizer.encode("0", add_special_tokens=False))]
        for path, column in dict.fromkeys(files):
            if is_hub_name(path) and not self.online:
                out.append(Check(path, Outcome.NOT_CHECKED, _HUB))
            else:
                out.append(checked(path, partial(read, path, column)))
        return out

    # the rows

    def _sources(self) -> list[Check]:
        c = self.config
        if c.servers is None:
            assert c.data.train is not None, "the configuration asks for it"
            read = self._read_examples
            return [self._source(path, c.data, read) for path in (c.data.train, *(s.path for s in c.eval_sets))]
        # the reward that compares with the prompt's answer, as `RewardFn.compares` of the made one will say
        own = next((name for name in c.reward.weights if c.reward.compares(name)), None)
        out = []
        for name, source in c.data.trained().items():
            how = {"name": name if c.data.sources else "", "compared_by": own, "trained": True}
            out.append(self._source(source.path, c.data.of(source), self._read_prompts, **how))
        for one in c.eval_sets:
            compared = own if one.reward is None else one.reward if c.reward.compares(one.reward) else None
            out.append(self._source(one.path, c.data, self._read_prompts, compared_by=compared))
        return out

    def _source(self, path: str, data: DataConfig, read: Callable[..., None], **how: Any) -> Check:
        def one() -> None:
            if is_hub_name(path) and not self.online:
                raise NotCheckedError(_HUB)
            if self.tokenizer_dir is None:  # columns can be told, lengths cannot
                read(path, data.model_copy(update={"max_prompt_tokens": 1 << 40}), **how)
                raise NotCheckedError(f"its first {ROWS} rows were read, but the model's tokenizer is not here yet")
            read(path, data, **how)

        return checked(path, one)

    def _read_prompts(
        self, path: str, data: DataConfig, *, name: str = "", compared_by: str | None, trained: bool = False
    ) -> None:
        from rollout.source import Source

        source = Source(data, self.tokenizer, path, name=name, weight=1.0, seed=0, compared_by=compared_by, limit=ROWS)
        self.prompts += source.prompts
        self.trained += source.prompts if trained else ()

    def _read_examples(self, path: str, data: DataConfig) -> None:
        from miles_like.supervised_data import ExampleReader

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

    def _rewards(self) -> list[Check]:
        from miles_like.rewards.load import Rewards

        c = self.config
        out = [checked("reward", lambda: check_over_sampling(c, Rewards(c.reward)(None)))]
        if out[0].outcome is Outcome.WRONG:
            return out
        return [*out, *map(self._checked_reward, self._reward_names())]

    def _reward_names(self) -> list[str]:
        """Of those that the run trains on and its evaluations use."""
        c = self.config
        return list(dict.fromkeys([*c.reward.weights, *(s.reward for s in c.eval_sets if s.reward is not None)]))

    def _checked_reward(self, name: str) -> Check:
        return checked(f"reward {name}", lambda: self._reward(name))

    def _sends_tokens(self, name: str) -> bool:
        """Whether a server is sent token ids, which only the model's own tokenizer gives."""
        return name == "reward_model" and getattr(self.config.reward.named(name).reward_model, "send", None) == "tokens"

    def _reward(self, name: str) -> None:
        from miles_like.rewards.load import make_reward

        config = self.config.reward.named(name)
        if name in REMOTE:
            url = getattr(config, name).url
            if not self.online:
                make_reward(config)  # its options and its key file
                raise NotCheckedError(f"the server at {url}")
            check_url(f"reward.{name}.url", url)  # a wrong address is said in words of its own
            if self.tokenizer_dir is None and self._sends_tokens(name):
                raise NotCheckedError(f"the server at {url} is asked for a score once the model's tokenizer is here")
        limit_s = min(config.timeout_s or CALL_S, CALL_S if self.online else DRY_CALL_S)
        reward = make_reward(config.model_copy(update={"retries": 0, "timeout_s": limit_s}))
        prompt = self._row()
        n = 1 if reward.unit is Unit.SAMPLE else min(2, self.config.train.samples_per_group)
        from miles_like.trial_calls import samples_of

        samples = samples_of(prompt, self.tokenizer, n, longest=self.config.rollout.max_new_tokens)
        self._trial(spare_s=5.0).reward(f"reward {name!r}", reward, prompt, samples)  # the scorer has the limit itself

    def _row(self) -> Prompt:
        if not self.prompts:
            raise NotCheckedError("it was imported, and is called once a row of the data can be read")
        return self.prompts[0]

    def _trial(self, spare_s: float = 0.0) -> Any:
        from miles_like.trial_calls import Trial

        return Trial((CALL_S if self.online else DRY_CALL_S) + spare_s, self.online)

    # other parts

    def _parts(self) -> Iterator[Check]:
        c = self.config
        if c.servers is None:
            from miles_like.supervised import make_objective

            yield checked(f"algorithm {c.algorithm.name}", lambda: make_objective(c.algorithm.name, c.supervised))
            return
        yield checked("algorithm.advantage and algorithm.loss", self._algorithm)
        yield checked("algorithm.filter", self._filter)
        if c.rollout.played:
            yield checked(f"rollout.{'environment' if c.rollout.environment else 'generate'}", self._play)

    def _algorithm(self) -> None:
        from miles_like.algorithms.registry import make_algorithm

        c = self.config
        algorithm = make_algorithm(c.algorithm, c.correction, c.mismatch)
        if c.algorithm.own_loss:
            self._trial().loss(algorithm)
        if c.algorithm.advantage is not None and ":" in c.algorithm.advantage:
            self._trial().advantage(algorithm, [self._scored()])

    def _filter(self) -> None:
        from miles_like.algorithms.filters import make_filter

        refuse = make_filter(self.config.algorithm.filter)
        if ":" in self.config.algorithm.filter:
            self._trial().group_filter(refuse, self._scored())

    def _scored(self) -> SampleGroup:
        from miles_like.trial_calls import samples_of, scored

        prompt, c = self._row(), self.config
        n = c.train.samples_per_group
        return scored(prompt, samples_of(prompt, self.tokenizer, n, longest=c.rollout.max_new_tokens))

    def _play(self) -> None:
        from rollout.plays import make_play

        make_play(self.config.rollout, self.tokenizer)
        self._trial().play(self.config.rollout, self.tokenizer, self._row())

    # teachers

    def _teachers(self) -> list[Check]:
        section = self.config.distillation
        out: list[Check] = []
        for name, teacher in section.teachers.items() if section.on else ():
            key = f"distillation.teachers.{name}"
            if teacher.make is not None:
                out += self._make(f"{key}.make", teacher.make)
            elif teacher.url is not None and self.online:
                out.append(checked(key, partial(check_url, f"{key}.url", teacher.url)))
            elif teacher.url is not None:
                out.append(Check(key, Outcome.NOT_CHECKED, f"the server at {teacher.url}"))
            elif teacher.path is not None:
                out.append(checked(key, partial(self._weights, key, teacher)))
        return [*out, *self._teacher_prompts()]

    def _weights(self, key: str, teacher: TeacherConfig) -> None:
        assert teacher.path is not None
        path = Path(teacher.path)
        if path.is_dir():
            return
        if path.is_absolute() or teacher.path.startswith((".", "~")) or teacher.path.count("/") > 1:
            raise ValueError(f"{key}.path = {teacher.path!r}: no such directory, and no name of the hub (owner/name)")
        if not self.online:
            raise NotCheckedError(f"{teacher.path} is on the hub")

    def _teacher_prompts(self) -> list[Check]:
        """Templates, on every row of training that was read; and that each has a teacher where the mode asks for it."""
        section = self.config.distillation
        if not section.on or not self.trained:
            return []
        from miles_like.teacher_prompt import privileged

        def templates() -> None:
            for prompt in self.trained:
                name = section.teacher_of(prompt.source)
                if name is None and section.mode == "alone":
                    raise ValueError(
                        f"no teacher has prompts of source {prompt.source!r}, and with distillation.mode = 'alone' "
                        "they would train nothing: name it in a teacher's sources, or set mode = 'added'"
                    )
                if name is not None and (template := section.teachers[name].prompt) is not None:
                    privileged(name, template, self.tokenizer, prompt)

        return [checked("teachers' prompts", templates)]


class Letters:
    """In place of a tokenizer that is not there yet: a token is a letter, a chat the text of its messages."""

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
    """Raises ValueError where groups are to end early, and none ends before the last."""
    c = config
    if reward.unit is Unit.BATCH and c.groups_end_by_themselves and not c.under_way_at_publication:
        raise ValueError(
            f"buffer.over_sampling = {c.buffer.over_sampling:g} is to end a step before its slowest prompts, but "
            "the reward is given all samples at once and waits for them: remove it, set buffer.lockstep = true, or "
            "set reward.unit to less"
        )
