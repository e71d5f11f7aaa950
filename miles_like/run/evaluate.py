"""`miles-like eval`: a model in a Hugging Face directory answers held-out prompts, without a run.

A server is started for the evaluation and stopped after it, or a running server is used. Prompts, sampling, rewards and
figures are those of a run's evaluation (docs/evaluation.md).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from miles_like.cluster.environment import driver_secrets, plain_values
from miles_like.config.load import ConfigSource, Override, checked, override_tree, read_tree
from miles_like.config.sections.eval import NAME, EvalConfig, check_measured
from miles_like.config.sections.reward import RewardConfig
from miles_like.hf.checkpoint import HFCheckpoint, generation_eos
from miles_like.hf.checkpoint import read_config as read_hf_config
from miles_like.loop.evaluation import Answers, HeldOut, answers, held_out
from miles_like.loop.search import Search
from miles_like.report.metrics import readable
from miles_like.report.paired.scores import write_answers
from miles_like.rewards.load import Rewards
from miles_like.run.setup.model_plan import run_tokenizer
from miles_like.section import Section
from miles_like.stopping import run_to_end
from miles_like.types import Finish, SamplingParams
from rollout.config import RolloutConfig
from rollout.episodes.runner import make_episode_runner
from rollout.prompts.config import DataConfig
from rollout.seeds import seed_of
from rollout.server_key import ServerKey
from rollout.sglang.client import SGLangClient
from rollout.sglang.servers import ServerLaunch
from rollout.sglang.startup import launch_server
from rollout.tools.load import prompting


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Arguments of `Search`; by: the name of a reward."""

    best_of: int
    by: str
    beams: int | None = None
    step_tokens: int = 16


class AloneConfig(Section):
    """The sections of a run's configuration that an evaluation reads."""

    seed: int = 0
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    eval: EvalConfig = EvalConfig()


def read_evaluation_config(
    source: ConfigSource | None, overrides: Sequence[Override], data: Sequence[str]
) -> AloneConfig:
    """A run's configuration, if there is one, and `--data [NAME=]FILE` in place of its sets.

    Raises ValueError for an invalid configuration, override or `data`, and where none of them has a set.
    """
    known = AloneConfig.model_fields
    for given in overrides:
        for section in override_tree(given).keys() - known.keys():
            raise ValueError(
                f"--set {given}: an evaluation does not read section {section!r}, only {', '.join(known)}: remove it"
            )
    tree = {k: v for k, v in read_tree(source, overrides).items() if k in known}
    given = tree.get("data", {})
    tree["data"] = given if given.get("sources") else {"train": "", **given}
    if data:
        tree["data"].pop("eval", None)
        tree["eval"] = {**tree.get("eval", {}), "sets": _sets(data)}
    config = checked(AloneConfig, tree, str(source) if isinstance(source, Path) else "--set")
    if not (sets := config.eval.all_sets(config.data.eval)):
        raise ValueError("no eval set is configured: pass --data FILE, or a --config with data.eval or eval.sets")
    check_measured(sets, config.reward.name, played=config.rollout.has_episode_runner)
    return config


def _sets(data: Sequence[str]) -> dict[str, dict[str, str]]:
    out: dict[str, dict[str, str]] = {}
    for text in data:
        before, eq, after = text.partition("=")
        name, path = (before, after) if eq and NAME.fullmatch(before) else (Path(text.partition(":")[0]).stem, text)
        if name in out:
            raise ValueError(
                f"--data {text}: the name {name!r} is already used for {out[name]['path']}: choose a "
                "different name with --data NAME=FILE"
            )
        out[name] = {"path": path}
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All sets' answers by one weight version of one model."""

    model: str
    version: int
    seconds: float
    answers: Sequence[Answers] = field(default_factory=tuple)

    def figures(self) -> dict[str, float]:
        return {key: value for a in self.answers for key, value in a.figures().items()}

    def table(self) -> Table:
        """The table for the console, with one column per set."""
        columns = [_named(a) for a in self.answers]
        out = Table("", *(a.config.name for a in self.answers))
        for name in dict.fromkeys(name for figures in columns for name in figures):
            out.add_row(name, *(figures.get(name, "") for figures in columns))
        return out

    def write_json(self, path: Path) -> None:
        """Write model, weight version, duration in seconds and `figures` as one flat JSON object."""
        head = {"model": self.model, "weight_version": self.version, "seconds": round(self.seconds, 3)}
        path.write_text(json.dumps(head | self.figures(), indent=2) + "\n", encoding="utf-8")

    def write_answers(self, path: Path) -> None:
        """Write one JSON object per answer, each on a line; replaces the file."""
        write_answers(path, (line for a in self.answers for line in a.lines(readable)))


def _named(a: Answers) -> dict[str, str]:
    """The rows of one set's column: name -> value."""
    samples = [s for g in (*a.greedy, *a.sampled) for s in g.samples]
    n = max(1, len(samples))
    return {
        "prompts": str(len(a.greedy or a.sampled)),
        "answers": str(len(samples)),
        **{key.rpartition("/")[2]: f"{value:.4f}" for key, value in a.figures().items()},
        "truncated": f"{sum(s.finish is Finish.LENGTH for s in samples) / n:.4f}",
        "tokens per answer": f"{sum(s.response_len for s in samples) / n:.1f}",
    }


class EvalAlone:
    """One evaluation of a model directory. The constructor raises ValueError, before anything is started, for a
    directory without config, weights or tokenizer, an unknown reward, and prompts that cannot be read.

    attached: the URL of a running server of this model, used in place of starting one. key: the key of that server.
    search: choose among the sampled answers by a reward.
    """

    def __init__(
        self,
        hf_dir: Path,
        config: AloneConfig,
        run_dir: Path,
        console: Console,
        attached: str | None,
        key: ServerKey | None = None,
        search: SearchOptions | None = None,
    ) -> None:
        if config.rollout.engine == "vllm":
            raise ValueError(
                "rollout.engine = 'vllm': this command supports embedded and SGLang servers only, which load the "
                "same checkpoint: pass --set rollout.engine=embedded or --set rollout.engine=sglang"
            )
        self.hf_dir, self.config, self.logs, self.console = hf_dir, config, run_dir / "logs", console
        # with a running server the weights may be elsewhere
        hf = HFCheckpoint(hf_dir).config if attached is None else read_hf_config(hf_dir)
        self.architectures = tuple(hf.get("architectures") or ())
        self.attached = attached
        self.key = key if attached is not None else ServerKey.new()
        self.tokenizer = run_tokenizer(hf_dir)
        self.rewards = Rewards(config.reward)
        sets = config.eval.all_sets(config.data.eval)
        self.sets: list[HeldOut] = held_out(
            sets, config.data, prompting(self.tokenizer, config.rollout.tools), self.rewards
        )
        self.runner = make_episode_runner(config.rollout, self.tokenizer)
        self.search = None if search is None else self._search(search)

    def _search(self, options: SearchOptions) -> Search:
        """Raises ValueError for a selector that needs reference answers, for numbers that do not fit each other, and
        for beams with an environment."""
        selector = self.rewards(options.by)
        if selector.compares is not None:
            raise ValueError(
                f"--by {options.by}: this reward compares with the reference answer, which is unknown when a "
                "model is in use: choose a reward that needs no answer, such as a reward model"
            )
        if options.beams is not None and self.config.rollout.has_episode_runner:
            raise ValueError(
                "--beam continues single answers step by step, but rollout.environment or rollout.generate "
                "produces episodes: remove one of them"
            )
        return Search(
            best_of=options.best_of,
            by=options.by,
            selector=selector,
            beams=options.beams,
            step_tokens=options.step_tokens,
        )

    def run(self) -> Found:
        """Raises ValueError or RuntimeError where a server cannot be started or a request fails. A server that was
        started here is stopped, also after an error."""
        began = time.perf_counter()
        with self._served() as url:
            version, found = run_to_end(self._ask(url))
        seconds = time.perf_counter() - began
        return Found(model=str(self.hf_dir), version=version, seconds=seconds, answers=found)

    @contextmanager
    def _served(self) -> Iterator[str]:
        if self.attached is not None:
            yield self.attached
            return
        c = self._rollout()
        launch = ServerLaunch(
            model_path=self.hf_dir.resolve(),
            config=c,
            port=c.port,
            log_dir=self.logs.resolve(),
            return_routed_experts=False,
            key=self.key,
            env=plain_values(c.env),
            secrets=driver_secrets(c.env),
        )
        with launch_server(launch) as handle:
            yield handle.url

    def _rollout(self) -> RolloutConfig:
        """The configuration of the server to start, with room for the longest prompt and answer in the embedded
        engine."""
        c = self.config.rollout
        new = max(c.longest_answer, *(h.config.max_new_tokens or 0 for h in self.sets), 0)
        longest = max(len(p.token_ids) for h in self.sets for p in h.prompts) + new
        e = c.embedded
        room = {
            "context_length": max(e.context_length, longest),
            "max_total_tokens": max(e.max_total_tokens, 2 * longest),
        }
        return c.model_copy(update={"embedded": e.model_copy(update=room)})

    async def _ask(self, url: str) -> tuple[int, list[Answers]]:
        c = self.config
        client = SGLangClient(
            url,
            routing=None,
            prompts_per_request=c.rollout.prompts_per_request,
            request_timeout_s=c.rollout.request_timeout_s,
            samples_from="server" if await self._is_embedded(url) else "client",
            decode=lambda ids: str(self.tokenizer.decode(ids, skip_special_tokens=True)),
            log=None if self.attached else self.logs,
            key=self.key,
        )
        try:
            version = await client.weight_version()
            params = SamplingParams(
                max_new_tokens=c.rollout.max_new_tokens,
                temperature=c.rollout.temperature,
                stop_token_ids=stop_tokens(self.hf_dir, self.tokenizer.eos_token_id),
                sampling_seed=seed_of(c.seed, f"eval {version}"),
            )
            out = []
            for held in self.sets:
                self.console.print(
                    f"Evaluating {held.config.name}: {len(held.prompts)} prompts", highlight=False, soft_wrap=True
                )
                out.append(
                    await answers(
                        [client],
                        held,
                        params=params,
                        version=version,
                        alone=self.attached is None,
                        runner=self.runner,
                        search=self.search,
                    )
                )
            return version, out
        finally:
            await client.close()
            await self.rewards.close()

    async def _is_embedded(self, url: str) -> bool:
        """Whether the server is an embedded engine. Raises ValueError for a server of another model. A server without a
        weight version is set to version 0."""
        client = SGLangClient(url, routing=None, request_timeout_s=self.config.rollout.request_timeout_s, key=self.key)
        try:
            info, server, wanted = await client.model_info(), await client.server_info(), self.architectures
            if info.architectures and wanted and info.architectures != wanted:
                raise ValueError(
                    f"server {url} serves {', '.join(info.architectures)} ({info.model_path}), but {self.hf_dir} "
                    f"is {', '.join(wanted)}: use a server of this model"
                )
            if not info.weight_version.isdecimal():  # "default"
                await client.set_weight_version(0)
            return server.get("version") == "embedded"
        finally:
            await client.close()


def stop_tokens(hf_dir: Path, of_tokenizer: int | None) -> tuple[int, ...]:
    """Ids of the tokenizer's end-of-text token and of the end tokens in generation_config.json, ascending: chat models
    end a turn with a token other than the end of text."""
    return tuple(sorted({*(generation_eos(hf_dir) or ()), *(() if of_tokenizer is None else (of_tokenizer,))}))
