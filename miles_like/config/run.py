"""One run's whole configuration: the sections, and the checks that span sections. Torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from megatron_bridge.config import (
    KernelsConfig,
    LoraConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    ReplayConfig,
)
from miles_like.config.sections.algorithm import AlgorithmConfig
from miles_like.config.sections.alignment import AlignmentConfig, check_sides, with_deterministic_servers
from miles_like.config.sections.cluster import ClusterConfig, PoolName, server_places
from miles_like.config.sections.convert import ConvertConfig
from miles_like.config.sections.correction import CorrectionConfig
from miles_like.config.sections.distillation import DistillationConfig, LaunchedServer
from miles_like.config.sections.embedded import check_device
from miles_like.config.sections.eval import EvalConfig, EvalSet, SetConfig, check_measured
from miles_like.config.sections.loop import BufferConfig, CheckpointConfig, CriticConfig
from miles_like.config.sections.make import MakeConfig
from miles_like.config.sections.reward import RewardConfig
from miles_like.config.sections.supervised import PAIRS, SupervisedConfig, check_keys, check_unused, without_replay
from miles_like.config.sections.vllm import check_vllm
from miles_like.config.sections.watched.alerts import AlertsConfig
from miles_like.config.sections.watched.mismatch import MismatchConfig
from miles_like.config.sections.watched.report import ReportConfig
from miles_like.config.sections.watched.tracing import TraceConfig
from miles_like.config.sections.watched.trackers import TrackersConfig
from miles_like.sandbox.config import SandboxConfig
from miles_like.section import Section
from rollout.config import PublishConfig, RolloutConfig
from rollout.prompts.config import DataConfig


class ModelConfig(Section):
    path: str  # hub name, local directory, or, with `make`, a name for the model that is made
    revision: str | None = None  # branch, tag or commit of the hub repository; a commit hash pins it
    config: str | None = None  # path of a config.json, to plan a run before the model is fetched
    first_layers: int | None = Field(None, ge=1)  # load only the first N layers, for a rehearsal; None: all
    make: MakeConfig | None = None

    @model_validator(mode="after")
    def one_model_is_named(self) -> ModelConfig:
        """With `make`, keys of a model that is loaded would be ignored."""
        is_loaded = "/" in self.path or Path(self.path).is_dir()
        loads: dict[str, object] = {"path": self.path if is_loaded else None, "revision": self.revision}
        loads |= {"config": self.config, "first_layers": self.first_layers}
        for key, value in loads.items():
            if self.make is not None and value is not None:
                raise ValueError(
                    f"model.{key} = {value!r} applies to a loaded model, but [model.make] makes one from "
                    f"{self.make.config}: remove [model.make] (model.make = false drops an inherited one), or "
                    + (
                        "set model.path to a name that is not a directory and has no '/'"
                        if key == "path"
                        else f"remove model.{key}"
                    )
                )
        return self


class TrainLoopConfig(RecomputeConfig):
    steps: int = Field(100, ge=0)  # rollouts to train on; weights are published after each
    groups_per_step: int = Field(64, ge=1)  # prompts of one rollout, each with samples_per_group responses
    steps_per_rollout: int = Field(1, ge=1)  # optimizer steps per rollout, each on an equal share of its groups
    samples_per_group: int = Field(8, ge=1)  # responses sampled for each prompt
    max_tokens_per_rank: int = Field(8192, ge=1)  # largest number of packed tokens in a micro-batch, per rank
    # step of the routers' selection bias towards even load; 0: the bias stays as it is
    router_bias_update_rate: float = Field(0.0, ge=0)
    router_aux_loss: float = Field(0.0, ge=0)  # coefficient of the load-balancing loss over a micro-batch
    balance: Literal["tokens", "flops"] = "tokens"  # quantity that is balanced over DP shards and micro-batches
    on_nonfinite: Literal["stop", "skip"] = "stop"  # what to do if the loss or gradient norm is not finite
    # every this many steps the trainer scores the tokens before it trains on them, for rollouts/step_N.jsonl; 0: never
    token_logprobs_every: int = Field(0, ge=0)
    mtp_coefficient: float = Field(0.0, ge=0)  # factor of the multi-token prediction loss; 0: not trained

    @model_validator(mode="after")
    def mini_batches_are_equal(self) -> TrainLoopConfig:
        if self.groups_per_step % self.steps_per_rollout:
            raise ValueError(
                f"train.steps_per_rollout = {self.steps_per_rollout} does not divide train.groups_per_step = "
                f"{self.groups_per_step}: a mini-batch has whole groups; change one of them"
            )
        return self

    @property
    def optimizer_steps(self) -> int:
        """Of the whole run."""
        return self.steps * self.steps_per_rollout


class RunConfig(Section):
    """The resolved configuration of one run."""

    seed: int = 0  # seed of prompt order, sampling and random initial weights
    cache_dir: str | None = None  # directory of stage outputs; None: `cache` beside the run directory
    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    replay: ReplayConfig = ReplayConfig()
    kernels: KernelsConfig = KernelsConfig()
    lora: LoraConfig = LoraConfig()
    train: TrainLoopConfig = TrainLoopConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    correction: CorrectionConfig = CorrectionConfig()
    critic: CriticConfig = CriticConfig()
    distillation: DistillationConfig = DistillationConfig()
    supervised: SupervisedConfig = SupervisedConfig()
    mismatch: MismatchConfig = MismatchConfig()
    reward: RewardConfig = RewardConfig()
    sandbox: SandboxConfig = SandboxConfig()
    buffer: BufferConfig = BufferConfig()
    rollout: RolloutConfig = RolloutConfig()
    publish: PublishConfig = PublishConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    alerts: AlertsConfig = AlertsConfig()
    report: ReportConfig = ReportConfig()
    convert: ConvertConfig = ConvertConfig()
    alignment: AlignmentConfig = AlignmentConfig()
    cluster: ClusterConfig = ClusterConfig()
    trackers: TrackersConfig = TrackersConfig()
    trace: TraceConfig = TraceConfig()

    @property
    def max_pack_tokens(self) -> int:
        """Tokens of a whole micro-batch, which is split over the context-parallel ranks."""
        return self.train.max_tokens_per_rank * self.parallel.cp

    @property
    def eval_sets(self) -> tuple[EvalSet, ...]:
        """All evaluation sets, data.eval's first."""
        return self.eval.all_sets(self.data.eval)

    @model_validator(mode="after")
    def something_says_what_is_learnt(self) -> RunConfig:
        if self.reward.name == "none" and not (self.distillation.teaching or self.rollout.has_episode_runner):
            raise ValueError(
                "reward.name = 'none' is 0 for every response, so there is nothing to learn from: choose another "
                "reward, or set distillation.mode, rollout.environment or rollout.generate"
            )
        return self

    @model_validator(mode="after")
    def eval_sets_make_sense(self) -> RunConfig:
        sets, played = self.eval_sets, self.rollout.has_episode_runner
        self.sandbox.check_run(runs_programs=self.reward.runs_programs)
        check_measured(sets, self.reward.name, played=played)
        self.data.check_run(has_eval_set=bool(sets), has_reward=played or self.reward.name != "none")
        return self

    @property
    def servers(self) -> RolloutConfig | None:
        """None: supervised training, without a rollout."""
        return None if self.algorithm.supervised else self.rollout

    @model_validator(mode="after")
    def a_run_without_rollout_has_no_keys_of_one(self) -> RunConfig:
        name, pairs = self.algorithm.name, self.algorithm.name in PAIRS
        check_keys(name, self.supervised, self.train.groups_per_step)
        if self.servers is not None:
            return self
        if self.data.train is None:
            raise ValueError(f"[data.sources] has no effect with algorithm.name = {name!r}: set data.train instead")
        data = {"train", "eval", "prompt_key", "template", "instruction", "max_prompt_tokens"}
        train = set(TrainLoopConfig.model_fields) - {"samples_per_group", "steps_per_rollout"}
        sections: dict[str, tuple[BaseModel, BaseModel, set[str]]] = {
            "replay": (self.replay, ReplayConfig(mode="off"), set()),
            "train": (self.train, TrainLoopConfig(), train - {"mtp_coefficient"} if name != "sft" else train),
            "data": (self.data, DataConfig(train=self.data.train), data if pairs else data | {"answer_key"}),
            "eval": (self.eval, EvalConfig(), {"every", "max_prompts", "sets"}),
            "cluster": (self.cluster, self.cluster.without_turns, set()),
        }
        for n, one in self.eval.sets.items():
            sections[f"eval.sets.{n}"] = (one, SetConfig(path=one.path), {"path", "max_prompts"})
        unused = (
            "correction",
            "distillation",
            "mismatch",
            "reward",
            "sandbox",
            "buffer",
            "rollout",
            "publish",
            "alignment",
            "alerts",
        )
        check_unused(name, sections | {s: (getattr(self, s), type(getattr(self, s))(), set()) for s in unused})
        return self

    @model_validator(mode="after")
    def ranks_fit_the_cluster(self) -> RunConfig:
        c = self.cluster
        self.trace.check_ranks(self.parallel.world_size)
        has: dict[PoolName, tuple[bool, str]] = {
            "rollout": (self.servers is not None, "samples nothing"),
            "critic": (self.algorithm.has_critic, "has no critic"),
            "reference": (
                self.servers is not None and self.algorithm.keeps_reference,
                "scores no sampled response under a reference",
            ),
            "teachers": (self.servers is not None and self.distillation.servers > 0, "starts no teacher server"),
        }
        for name, (there, why) in has.items():
            if c.pools.of(name) is not None and not there:
                raise ValueError(
                    f"[cluster.pools.{name}] has no effect, because this run (algorithm.name = "
                    f"{self.algorithm.name!r}) {why}: remove it"
                )
        pools = c.pools_of(self.parallel.world_size)
        if self.servers is None:
            return self
        if c.pools.reference is not None and (every := self.algorithm.parts.reference_every):
            raise ValueError(
                "[cluster.pools.reference] holds the initial weights on separate ranks, but "
                f"algorithm.reference_every = {every} replaces them with trained ones: remove one of the two"
            )
        check_device(self.rollout, self.precision, self.alignment, gpus_per_node=c.gpus_per_node)
        width, free = self.rollout.gpus_per_server, len(pools["rollout"].places)
        if c.gpus_per_node and self.rollout.on_gpus and (needed := self.rollout.servers * width) > free:
            raise ValueError(
                f"rollout needs {self.rollout.servers} servers x {width} GPUs = {needed}, but only {free} "
                "are available to it: lower rollout.servers or raise cluster.nodes"
            )
        return self

    @property
    def teacher_rollouts(self) -> tuple[RolloutConfig, ...]:
        """The settings of the servers that the run starts for teachers, by their numbers."""
        return tuple(
            t.rollout_of(self.rollout, gpus=self._teachers_have_gpus) for t in self.distillation.started.values()
        )

    @property
    def _teachers_have_gpus(self) -> bool:
        return self.cluster.gpus_per_node > 0 and self.cluster.pools.teachers is not None

    def _startable(self, teacher: LaunchedServer) -> bool:
        """Whether the run has CPUs or GPUs for its server."""
        if teacher.engine is None:
            return self.rollout.engine == "embedded" or self._teachers_have_gpus
        return teacher.engine == "embedded" or not self.cluster.gpus_per_node or self._teachers_have_gpus

    @model_validator(mode="after")
    def servers_of_teachers_share_no_gpu(self) -> RunConfig:
        """They keep their memory."""
        c, world, width = self.cluster, self.parallel.world_size, self.rollout.gpus_per_server
        if self.servers is None or (pool := c.pools.teachers) is None:
            return self
        widths = [one.sglang.tp_size for one in self.teacher_rollouts if one.engine == "sglang"]
        if not (c.gpus_per_node and widths):
            if pool.gpus is not None:
                raise ValueError(
                    f"cluster.pools.teachers.gpus = {pool.gpus!r} has no effect, because with rollout.engine = "
                    "'embedded' the servers of teachers run on CPU: remove it"
                )
            return self
        pools = c.pools_of(world)
        mine = {place for places in server_places(pools["teachers"], widths) for place in places}
        used = {name: pools[name].places[:world] for name in self._trained}
        used |= {"rollout": pools["rollout"].places[: self.rollout.servers * width]}
        used |= {} if c.pools.reference is None else {"reference": pools["reference"].places[:world]}
        for name, places in used.items():
            if shared := sorted(mine & set(places)):
                raise ValueError(
                    f"cluster.pools.teachers and the {name} share node {shared[0][0]} GPU {shared[0][1]}, but the "
                    "servers of teachers keep their memory: assign them different GPUs"
                )
        return self

    @property
    def takes_turns(self) -> bool:
        """Whether servers and trainer ranks take turns, releasing memory to each other: where a server has a GPU of a
        trainer or critic rank. Others share no device, and lose their concurrency: only if cluster.colocate = true."""
        c, world = self.cluster, self.parallel.world_size
        if self.servers is None or c.colocate is False:
            return False
        if not c.gpus_per_node or not self.rollout.on_gpus:
            return bool(c.colocate)
        pools = c.pools_of(world)
        trained = {place for name in self._trained for place in pools[name].places[:world]}
        return not trained.isdisjoint(pools["rollout"].places[: self.rollout.servers * self.rollout.gpus_per_server])

    @property
    def _trained(self) -> tuple[PoolName, ...]:
        return ("trainer", "critic") if self.algorithm.has_critic else ("trainer",)

    @model_validator(mode="after")
    def what_takes_turns_can_release_its_memory(self) -> RunConfig:
        if self.takes_turns and self.rollout.engine == "sglang" and self.rollout.sglang.enable_memory_saver is False:
            raise ValueError(
                "rollout.sglang.enable_memory_saver = false, but the servers must release their memory while the "
                "trainer computes (cluster.colocate), which requires the memory saver: remove that key, or set "
                "cluster.colocate = false"
            )
        graphs = self.rollout.env.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1")
        if self.takes_turns and graphs.lower() in ("0", "false"):
            raise ValueError(
                f"rollout.env.SGLANG_MEMORY_SAVER_CUDA_GRAPH = {graphs!r}, but the servers must release their CUDA "
                "graphs while the trainer computes (cluster.colocate): remove it, or set cluster.colocate = false"
            )
        return self

    @model_validator(mode="after")
    def vllm_has_what_the_run_needs(self) -> RunConfig:
        if self.servers is not None and self.rollout.engine == "vllm":
            gpus = len(self.cluster.pools_of(self.parallel.world_size)["rollout"].gpus)
            check_vllm(self.rollout, self.publish, self.replay, takes_turns=self.takes_turns, gpus_per_node=gpus)
        return self

    @model_validator(mode="after")
    def publications_have_a_receiver(self) -> RunConfig:
        if self.servers is not None:
            own, turns, gpus = self.rollout, self.takes_turns, self.cluster.gpus_per_node > 0
            self.publish.check(engine=own.engine, ranks=own.embedded.tp_size, takes_turns=turns, gpus=gpus)
            nccl = gpus and own.engine == "sglang"
            self.publish.check_during_training(turns, self.buffer.slack, self.distillation.policy_teachers, nccl)
        return self

    @model_validator(mode="after")
    def samples_fit_a_pack(self) -> RunConfig:
        """The longest sample has data.max_prompt_tokens and the longest answer; both limits are enforced. Supervised
        examples are checked against the size of a pack when they are read."""
        if self.servers is None:
            return self
        prompt, new = self.data.max_prompt_tokens, self.rollout.longest_answer
        key = "max_episode_tokens" if self.rollout.max_episode_tokens else "max_new_tokens"
        longest = prompt + new - 1  # a sample's last token is a label only
        if longest > self.max_pack_tokens:
            raise ValueError(
                f"data.max_prompt_tokens = {prompt} and rollout.{key} = {new} allow samples of {longest} input "
                f"tokens, but a micro-batch holds only {self.max_pack_tokens} (train.max_tokens_per_rank * "
                f"parallel.cp): raise train.max_tokens_per_rank, or lower rollout.{key} or data.max_prompt_tokens"
            )
        held = self.rollout.embedded.context_length
        if self.rollout.max_episode_tokens and self.rollout.engine == "embedded" and prompt + new > held:
            raise ValueError(
                f"data.max_prompt_tokens = {prompt} and rollout.max_episode_tokens = {new} allow {prompt + new} "
                f"tokens, but rollout.embedded.context_length = {held}: raise it, or lower one of them"
            )
        return self

    @model_validator(mode="after")
    def buffer_makes_sense(self) -> RunConfig:
        self.buffer.check(deterministic=self.alignment.deterministic)
        return self

    @model_validator(mode="after")
    def the_best_can_be_found(self) -> RunConfig:
        self.checkpoint.check(sets=[s.name for s in self.eval_sets], eval_every=self.eval.every)
        evaluates = bool(self.eval_sets and self.eval.every)
        self.alerts.check(keep_best=self.checkpoint.keep_best, evaluates=evaluates)
        return self

    @property
    def in_lockstep(self) -> bool:
        return self.buffer.in_lockstep(deterministic=self.alignment.deterministic)

    @property
    def in_flight_at_publication(self) -> bool:
        """Whether samples are in flight at a publication, so that their tokens have several weight versions."""
        return self.buffer.overlaps(deterministic=self.alignment.deterministic)

    @property
    def groups_end_by_themselves(self) -> bool:
        """Whether groups are used as they end, and not only with the others of their round."""
        return self.in_flight_at_publication or (bool(self.buffer.over_sampling) and not self.in_lockstep)

    @property
    def routes_belong_to_their_log_probs(self) -> bool:
        """Whether routes and log-probs have the same weight version: the embedded engine keeps a retracted request's
        routes, a stock server recomputes them."""
        retracts = self.in_flight_at_publication and self.publish.pause_mode == "retract"
        return self.rollout.engine == "embedded" or not retracts

    @model_validator(mode="after")
    def what_is_replayed_belongs_to_its_log_probs(self) -> RunConfig:
        if self.replay.mode == "r3" and not self.routes_belong_to_their_log_probs:
            raise ValueError(
                f"buffer.max_staleness = {self.buffer.max_staleness} and publish.pause_mode = 'retract': a stock "
                "server recomputes the routes of retracted requests under the new weights, which do not belong to the "
                "old log-probs: set publish.pause_mode = 'in_place' or 'abort', or buffer.max_staleness = 0 (or "
                "replay.mode = 'off')"
            )
        return self

    @model_validator(mode="after")
    def replayed_routes_are_there_to_be_bounded(self) -> RunConfig:
        given = {k: v for k in ("expert_agreement_min", "layer_agreement_min") if (v := getattr(self.mismatch, k))}
        if given and self.replay.mode != "r3":
            key, value = next(iter(given.items()))
            raise ValueError(
                f"mismatch.{key} = {value:g} has no effect with replay.mode = {self.replay.mode!r}, which does "
                "not replay the rollout's routes: remove it, or set replay.mode = 'r3'"
            )
        return self

    @model_validator(mode="after")
    def gates_are_returned_where_they_are_replayed(self) -> RunConfig:
        wanted = self.replay.gates and self.replay.mode == "r3"
        if wanted and self.rollout.engine == "sglang":
            raise ValueError(
                "replay.gates = true with replay.mode = 'r3', but a stock SGLang server returns no gate weights: set "
                "rollout.engine = 'embedded', replay.mode = 'r2' or replay.gates = false"
            )
        if wanted != self.rollout.embedded.return_gates:
            use = "requires" if wanted else "does not use"
            raise ValueError(
                f"replay.mode = {self.replay.mode!r} with replay.gates = {str(self.replay.gates).lower()} {use} the "
                f"gates of rollout.embedded.return_gates: set it to {str(wanted).lower()}"
            )
        return self

    @model_validator(mode="after")
    def teachers_and_student_are_comparable(self) -> RunConfig:
        if self.distillation.teaching is not None:
            self.distillation.teaching.check_run(
                temperature=self.rollout.temperature,
                algorithm=self.algorithm.parts,
                corrected=self.correction.weights is not None,
                startable=self._startable,
            )
        return self

    @model_validator(mode="after")
    def algorithm_fits_the_run(self) -> RunConfig:
        if not self.algorithm.supervised:
            self.algorithm.parts.check_run(
                longest_answer=self.rollout.longest_answer,
                group=None if self.distillation.mode == "alone" else self.train.samples_per_group,
                taught=self.distillation.reference,
                correction=self.correction.kind,
                on_breach=self.mismatch.on_breach,
            )
        return self

    @model_validator(mode="after")
    def there_is_a_critic_to_configure(self) -> RunConfig:
        if self.critic.lr is not None and not self.algorithm.has_critic:
            raise ValueError(
                f"critic.lr = {self.critic.lr} needs algorithm.advantage = 'ppo': remove critic.lr, or set that"
            )
        if self.critic.lr is not None and self.critic.lr < self.optimizer.min_lr:
            raise ValueError(
                f"critic.lr = {self.critic.lr} is below optimizer.min_lr = {self.optimizer.min_lr}, which is also "
                "where the critic's schedule starts and ends: raise it, or lower optimizer.min_lr"
            )
        return self

    @model_validator(mode="after")
    def schedule_fits_the_run(self) -> RunConfig:
        self.optimizer.over(self.train.optimizer_steps)
        return self

    @property
    def bit_exact(self) -> bool:
        """Whether trainer and rollout compute the same bits; otherwise each only repeats its own."""
        on_cpus = self.rollout.engine == "embedded" and not self.cluster.gpus_per_node
        return self.alignment.deterministic and on_cpus

    @property
    def one_side_rounds(self) -> bool:
        """Whether one side rounds more than weights: FP8 products in the trainer, or a quantized KV cache."""
        cache = self.rollout.sglang.kv_cache_dtype if self.rollout.engine == "sglang" else "auto"
        return self.kernels.fp8 != "none" or cache not in ("auto", "bf16", "bfloat16")

    @property
    def exact_steps(self) -> bool:
        """Whether, in addition to `bit_exact`, every step's samples are of the current weights."""
        return self.bit_exact and not self.buffer.slack

    @property
    def tp_shards(self) -> tuple[int, int] | None:
        """Tensor- and expert-tensor-parallel sizes whose sums the embedded engine reproduces; None: not exact."""
        embedded = self.rollout.engine == "embedded"
        return (self.parallel.tp, self.parallel.etp) if self.alignment.deterministic and embedded else None

    @model_validator(mode="before")
    @classmethod
    def servers_are_deterministic_too(cls, given: Any) -> Any:
        return without_replay(with_deterministic_servers(given)) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def both_sides_can_be_deterministic(self) -> RunConfig:
        if self.alignment.deterministic:
            check_sides(self.rollout, self.precision, self.cluster.gpus_per_node)
        return self
