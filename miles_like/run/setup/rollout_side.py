"""The rollout side of a run: launch settings of its servers, their clients, sampling parameters, and publishers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from miles_like.cluster.environment import driver_secrets, plain_values
from miles_like.cluster.factories import PublisherRecipe
from miles_like.cluster.placement import Slot
from miles_like.config.run import ModelConfig, RunConfig
from miles_like.config.sections.make import MakeConfig
from miles_like.report.traces.writer import parts_of
from miles_like.run.setup.model_plan import ModelPlan
from miles_like.sandbox.make import use_sandbox
from miles_like.turns.order import Turns
from miles_like.turns.users import TurnClient
from miles_like.types import SamplingParams
from rollout.episodes.resuming import RESUMES
from rollout.episodes.runner import EpisodeRunner, make_episode_runner
from rollout.publish.directory.disk_publisher import SharedDirectory
from rollout.publish.publication import PublishTarget
from rollout.seeds import seed_of
from rollout.server_key import ServerKey
from rollout.server_url import on_loopback
from rollout.sglang.client import ServerClient, SGLangClient
from rollout.sglang.occupation import Occupation
from rollout.sglang.servers import ServerLaunch
from rollout.vllm.client import VLLMClient
from rollout.wire.control import PauseMode

# SGLang 0.5.23 keeps the memory of CUDA graphs where it can be released only with this variable (srt/environ.py)
GRAPHS_IN_SAVER = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"


def server_launch(config: RunConfig, served: Path, logs: Path, slot: Slot, *, routes: bool) -> ServerLaunch:
    """The launch settings of the server in `slot` with the model in `served`, for a dry run and for a run. routes: the
    server returns the expert routes of its tokens."""
    first_port, rollout = config.rollout.port, config.rollout
    if config.takes_turns:
        flags = rollout.sglang.model_copy(update={"enable_memory_saver": True})
        rollout = rollout.model_copy(update={"sglang": flags})
    return ServerLaunch(
        model_path=served,
        config=rollout,
        port=None if first_port is None else first_port + slot.index,
        log_dir=logs,
        activations=config.precision.activations,
        exact=config.tp_shards,
        bucket_bytes=config.publish.bucket_bytes,
        node_rank=slot.node_rank,
        nnodes=slot.nnodes,
        return_routed_experts=routes,
        env=plain_values(server_variables(config)),
    )


def teacher_model(name: str, source: str | MakeConfig) -> ModelConfig:
    """The model of a teacher for which the run starts a server: its path, or how it is made."""
    if isinstance(source, str):
        return ModelConfig(path=source)
    return ModelConfig(path=name.replace("/", "-"), make=source)


def teacher_launch(config: RunConfig, served: Path, logs: Path, slot: Slot) -> ServerLaunch:
    """The launch settings of a teacher's server in `slot` with the model in `served`. It scores and never releases its
    memory."""
    return ServerLaunch(
        model_path=served,
        config=config.teacher_rollouts[slot.index],
        log_dir=logs,
        node_rank=slot.node_rank,
        nnodes=slot.nnodes,
        return_routed_experts=False,
        title="server of teacher",
        env=plain_values(config.rollout.env),
    )


def server_variables(config: RunConfig) -> Mapping[str, str]:
    """The variables of the rollout servers: `rollout.env`, and what turns need."""
    stock = config.takes_turns and config.rollout.engine == "sglang"
    return ({GRAPHS_IN_SAVER: "1"} if stock else {}) | config.rollout.env


@dataclass(frozen=True, kw_only=True)
class RolloutSide:
    """Makes the objects of a run's rollout side. key: the key of every server that the run starts. layer_states: the
    servers give the residual stream at every layer, a stock one by files in this directory."""

    plan: ModelPlan
    key: ServerKey = field(default_factory=ServerKey.new)
    occupations: dict[str, Occupation] = field(default_factory=dict)  # URL -> memory of a server, for all its clients
    layer_states: Path | None = None

    @property
    def resumes(self) -> int:
        """How often a sample may be resumed: once per publication before it is trained, and RESUMES further times."""
        return self.plan.config.buffer.slack + RESUMES

    def episode_runner(self) -> EpisodeRunner:
        """The configured episode runner. Raises ValueError for a user's function that cannot be loaded or called."""
        c = self.plan.config
        use_sandbox(c.sandbox)
        timed = not c.alignment.deterministic  # so that files of equal runs have equal bytes
        return make_episode_runner(c.rollout, self.plan.tokenizer, resumes=self.resumes, timed=timed)

    def launch(self, slot: Slot, version: int, *, routing: bool = True) -> ServerLaunch:
        """The launch settings of the server in `slot`, whose weights are numbered `version`."""
        plan, routes = self.plan, routing and self.plan.model.routing is not None
        launch = server_launch(plan.config, plan.served.resolve(), plan.logs.resolve(), slot, routes=routes)
        return replace(
            launch,
            weight_version=version,
            key=self.key,
            secrets=driver_secrets(plan.config.rollout.env),
            layer_states=self.layer_states,
            traces=parts_of(plan.run_dir) if plan.config.trace.on else None,
        )

    def client(
        self,
        url: str,
        *,
        routing: bool = True,
        ours: bool = True,
        key: ServerKey | None = None,
        turns: Turns | None = None,
    ) -> ServerClient:
        """A client of the server at `url`. ours: this run started the server, so its log and key are those of this run;
        otherwise `key` is the server's key. turns: the client enters the servers' turn for its requests; None: its
        caller does, or no turns are taken."""
        plan, c = self.plan, self.plan.config
        if c.rollout.engine != "vllm":
            return self.sglang_client(url, routing=routing, ours=ours, key=key, turns=turns)
        return VLLMClient(
            url,
            vocabulary=int(plan.hf.config["vocab_size"]),
            routing=plan.model.routing if routing else None,
            request_timeout_s=c.rollout.request_timeout_s,
            pause_mode=PauseMode(c.publish.pause_mode),
            decode=lambda ids: str(plan.tokenizer.decode(ids, skip_special_tokens=True)),
            log=plan.logs if ours else None,
        )

    def sglang_client(
        self,
        url: str,
        *,
        routing: bool = True,
        ours: bool = True,
        key: ServerKey | None = None,
        turns: Turns | None = None,
    ) -> SGLangClient:
        """`client` of a stock SGLang server or an embedded one."""
        plan, c = self.plan, self.plan.config
        tokenizer = plan.tokenizer
        kind = SGLangClient if turns is None else partial(TurnClient, turns=turns)
        return kind(
            url,
            vocabulary=int(plan.hf.config["vocab_size"]),
            routing=plan.model.routing if routing else None,
            prompts_per_request=c.rollout.prompts_per_request,
            request_timeout_s=c.rollout.request_timeout_s,
            pause_mode=PauseMode(c.publish.pause_mode),
            samples_from="server" if c.rollout.engine == "embedded" else "client",
            decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
            log=plan.logs if ours else None,
            key=self.key if ours else key,
            occupation=self.occupations.setdefault(url, Occupation(url)),
        )

    def publisher(
        self,
        urls: Sequence[str],
        *,
        ours: bool = True,
        key: ServerKey | None = None,
        goes_on: bool = False,
        joins: bool = False,
        loads: bool = True,
    ) -> PublisherRecipe:
        """The factory of the publishers to the servers at `urls`. loads: as in `DiskPublisher`; the other arguments are
        those of `target`."""
        target = self.target(urls, ours=ours, key=key, goes_on=goes_on, joins=joins)
        plan = self.plan
        shared = SharedDirectory(path=self.published, hf_config=plan.hf.config, copy_from=plan.served.resolve())
        return PublisherRecipe(target, shared, loads=loads)

    @property
    def published(self) -> Path:
        """The directory of published weights, with paths "disk" and "delta"."""
        return (self.plan.run_dir / "published").resolve()

    def target(
        self,
        urls: Sequence[str],
        *,
        ours: bool = True,
        key: ServerKey | None = None,
        goes_on: bool = False,
        joins: bool = False,
    ) -> PublishTarget:
        """Publications to the servers at `urls`. ours, key: as in `client`. goes_on, joins: as in `PublishTarget`."""
        plan, c = self.plan, self.plan.config
        handles = _handles(plan, urls) if ours else None
        stock_gpus = c.rollout.engine == "sglang" and c.cluster.gpus_per_node > 0
        return PublishTarget(
            urls=tuple(urls),
            kind=c.rollout.engine,
            spec=plan.model.spec,
            config=c.publish,
            fused=plan.model.family.bind(plan.hf.config, mtp=True).fused(),
            tp_size=c.rollout.sglang.tp_size,
            handles=handles,
            backend="nccl" if stock_gpus else "gloo",
            timeout_s=c.rollout.request_timeout_s,
            key=self.key if ours else key,
            goes_on=goes_on,
            joins=joins,
            fence=plan.fence if ours else None,
        )

    def sampling(self, round_index: int) -> SamplingParams:
        """Sampling parameters of one round of prompts. The seed differs between rounds, so a prompt that is sampled
        again in a later round has another seed."""
        c = self.plan.config
        return SamplingParams(
            max_new_tokens=c.rollout.max_new_tokens,
            temperature=c.rollout.temperature,
            top_p=c.rollout.top_p,
            top_k=c.rollout.top_k,
            stop_token_ids=(_end_of(self.plan),),
            sampling_seed=seed_of(c.seed, f"step {round_index}"),
        )


def _handles(plan: ModelPlan, urls: Sequence[str]) -> Literal["memory", "cuda"] | None:
    """Of which memory the servers of the run open handles, by their places.

    Memory of the sender's GPU only where each server sees that GPU; shared memory where all are on its node. The
    embedded engine takes handles on loopback only.
    """
    sender, slots = plan.placement.of("trainer")[0], plan.placement.of("rollout")
    if any(slot.node != sender.node for slot in slots):
        return None
    if plan.config.rollout.engine == "embedded":
        return "memory" if all(map(on_loopback, urls)) else None
    return "cuda" if sender.gpus and all(set(sender.gpus) <= set(slot.gpus) for slot in slots) else "memory"


def _end_of(plan: ModelPlan) -> int:
    end = plan.tokenizer.eos_token_id
    if end is None:
        raise ValueError(f"the tokenizer of {plan.served} has no end-of-sequence token: set eos_token in its config")
    return int(end)
