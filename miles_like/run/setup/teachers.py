"""The teachers of one run: makes or fetches them, serves or converts them, and stops them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from megatron_bridge.convert.directory.manifest import Manifest
from megatron_bridge.families.registry import family_of
from miles_like.batch.packer import Packer
from miles_like.cluster.environment import driver_secrets
from miles_like.cluster.placement import Slot, plan_placement
from miles_like.cluster.rollout_servers import RayServers
from miles_like.cluster.run_nodes import RunNodes
from miles_like.config.run import RunConfig
from miles_like.config.sections.convert import ConvertConfig
from miles_like.config.sections.distillation import (
    MadeServer,
    PromptedPolicy,
    RunningServer,
    StartedServer,
    SwappedWeights,
    TeacherPart,
    Teaching,
)
from miles_like.config.sections.make import MakeConfig
from miles_like.experience.teachers import (
    MovedScores,
    PromptOf,
    ServerTeacher,
    Teacher,
    TeacherProcess,
    Teachers,
    TrainerTeacher,
    as_it_is,
)
from miles_like.hf.checkpoint import HFCheckpoint, read_config
from miles_like.hf.teacher_prompt import privileged
from miles_like.hf.tokenizer import load_tokenizer
from miles_like.pipeline.cache import cache_of
from miles_like.pipeline.fetch import describe, fetch, source_inputs, visible_files
from miles_like.pipeline.stages import Stage, run_stages
from miles_like.protocols import Trainer
from miles_like.run.setup.model_plan import RunTokenizer
from miles_like.run.setup.rollout_side import RolloutSide, teacher_launch, teacher_model
from miles_like.storage.completion import Output, files_under, input_key
from miles_like.types import REFERENCE, Prompt
from rollout.episodes.serving import Serving
from rollout.server_key import ServerKey, read_key
from rollout.sglang.client import ServerClient, SGLangClient


class TeacherPlaces(NamedTuple):
    """Where the servers of teachers are that the run has started, for rollout workers."""

    urls: Mapping[str, str]
    vocabularies: Mapping[str, int]  # tokens of each


class RunTeachers:
    """Makes the teachers of a run. Nothing is read or started before `prepare`."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        *,
        student: Mapping[str, Any],  # its config.json
        tokenizer: RunTokenizer,
        console: Console,
        key: ServerKey,  # of the servers that it starts
        nodes: Callable[[], RunNodes],  # of the run
    ) -> None:
        self.key, self.nodes = key, nodes
        self.config, self.section = config, config.distillation
        self.run_dir, self.student, self.tokenizer, self.console = run_dir, student, tokenizer, console
        self._paths: dict[str, Path] = {}  # of teachers of weights: a converted directory; of servers: Hugging Face's
        self._vocabularies: dict[str, int] = {}  # tokens of teachers on servers of the run: others end such a server
        self._placement = plan_placement(config.cluster, config.parallel, config.servers, config.teacher_rollouts)
        self._servers: RayServers | None = None
        self._urls: dict[str, str] = {}

    def prepare(self) -> None:
        """Makes, fetches and converts teachers, each once for all runs that share the cache, and copies them to those
        of the nodes that load them and do not see the cache. Raises ValueError for weights of another architecture than
        the student's, and as `seen_by`."""
        for name, config in self.section.teachers.items():
            match config.part:
                case StartedServer(path=source) | MadeServer(make=source):
                    files = self._fetched(name, source)
                    self._vocabularies[name] = int(read_config(files.root)["vocab_size"])
                    self._paths[name] = self._on_nodes(files, self._slots(name))
                case SwappedWeights(path=path):
                    self._paths[name] = self._on_nodes(self._shards(name, path), self._placement.of("trainer"))

    def launch(self) -> None:
        """Begins to start the teachers' servers; `wait` returns when they are up."""
        served = self.section.started
        logs = (self.run_dir / "logs" / "teachers").resolve()
        launches = []
        secrets = driver_secrets(self.config.rollout.env) if served else {}
        for name in served:
            for slot in self._slots(name):
                launch = teacher_launch(self.config, self._paths[name], logs, slot)
                launches.append((slot, replace(launch, key=self.key, secrets=secrets)))
        if launches:
            self._servers = RayServers(launches, self.nodes(), logs, self._placement.ports_of("teachers"))
            self._urls = dict.fromkeys(served, "")

    def _slots(self, name: str) -> list[Slot]:
        """Those of the parts of a teacher's server."""
        number = list(self.section.started).index(name)
        return [slot for slot in self._placement.of("teachers") if slot.index == number]

    def wait(self, say: Callable[[str], None]) -> None:
        """say: called with each new phase of a server. Raises RuntimeError when one did not come up."""
        if self._servers is not None:
            self._urls = dict(zip(self._urls, self._servers.wait(say), strict=True))

    @property
    def places(self) -> TeacherPlaces:
        return TeacherPlaces(self._urls, self._vocabularies)

    def of_worker(
        self, places: TeacherPlaces, rollout: Sequence[ServerClient], serving: Serving | None = None
    ) -> Teachers:
        """The teachers as a rollout worker asks them, in its process. rollout: clients of all servers of the run, of
        which those in `serving` are asked."""
        self._urls, self._vocabularies = dict(places.urls), dict(places.vocabularies)
        made: dict[str, Teacher] = {}
        for name, config in self.section.teachers.items():
            part = config.part
            prompt_of = self._prompt_of(name, part)
            if config.by_server and self.section.teaching is not None:
                made[name] = self._server(self.section.teaching, name, part, (rollout, serving), prompt_of)
            else:
                made[name] = MovedScores(prompt_of=prompt_of)
        return Teachers(made, self.section.teacher_of, top_k=self.section.top_k)

    def _prompt_of(self, name: str, part: TeacherPart) -> PromptOf:
        return partial(privileged, name, part.prompt, self.tokenizer) if isinstance(part, PromptedPolicy) else as_it_is

    def naming_failures(self) -> AbstractContextManager[None]:
        """As that of RayServers."""
        return nullcontext() if self._servers is None else self._servers.naming_failures()

    def stop(self) -> None:
        if self._servers is not None:
            self._servers.stop()

    def teachers(
        self,
        trainer: Trainer,
        rollout: Sequence[ServerClient],
        packer: Packer,
        prompts: Sequence[Prompt],
        serving: Serving | None = None,
    ) -> Teachers:
        """The teachers, not started. rollout, serving: as in `of_worker`. Raises ValueError for prompts without a
        teacher, and for prompts that lack a field of a teacher's template."""
        made: dict[str, Teacher] = {}
        for name, config in self.section.teachers.items():
            part = config.part
            prompt_of = self._prompt_of(name, part)
            for prompt in prompts:
                prompt_of(prompt)
            if config.by_server and self.section.teaching is not None:
                made[name] = self._server(self.section.teaching, name, part, (rollout, serving), prompt_of)
            else:
                weights = REFERENCE if config.by_reference else f"teacher {name}"
                path = self._paths.get(name)
                made[name] = TrainerTeacher(
                    trainer=trainer, weights=weights, packer=packer, path=path, prompt_of=prompt_of
                )
        out = Teachers(made, self.section.teacher_of, top_k=self.section.top_k)
        named = [source for t in self.section.teachers.values() for source in t.sources]
        out.check(prompts, alone=self.section.mode == "alone", named=named)
        return out

    def _server(
        self,
        teaching: Teaching,
        name: str,
        part: TeacherPart,
        rollout: tuple[Sequence[ServerClient], Serving | None],
        prompt_of: PromptOf,
    ) -> ServerTeacher:
        """A teacher on its own server, or, without one, on the rollout's servers."""
        clients, serving = rollout
        teacher = ServerTeacher(
            name=name,
            clients=clients,
            serving=serving,
            prompt_of=prompt_of,
            top_k=self.section.top_k,
            at_once=teaching.sequences_per_request,
            vocabulary=int(self.student["vocab_size"]),
            own=False,
        )
        client = partial(SGLangClient, routing=None, request_timeout_s=teaching.request_timeout_s)
        match part:
            case RunningServer(url=url, key_file=key_file):
                own = client(url, key=None if key_file is None else read_key(Path(key_file)))
            case StartedServer() | MadeServer():
                tokens = self._vocabularies[name]
                ours = partial(client, log=self.run_dir / "logs" / "teachers", key=self.key, vocabulary=tokens)
                if self._servers is None:  # a worker; the run starts the server again
                    return replace(teacher, clients=(ours(self._urls[name]),), serving=None, own=True)
                return replace(
                    teacher,
                    started=self._started(name, ours),
                    other_tokenizer=self._other_tokenizer,
                    own=True,
                    early=self._stock(name),
                )
            case _:
                return teacher
        return replace(
            teacher, clients=(own,), serving=None, other_tokenizer=self._other_tokenizer, own=True, early=True
        )

    def _stock(self, name: str) -> bool:
        """Whether its server is stock SGLang. An embedded one is asked for all groups of a step at once: the last bits
        of its log-probs depend on what is in a batch, and a resumed run has the same bits."""
        return self.config.teacher_rollouts[list(self.section.started).index(name)].engine == "sglang"

    def _started(self, name: str, client: Callable[[str], SGLangClient]) -> TeacherProcess:
        servers, url = self._servers, self._urls[name]
        assert servers is not None, "teachers before launch"

        def say(text: str) -> None:
            self.console.print(f"{'':12}{text}", markup=False, soft_wrap=True)

        def restart() -> SGLangClient:
            servers.replace([url], say)
            return client(url)

        return TeacherProcess(
            client=client(url),
            ended=lambda: servers.ended(url),
            restart=restart,
            say=say,
            restarts=self.config.rollout.restarts,
            window_s=self.config.rollout.restart_window_s,
        )

    def _other_tokenizer(self, directory: Path) -> str | None:
        """How the tokenizer of `directory` differs from the student's; None: it does not."""
        own, other = self.tokenizer.get_vocab(), load_tokenizer(directory).get_vocab()
        if own == other:
            return None
        differ = [token for token in own if other.get(token) != own[token]]
        return f"{len(other)} tokens instead of {len(own)}" + (
            f", and {differ[0]!r} has a different id" if differ else ""
        )

    def _on_nodes(self, files: Output, slots: Sequence[Slot]) -> Path:
        """The path at which the nodes of `slots` find the files."""
        nodes = self.nodes()
        if nodes.local:
            return files.root.resolve()
        from miles_like.staging.node_copies import seen_by

        c = self.config.cluster
        users = list({slot.node: nodes.of(slot) for slot in slots}.values())
        local = None if c.stage_dir is None else Path(c.stage_dir)
        return seen_by(files, users, local=local, timeout_s=c.timeout_s)

    def _shards(self, name: str, path: str) -> Output:
        """A directory of Megatron shards: `path` itself, or the conversion of the Hugging Face directory `path`."""
        if Manifest.there(root := Path(path)) and Manifest.read(root).kind == "torch_dist":
            return Output(root.resolve(), {})
        directory = self._fetched(name, path).root
        check_same_shapes(name, HFCheckpoint(directory).config, self.student)
        return self._converted(name, directory)

    def _fetched(self, name: str, source: str | MakeConfig) -> Output:
        from miles_like.pipeline.make_checkpoint import make_checkpoint

        model = teacher_model(name, source)
        config = self.config.model_copy(update={"model": model})
        return self._staged(
            "fetch",  # as for the student: a checkpoint that both use is made once
            source_inputs(model),
            f"teacher {name}: {describe(model)}",
            lambda out: fetch(model, out, lambda data: make_checkpoint(config, data, self.console, self.nodes)),
            visible_files,
        )

    def _converted(self, name: str, directory: Path) -> Output:
        from megatron_bridge.convert.to_megatron import to_megatron  # imports torch's checkpoints, which is slow

        c: ConvertConfig = self.config.convert

        def run(out: Path) -> Path:
            data = out / "data"
            to_megatron(directory.resolve(), data, memory_limit=int(c.memory_limit_gib * (1 << 30)), workers=c.workers)
            return data

        files = {p.name: [p.stat().st_size, p.stat().st_mtime_ns] for p in sorted(directory.glob("*"))}
        inputs = {"directory": str(directory.resolve()), "files": files}
        return self._staged("teacher", inputs, f"teacher {name}: Hugging Face tensors -> Megatron shards", run)

    def _staged(
        self,
        stage: str,
        inputs: Mapping[str, Any],
        what: str,
        run: Callable[[Path], Path],
        listed: Callable[[Path], list[Path]] = files_under,
    ) -> Output:
        key = input_key(stage, inputs)
        directory = cache_of(self.config, self.run_dir) / f"{stage}-{key}"
        one = Stage(
            name=stage, what=what, key=key, directory=directory, size=None, run=lambda out, _: run(out), listed=listed
        )
        return run_stages([one], [stage], self.console, fresh=False)[stage]


def run_teachers(rollout: RolloutSide, console: Console, nodes: Callable[[], RunNodes]) -> RunTeachers:
    """The teachers of a run. nodes: of the run."""
    plan = rollout.plan
    return RunTeachers(
        plan.config,
        plan.run_dir,
        student=plan.hf.config,
        tokenizer=plan.tokenizer,
        console=console,
        key=rollout.key,
        nodes=nodes,
    )


def check_same_shapes(name: str, teacher: Mapping[str, Any], student: Mapping[str, Any]) -> None:
    """Raises ValueError naming the first tensor that a teacher's config.json has and the student's has not, or in
    another shape."""
    a, b = ({p.hf_name: p.shape for p in family_of(hf).bind(hf).places()} for hf in (teacher, student))
    for tensor in [*a, *b]:
        if a.get(tensor) != b.get(tensor):
            raise ValueError(
                f"teacher {name!r} has a different architecture from the student: {tensor} is "
                f"{_shape(a.get(tensor))} there and {_shape(b.get(tensor))} here, but its weights are swapped "
                "with the student's: set kind = 'server', which serves any architecture"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))
