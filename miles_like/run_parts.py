"""What a run's two sides are made of, from its configuration: servers, clients, publisher beside the trainer's parts.

Everything is made on demand; nothing runs before it is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from megatron_bridge.config import AgreementConfig
from miles_like.algorithms.distillation import distilled
from miles_like.algorithms.registry import make_algorithm, make_bounds, make_critic_loss
from miles_like.config import RunConfig
from miles_like.engine_fit import check_engine
from miles_like.factories import MegatronFactory, PublisherRecipe, ServerRecipe
from miles_like.packing import pack
from miles_like.rank_configs import critic_config
from miles_like.same_bits import check_same_bits
from miles_like.trainer_parts import TrainerParts
from miles_like.types import Prompt, SamplingParams
from miles_like.verify.allowance import agreement_bounds, allowance
from miles_like.verify_live import Comparison, LiveTrainer
from miles_like.workers import RayServers, RayTrainer
from rollout.client import SGLangClient, seed_of
from rollout.plays import make_play
from rollout.samples import RoutingShape
from rollout.server_key import ServerKey
from rollout.unaborted import RESUMES
from rollout.wire_control import PauseMode


class RunParts(TrainerParts):
    """The parts of one job, and the comparison of its two sides."""

    def __init__(self, config: RunConfig, run_dir: Path, served: Path, weights: Path, console: Console) -> None:
        super().__init__(config, run_dir, served, weights, console)
        check_engine(config.rollout, config.precision, self.hf.config)
        if (bounds := self._agreement_bounds()) is not None:
            self.trainer = self.trainer.model_copy(update={"agreement": bounds})
        self.algorithm = make_algorithm(config.algorithm, config.correction, config.mismatch)
        if (d := config.distillation).mode != "off":
            beta = 1.0 if d.beta is None else d.beta
            self.algorithm = distilled(self.algorithm, mode=d.mode, coefficient=d.coefficient, top_k=d.top_k, beta=beta)
        # so many publications may abort a sample, one after the other, before it is trained
        self.resumes = config.buffer.slack + RESUMES
        self.play = make_play(config.rollout, self.tokenizer, resumes=self.resumes)

    @functools.cached_property
    def key(self) -> ServerKey:
        """Of every server that this run starts."""
        return ServerKey.new()

    def _agreement_bounds(self) -> AgreementConfig | None:
        """None where no route of the rollout is replayed. Raises as `agreement_bounds`."""
        c, hf = self.config, self.hf.config
        if c.replay.mode != "r3" or not self.family.moe_layers(hf):
            return None
        return agreement_bounds(
            c.mismatch.expert_agreement_min,
            c.mismatch.layer_agreement_min,
            c.precision,
            engine=c.rollout.engine,
            exact=c.exact_steps,
            more=c.one_side_rounds,
            stale=c.buffer.slack > 0,
            top_k=self.family.top_k(hf),
            num_experts=self.family.num_experts(hf),
        )

    def ranks(self) -> RayTrainer:
        """Started, on the weights that the run begins with."""
        return self.started(self.algorithm.loss)

    def critic(self) -> RayTrainer | None:
        """Started, as the model that the run begins with, with a head of its own; None where the algorithm has none."""
        config, loss = critic_config(self.config, self.trainer), make_critic_loss(self.config.algorithm)
        if config is None or loss is None:
            return None
        factory = MegatronFactory(config, self.weights, loss, 2 * self.config.cluster.timeout_s)
        slots, logs = self.plan.critics(), self.run_dir / "logs"
        timeout_s = self.config.cluster.timeout_s
        return RayTrainer(factory, slots, dp_size=self.config.parallel.dp, log_dir=logs, timeout_s=timeout_s)

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
                    bucket_bytes=self.config.publish.bucket_bytes,
                    node_rank=slot.node_rank,
                    nnodes=slot.nnodes,
                    routed_experts=routing and self.routing_shape() is not None,
                    key=self.key,
                ),
            )
            for slot in self.plan.of("rollout")
        ]
        return RayServers(launches, self.run_dir / "logs", c.start_timeout_s)

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

    def payload(self) -> str:
        return f"; {shape.payload}" if (shape := self.routing_shape()) else ""

    def client(
        self, url: str, *, routing: bool = True, ours: bool = True, key: ServerKey | None = None
    ) -> SGLangClient:
        """ours: this run started the server, and has its log and key; `key` is that of one it did not start."""
        c = self.config.rollout
        return SGLangClient(
            url,
            vocabulary=int(self.hf.config["vocab_size"]),
            routing=self.routing_shape() if routing else None,
            prompts_per_request=c.prompts_per_request,
            request_timeout_s=c.request_timeout_s,
            pause_mode=PauseMode(self.config.publish.pause_mode),
            samples_from="server" if c.engine == "embedded" else "client",
            decode=lambda ids: str(self.tokenizer.decode(ids, skip_special_tokens=True)),
            log=self.run_dir / "logs" if ours else None,
            key=self.key if ours else key,
        )

    def publisher(self, urls: Sequence[str], *, ours: bool = True, key: ServerKey | None = None) -> PublisherRecipe:
        """ours, key: as of `client`."""
        c = self.config
        return PublisherRecipe(
            urls=tuple(urls),
            kind=c.rollout.engine,
            spec=self.spec,
            config=c.publish,
            fused=self.family.bind(self.hf.config, mtp=True).fused(),
            tp_size=c.rollout.sglang.tp_size,
            timeout_s=c.rollout.request_timeout_s,
            directory=(self.run_dir / "published").resolve(),
            hf_config=self.hf.config,
            copy_from=self.served.resolve(),
            key=self.key if ours else key,
        )

    def sampling(self, wave: int) -> SamplingParams:
        """Of prompts that are sampled together: one that comes again in a later wave is answered anew."""
        c = self.config.rollout
        return SamplingParams(
            max_new_tokens=c.max_new_tokens,
            temperature=c.temperature,
            top_p=c.top_p,
            top_k=c.top_k,
            stop_token_ids=(int(self.tokenizer.eos_token_id),),
            sampling_seed=seed_of(self.config.seed, f"step {wave}"),
        )

    def comparison(self, trainer: RayTrainer, prompts: Sequence[Prompt]) -> Comparison:
        c, bounds = self.config, make_bounds(self.config.mismatch)
        shape = None if c.replay.gates else self.routing_shape()  # gates of corrected routes are known to nobody
        routed = shape is not None or not self.family.moe_layers(self.hf.config)
        packing = partial(pack, **self.rows(trainer.dp_size), replayed=False)
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

    async def check_bits(self, trainer: RayTrainer, clients: Sequence[SGLangClient]) -> None:
        """Raises ValueError where log-probabilities are to be exact and cannot be."""
        if (parts := self.config.exact_parts) and self.config.bit_exact:
            told = {client.url: await client.server_info() for client in clients}
            check_same_bits(trainer.fingerprint(), told, parts=parts, dtype=self.trainer.params_dtype)
