"""One training run, wired: servers, trainer ranks, prompts, reward and sinks around the loop, then the report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_bridge.families.base import Family
from megatron_bridge.families.registry import family_of
from megatron_bridge.flops import forward_flops, train_flops
from megatron_bridge.layout import check_layout
from megatron_bridge.precision import served_spec
from megatron_bridge.resolve import resolve
from miles_like import run_state
from miles_like.algorithms.advantages import shuffle_over_batch
from miles_like.algorithms.registry import make_algorithm, make_bounds
from miles_like.buffer import DataBuffer
from miles_like.config import RunConfig, trainer_config
from miles_like.config_io import dump_config
from miles_like.controller import Controller, settle
from miles_like.engine_fit import check_engine
from miles_like.evaluation import evaluate
from miles_like.factories import MegatronFactory, PublisherRecipe, ServerRecipe
from miles_like.hf_checkpoint import HFCheckpoint
from miles_like.metrics import rollout_metrics, speed_metrics, write_rollouts
from miles_like.packing import pack, pack_steps
from miles_like.placement import plan_placement
from miles_like.progress import PhaseBar
from miles_like.report import write_report
from miles_like.rewards import load_reward
from miles_like.run_state import RunState
from miles_like.same_bits import check_same_bits
from miles_like.sinks import ConsoleSink, JsonlSink, MultiSink, TensorboardSink
from miles_like.tokenizer import load_tokenizer
from miles_like.types import Prompt, SampleGroup, SamplingParams, TrainBatch
from miles_like.verify.allowance import allowance, of_steps
from miles_like.verify.gate import admit, judge
from miles_like.verify_live import Comparison, LiveTrainer
from miles_like.workers import RayServers, RayTrainer, check_nodes
from quant.hf_config import spec_from_hf
from quant.spec import QuantSpec
from rollout.client import SGLangClient, seed_of
from rollout.episode import RESUMES, run_groups
from rollout.pool import EnginePool
from rollout.prompts import Cursor, PromptSource
from rollout.samples import RoutingShape
from rollout.wire_control import PauseMode


class TrainStage:
    """Everything that one training run is made of, started, wired and stopped."""

    def __init__(self, config: RunConfig, run_dir: Path, served: Path, weights: Path, console: Console) -> None:
        self.config = config
        self.run_dir = run_dir
        self.served = served
        self.weights = weights
        self.console = console
        self.checkpoints = run_dir / "checkpoints"
        self.hf = HFCheckpoint(served)
        self.family: Family = family_of(self.hf.config)
        check_layout(config.parallel, self.hf.config)
        self.spec = self._spec()
        check_engine(config.rollout, config.precision, self.hf.config)
        self.trainer = trainer_config(config, served)
        cuda = config.cluster.gpus_per_node > 0
        resolve(self.trainer, self.hf.config, cuda=cuda, te=cuda)  # refuses before anything is started
        self.tokenizer = load_tokenizer(served)
        self.algorithm = make_algorithm(config.algorithm, config.correction, config.mismatch)
        self.plan = plan_placement(config.cluster, config.parallel, config.rollout)
        self.tokens_total = 0
        self.saving: RunState | None = None  # of a checkpoint that is not whole yet

    def run(self, resume: bool) -> None:
        (self.run_dir / "config.toml").write_text(dump_config(self.config), encoding="utf-8")
        check_nodes(self.plan)
        source = PromptSource(self.config.data, self.tokenizer, self.config.data.train, seed=self.config.seed)
        held_out = self._held_out()
        began = run_state.load_latest(self.checkpoints) if resume else None
        run_state.clear_unfinished(self.checkpoints)
        started = time.perf_counter()
        servers = self.servers(began[1].weight_version if began else 0)
        try:
            trainer = self.ranks()
            urls = servers.wait()
            self.console.print(
                f"{'':12}{len(self.plan.of('trainer'))} trainer ranks, {len(urls)} rollout servers up "
                f"after {time.perf_counter() - started:.0f} s{self._payload()}"
            )
            asyncio.run(self._loop(trainer, urls, source, held_out, began))
        finally:
            servers.stop()
        write_report(self.run_dir)
        self.console.print(f"{'':12}report: {self.run_dir / 'report.html'}")

    async def _loop(
        self,
        trainer: RayTrainer,
        urls: Sequence[str],
        source: PromptSource,
        held_out: Sequence[Prompt],
        began: tuple[Path, RunState] | None,
    ) -> None:
        config = self.config
        bounds = of_steps(make_bounds(config.mismatch), exact=config.exact_steps)
        clients = [self.client(url) for url in urls]
        await self.check_bits(trainer, clients)
        engine = EnginePool(clients)
        examiner = [self.client(url, routing=False) for url in urls]  # nobody trains on its answers
        trainer.connect(self.publisher(urls))
        first = await self._begin(trainer, source, began)
        await self._verify(trainer, clients, source)
        reward = load_reward(config.reward.name)
        sink = MultiSink(
            [
                JsonlSink(self.run_dir / "metrics.jsonl"),
                TensorboardSink(self.run_dir / "tensorboard"),
                ConsoleSink(steps=config.train.steps, console=self.console),
            ]
        )
        with PhaseBar(config.train.steps, self.console) as (progress, task):
            controller = Controller(
                trainer=trainer,
                algorithm=self.algorithm,
                buffer=DataBuffer(max_staleness=config.buffer.max_staleness),
                next_prompts=lambda: source.take(config.train.groups_per_step),
                rollout=partial(self._rollout, engine, reward),
                pack=partial(self._pack, trainer.dp_size),
                deal=self._deal,
                evaluate=partial(self._evaluate, examiner, reward, held_out),
                describe=self._describe,
                keep=lambda step, groups: write_rollouts(self.run_dir / "rollouts" / f"step_{step}.jsonl", groups),
                save=partial(self._save, trainer),
                finish_save=partial(self._finish_save, trainer),
                phase=lambda step, name: progress.update(task, completed=step, phase=name),
                sink=sink,
                max_staleness=config.buffer.max_staleness,
                eval_every=config.eval.every,
                save_every=config.checkpoint.every,
                speed=self.speed,
                judge=partial(judge, bounds, config.mismatch.on_breach, self.console),
            )
            settle()
            try:
                await controller.run(first=first, steps=config.train.steps)
            finally:
                sink.close()
                await engine.close()
                await EnginePool(examiner).close()
                await trainer.close()

    def comparison(self, trainer: RayTrainer, prompts: Sequence[Prompt]) -> Comparison:
        c, bounds = self.config, make_bounds(self.config.mismatch)
        shape = None if c.replay.gates else self.routing_shape()  # gates of corrected routes are known to nobody
        routed = shape is not None or not self.family.moe_layers(self.hf.config)
        packing = partial(pack, **self._rows(trainer.dp_size), replayed=False)
        return Comparison(
            trainer=LiveTrainer(trainer=trainer, pack=packing, shape=shape),
            replay=c.replay.mode == "r3",
            prompts=prompts,
            params=replace(self.sampling(0), sampling_seed=seed_of(c.seed, "verify")),
            bounds=bounds,
            allowed=allowance(
                bounds, c.precision, engine=c.rollout.engine, exact=c.bit_exact, more=c.one_side_rounds, routed=routed
            ),
        )

    async def _verify(self, trainer: RayTrainer, clients: Sequence[SGLangClient], source: PromptSource) -> None:
        """Raises ValueError where both sides differ by more than the precision explains, naming the cause."""
        if n := self.config.mismatch.check_prompts:
            began = time.perf_counter()
            report = await self.comparison(trainer, source.all()[:n]).short(clients)
            admit(report, self.console, time.perf_counter() - began)

    async def check_bits(self, trainer: RayTrainer, clients: Sequence[SGLangClient]) -> None:
        """Raises ValueError where log-probabilities are to be exact and cannot be."""
        if (parts := self.config.exact_parts) and self.config.bit_exact:
            told = {client.url: await client.server_info() for client in clients}
            check_same_bits(trainer.fingerprint(), told, parts=parts, dtype=self.trainer.params_dtype)

    async def _begin(self, trainer: RayTrainer, source: PromptSource, began: tuple[Path, RunState] | None) -> int:
        """The first step; the servers then hold what the trainer computes with."""
        if began is None:
            if self.config.precision.qat:
                # codes that another quantizer wrote are not those that this one makes of their values
                await trainer.publish(version=0)
            return 0
        folder, state = began
        self.tokens_total = state.tokens_total
        await trainer.load(folder / "trainer")
        await trainer.publish(version=state.step)
        source.restore(Cursor(*divmod(state.prompt_cursor, len(source))))
        return state.step

    # the parts

    def _spec(self) -> QuantSpec | None:
        """How the weights that are served are stored. Raises ValueError when the run's configuration disagrees."""
        spec, want = spec_from_hf(self.hf.config), served_spec(self.config.precision, self.hf.config)
        if spec != want:
            stored = "BF16" if spec is None else spec.format.value
            raise ValueError(
                f"precision.format = {self.config.precision.format.value!r}, but {self.served} holds {stored} weights: "
                "run the stage that makes it again (--stages stage,train)"
            )
        return spec

    def ranks(self) -> RayTrainer:
        """Started, on the weights that the run begins with."""
        factory = MegatronFactory(self.trainer, self.weights, self.algorithm.loss)
        slots, logs = self.plan.of("trainer"), self.run_dir / "logs"
        return RayTrainer(factory, slots, dp_size=self.config.parallel.dp, log_dir=logs)

    def servers(self, version: int, *, routing: bool = True) -> RayServers:
        c = self.config.rollout
        first_port = {s.index: None if c.port is None else c.port + s.index for s in self.plan.of("rollout")}
        launches = [
            (
                slot,
                ServerRecipe(
                    model_path=self.served.resolve(),
                    config=c,
                    port=first_port[slot.index],
                    log_dir=(self.run_dir / "logs").resolve(),
                    weight_version=version,
                    activations=self.config.precision.activations,
                    exact=self.config.exact_parts,
                    node_rank=slot.node_rank,
                    nnodes=slot.nnodes,
                    routed_experts=routing and self.routing_shape() is not None,
                ),
            )
            for slot in self.plan.of("rollout")
        ]
        return RayServers(launches, self.run_dir / "logs")

    def routing_shape(self) -> RoutingShape | None:
        """None for a model without experts, and where the servers would send routes of other weights."""
        hf = self.hf.config
        layers = self.family.moe_layers(hf)
        if not layers or not self.config.routes_belong_to_their_log_probs:
            return None
        return RoutingShape(
            num_layers=self.family.num_layers(hf),
            moe_layers=layers,
            top_k=self.family.top_k(hf),
            num_experts=self.family.num_experts(hf),
            gates=self.config.rollout.embedded.return_gates,
        )

    def _payload(self) -> str:
        return f"; {shape.payload}" if (shape := self.routing_shape()) else ""

    def client(self, url: str, *, routing: bool = True, ours: bool = True) -> SGLangClient:
        """ours: this run started the server and has its log."""
        c = self.config.rollout
        return SGLangClient(
            url,
            routing=self.routing_shape() if routing else None,
            prompts_per_request=c.prompts_per_request,
            request_timeout_s=c.request_timeout_s,
            pause_mode=PauseMode(self.config.publish.pause_mode),
            samples_from="server" if c.engine == "embedded" else "client",
            decode=lambda ids: str(self.tokenizer.decode(ids, skip_special_tokens=True)),
            log=self.run_dir / "logs" if ours else None,
        )

    def publisher(self, urls: Sequence[str]) -> PublisherRecipe:
        c = self.config
        return PublisherRecipe(
            urls=tuple(urls),
            kind=c.rollout.engine,
            spec=self.spec,
            config=c.publish,
            tp_size=c.rollout.sglang.tp_size,
            timeout_s=c.rollout.request_timeout_s,
            directory=(self.run_dir / "published").resolve(),
            hf_config=self.hf.config,
            copy_from=self.served.resolve(),
        )

    def _held_out(self) -> Sequence[Prompt]:
        c = self.config
        if c.data.eval is None:
            return ()
        return PromptSource(c.data, self.tokenizer, c.data.eval).all()[: c.eval.max_prompts]

    @property
    def cost(self) -> Callable[[int], float] | None:
        """What a sample's length weighs when rows are balanced."""
        return (lambda n: forward_flops(self.hf.config, [n])) if self.config.train.balance == "flops" else None

    # what the loop calls

    def speed(self, groups: Sequence[SampleGroup], *, rollout_s: float, train_s: float) -> dict[str, float]:
        tflops, ranks = self.config.cluster.peak_tflops, self.config.parallel.world_size
        depths = self.family.mtp_layers(self.hf.config) if self.config.train.mtp_coefficient else 0
        return speed_metrics(
            groups,
            rollout_s=rollout_s,
            train_s=train_s,
            flops=lambda lengths, labels: train_flops(self.hf.config, lengths, head_rows=labels, mtp_depths=depths),
            peak=tflops and 1e12 * tflops * ranks,
        )

    def sampling(self, step: int) -> SamplingParams:
        c = self.config.rollout
        return SamplingParams(
            max_new_tokens=c.max_new_tokens,
            temperature=c.temperature,
            top_p=c.top_p,
            top_k=c.top_k,
            stop_token_ids=(int(self.tokenizer.eos_token_id),),
            sampling_seed=seed_of(self.config.seed, f"step {step}"),
        )

    async def _rollout(
        self, engine: EnginePool, reward: Any, step: int, prompts: Sequence[Prompt]
    ) -> Sequence[SampleGroup]:
        return await run_groups(
            engine,
            prompts,
            reward,
            n=self.config.train.samples_per_group,
            params=self.sampling(step),
            # so many publications may abort a sample, one after the other, before it is trained
            resumes=self.config.buffer.max_staleness + RESUMES,
        )

    def _rows(self, dp_size: int) -> dict[str, Any]:
        c = self.config
        return {"dp_size": dp_size, "max_tokens": c.max_pack_tokens, "micro_multiple": c.parallel.micro_multiple}

    def _pack(
        self, dp_size: int, groups: Sequence[SampleGroup], advantages: Sequence[Sequence[float]]
    ) -> Sequence[TrainBatch]:
        c = self.config
        return pack_steps(
            groups,
            advantages,
            steps=c.train.steps_per_rollout,
            cost=self.cost,
            replayed=c.replay.mode == "r3",
            **self._rows(dp_size),
        )

    def _deal(self, step: int, advantages: list[list[float]]) -> list[list[float]]:
        if not self.config.algorithm.shuffle_advantages:
            return advantages
        return shuffle_over_batch(advantages, seed=seed_of(self.config.seed, f"shuffle {step}"))

    def _describe(self, step: int, groups: Sequence[SampleGroup]) -> dict[str, float]:
        metrics = rollout_metrics(groups, version=step)
        self.tokens_total += sum(s.response_len for g in groups for s in g.samples)
        return metrics | {"tokens_total": float(self.tokens_total)}

    async def _evaluate(
        self, clients: Sequence[SGLangClient], reward: Any, prompts: Sequence[Prompt], version: int
    ) -> dict[str, float]:
        c = self.config
        return await evaluate(
            clients,
            prompts,
            reward,
            n=c.eval.samples,
            params=replace(self.sampling(version), sampling_seed=seed_of(c.seed, f"eval {version}")),
            name=Path(str(c.data.eval)).stem,
            alone=c.buffer.max_staleness == 0,
        )

    async def _save(self, trainer: RayTrainer, step: int) -> None:
        await self._finish_save(trainer, True)
        folder = run_state.empty_folder(self.checkpoints, step)
        await trainer.save(folder / "trainer", asynchronous=self.config.checkpoint.asynchronous)
        self.saving = RunState(
            step=step,
            weight_version=step,
            prompt_cursor=step * self.config.train.groups_per_step,
            tokens_total=self.tokens_total,
        )
        await self._finish_save(trainer, not self.config.checkpoint.asynchronous)

    async def _finish_save(self, trainer: RayTrainer, wait: bool) -> None:
        """`latest` moves on when every rank has written; the state is the one of the step that was saved."""
        if self.saving is not None and await trainer.finish_save(wait=wait):
            run_state.save(self.checkpoints, self.saving, keep=self.config.checkpoint.keep)
            self.saving = None
