"""What a run's two sides are made of, from its configuration: trainer ranks, servers, clients, publisher, packing.

Everything is made on demand; nothing runs before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_bridge.families.base import Family
from megatron_bridge.families.registry import family_of
from megatron_bridge.flops import forward_flops
from megatron_bridge.layout import check_layout
from megatron_bridge.precision import served_spec
from megatron_bridge.resolve import resolve
from miles_like.algorithms.registry import make_algorithm, make_bounds
from miles_like.config import RunConfig, trainer_config
from miles_like.engine_fit import check_engine
from miles_like.factories import MegatronFactory, PublisherRecipe, ServerRecipe
from miles_like.hf_checkpoint import HFCheckpoint
from miles_like.packing import pack
from miles_like.placement import plan_placement
from miles_like.same_bits import check_same_bits
from miles_like.tokenizer import load_tokenizer
from miles_like.types import Prompt, SamplingParams
from miles_like.verify.allowance import allowance
from miles_like.verify_live import Comparison, LiveTrainer
from miles_like.workers import RayServers, RayTrainer
from quant.hf_config import spec_from_hf
from quant.spec import QuantSpec
from rollout.client import SGLangClient, seed_of
from rollout.samples import RoutingShape
from rollout.wire_control import PauseMode


class RunParts:
    """The parts of one job, and the comparison of its two sides."""

    def __init__(self, config: RunConfig, run_dir: Path, served: Path, weights: Path, console: Console) -> None:
        self.config = config
        self.run_dir = run_dir
        self.served = served
        self.weights = weights
        self.console = console
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

    def payload(self) -> str:
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

    def sampling(self, step: int, number: int = 0) -> SamplingParams:
        """`number` of the step's rounds: a prompt that comes again in a later one is answered anew."""
        c = self.config.rollout
        key = f"step {step} round {number}" if number else f"step {step}"
        return SamplingParams(
            max_new_tokens=c.max_new_tokens,
            temperature=c.temperature,
            top_p=c.top_p,
            top_k=c.top_k,
            stop_token_ids=(int(self.tokenizer.eos_token_id),),
            sampling_seed=seed_of(self.config.seed, key),
        )

    def rows(self, dp_size: int) -> dict[str, Any]:
        c = self.config
        return {"dp_size": dp_size, "max_tokens": c.max_pack_tokens, "micro_multiple": c.parallel.micro_multiple}

    @property
    def cost(self) -> Callable[[int], float] | None:
        """What a sample's length weighs when rows are balanced."""
        return (lambda n: forward_flops(self.hf.config, [n])) if self.config.train.balance == "flops" else None

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
