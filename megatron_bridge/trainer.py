"""One rank of the Megatron trainer.

All ranks make the same calls in the same order; each call is collective.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_bridge.device.device import init_device, set_environment

_ENV = init_device()  # before anything below imports megatron

from megatron_bridge.config import TrainerConfig  # noqa: E402
from megatron_bridge.device.collective_errors import gather_objects  # noqa: E402
from megatron_bridge.device.cuda_settings import use_deterministic_kernels  # noqa: E402
from megatron_bridge.device.parallel import close_parallel, init_parallel  # noqa: E402
from megatron_bridge.families.registry import family_of  # noqa: E402
from megatron_bridge.model.build import build_model, unwrap  # noqa: E402
from megatron_bridge.optim.optimizer import NonFiniteGradient, apply_gradients, build_optimizer  # noqa: E402
from megatron_bridge.optim.param_names import matching  # noqa: E402
from megatron_bridge.plan.deterministic import environment  # noqa: E402
from megatron_bridge.plan.layout import check_layout  # noqa: E402
from megatron_bridge.plan.lr_schedule import learning_rate  # noqa: E402
from megatron_bridge.plan.precision import trained_spec  # noqa: E402
from megatron_bridge.plan.recompute import routes_again  # noqa: E402
from megatron_bridge.plan.resolve import resolve, trained_config  # noqa: E402
from megatron_bridge.step.asleep import Sleep  # noqa: E402
from megatron_bridge.step.fake_quant import FakeQuant  # noqa: E402
from megatron_bridge.step.nonfinite import RoutingBias, explain  # noqa: E402
from megatron_bridge.step.overlap import connect_overlap, finish_param_gather  # noqa: E402
from megatron_bridge.step.replay_hook import RoutingReplay  # noqa: E402
from megatron_bridge.step.routing_check import RoutingBreach, check_routes  # noqa: E402
from megatron_bridge.step.stats import Stats, combine, parts_by_kernels, values  # noqa: E402
from megatron_bridge.step.step import OldPolicy, Step  # noqa: E402
from megatron_bridge.weights.checkpoint import begin_save, host_copy, load_checkpoint, load_host_copy, load_weights  # noqa: E402
from megatron_bridge.weights.checkpoint_writer import CheckpointSave  # noqa: E402
from megatron_bridge.weights.copies import WeightCopies  # noqa: E402
from megatron_bridge.weights.export import ExportPlan  # noqa: E402
from megatron_bridge.weights.shards import LocalShards  # noqa: E402
from megatron_bridge.weights.sources import WeightSources  # noqa: E402
from miles_like import spans  # noqa: E402
from miles_like.hf.checkpoint import read_config  # noqa: E402
from miles_like.protocols import LossFn  # noqa: E402
from miles_like.types import REFERENCE, MicroBatch, NamedTensor, Scored, Stat, StepReport  # noqa: E402
from quant.exact.selftest import fingerprint  # noqa: E402
from routing_replay.align import ShardSpec  # noqa: E402

_log = logging.getLogger(__name__)


class MegatronTrainer:
    """One trainer rank in its own process. `rank` and `world_size` count trainer ranks only. timeout_s: of a
    collective.

    Raises ValueError when the layout does not fit the model or the number of ranks.
    """

    _shards: LocalShards | None = None

    def __init__(
        self,
        config: TrainerConfig,
        *,
        rank: int,
        world_size: int,
        master_addr: str,
        master_port: int,
        loss: LossFn,
        timeout_s: float = 600.0,
    ) -> None:
        self.config, self.hf = config, trained_config(config, read_config(Path(config.hf_config)))
        self.family = family_of(self.hf)
        check_layout(config.parallel, self.hf)
        resolved = resolve(
            config, self.hf, cuda=_ENV.device.type == "cuda", te=_ENV.transformer_engine, capability=_ENV.capability
        )
        set_environment(environment(resolved.forward))
        if resolved.transformer["deterministic_mode"]:
            use_deterministic_kernels(resolved.forward)
        self.parallel = init_parallel(
            config.parallel,
            rank=rank,
            world_size=world_size,
            master_addr=master_addr,
            master_port=master_port,
            backend=_ENV.backend,
            seed=config.seed,
            timeout_s=timeout_s,
        )
        self.signals = self.parallel.signals
        self.chunks = build_model(config, self.hf, resolved, self.parallel, _ENV)
        self.models = [unwrap(chunk) for chunk in self.chunks]
        no_decay = matching(self.models, self.parallel, config.optimizer.no_decay, key="optimizer.no_decay")
        self.optimizer = build_optimizer(resolved, self.chunks, no_decay)
        tf = self.models[0].config
        # megatron asks a chain of no optimizers for its scale on a CUDA device
        tf.grad_scale_func = self.optimizer.scale_loss if config.trains else None
        connect_overlap(tf, self.chunks)
        replay = RoutingReplay(self.chunks, config.replay, recompute=routes_again(resolved.transformer))
        self._step = Step(
            self.chunks,
            tf,
            self.parallel,
            replay,
            loss,
            _ENV.device,
            config.mtp_coefficient,
            resolved.token_multiple,
        )
        self._bias = RoutingBias(self.chunks)
        self._fake = self._fake_quant()
        rounded = [] if self._fake is None else self._fake.values()
        self._sleep = Sleep(self.chunks, self.optimizer, _ENV.device, derived=rounded, stale=self.weights_changed)
        self.copies = WeightCopies(self.chunks, self.parallel, self.weights_changed)
        self.steps_done = 0
        self.fingerprint = _agreed_fingerprint() if resolved.forward == "exact" else None
        self._export: ExportPlan | None = None
        self._sources: WeightSources | None = None
        self._saving: CheckpointSave | None = None

    def _fake_quant(self) -> FakeQuant | None:
        """The linears that compute with rounded weights or inputs, if the precision has some; each pass refreshes
        them first."""
        if (spec := trained_spec(self.config, self.hf)) is None:
            return None
        self._step.prepare = self._round
        tensors = self.family.bind(self.hf, mtp=bool(self.models[0].config.mtp_num_layers))
        return FakeQuant(self.chunks, self.parallel, tensors, spec, self.config.precision, _ENV.device)

    @property
    def dp_rank(self) -> int:
        """The data-parallel shard of a batch that this rank trains on."""
        return self.parallel.dp_rank

    @property
    def shard_spec(self) -> ShardSpec:
        """The rows and layers of that shard's routes that this rank needs."""
        return self._step.shard_spec

    def step(self, shard: Sequence[MicroBatch], loss_tokens: int, version: int) -> StepReport:
        """`train` on a rollout that is one mini-batch."""
        return self.train([shard], [loss_tokens], version)

    def train(self, shards: Sequence[Sequence[MicroBatch]], loss_tokens: Sequence[int], version: int) -> StepReport:
        """Run all optimizer steps of one rollout, one per entry of `shards` (this rank's micro-batches of a
        mini-batch); `version` is the weight version after them.

        With several steps, or with replay.mode "r2", an old-log-prob pass over all shards under the current weights
        comes first. With `config.reference_every` the weights become the reference after every so many versions.

        Metrics cover all steps: means over tokens, maxima over all, `train/grad_norm` and `train/skipped` as means over
        steps, and the last step's learning rate.

        Raises ValueError with `config.reference` when `load_weights` was never called, and as Step.stats.

        Raises RoutingBreach on every rank, before the rollout's first optimizer step, when mode "r3" replays routes
        below the bounds of `config.agreement`; weights, optimizer state and routing biases are unchanged.

        When the loss or the gradient norm is not finite, the weights, the optimizer's state and the routing biases are
        bitwise as before that optimizer step. With on_nonfinite "stop" every rank raises RuntimeError with one sentence
        naming the location; with "skip" rank 0 logs the sentence, the metrics contain train/skipped, and the skipped
        step does not advance the learning-rate schedule.
        """
        self._sleep.require_awake("train")
        self.copies.assert_not_swapped()
        assert len(shards) == len(loss_tokens) >= 1, "a number of loss tokens for each of one or more shards"
        with spans.span("log-probs before the update"):
            refs, olds = self._reference_logprobs(shards), self._old_policies(shards)
        found: list[Stats] = []
        checked = [dict(old.agreement) for old in olds if old is not None]
        agreement = [old.samples for old in olds if old is not None]
        if checked:
            self._check_routes(combine(checked), f"step {version}")
        for i, (shard, n, ref, old) in enumerate(zip(shards, loss_tokens, refs, olds, strict=True)):
            where = f"step {version}" + (f" (optimizer step {i + 1} of {len(shards)})" if len(shards) > 1 else "")
            lr = learning_rate(self.config.optimizer, self.steps_done)
            found.append(self._update(partial(self._step.stats, shard, n, refs=ref, old=old), lr, where, not checked))
            if not checked:
                agreement.append(self._step.replay.agreement())
        found += checked
        if (every := self.config.reference_every) and version % every == 0:
            self.copies.keep(REFERENCE)
        metrics = values(combine(found)) | {"train/lr": lr} | parts_by_kernels()
        return StepReport(version=version, metrics=metrics, agreement=agreement)

    def _update(self, run: Callable[[], Stats], lr: float, where: str, check: bool) -> Stats:
        """One optimizer step on the gradients that `run` accumulates; returns its statistics and the optimizer's.
        check: check the routes that it replays."""
        self.optimizer.zero_grad()  # without a distributed optimizer, .grad is the buffer that gradients are added to
        self._bias.keep()
        try:
            with spans.span("forward and backward"):
                stats = run()
            if check:
                self._check_routes(stats, where)
        except (ValueError, RoutingBreach):
            self._bias.restore()  # a wrong loss_tokens is detected after backward, as are wrong routes
            raise
        may_skip = self.config.on_nonfinite == "skip"
        try:
            if not math.isfinite(loss := values(stats)["train/loss"]):
                raise NonFiniteGradient(f"loss is {loss}")
            with spans.span("optimizer"):
                norm = apply_gradients(self.optimizer, lr=lr, clip=self.config.optimizer.clip_grad)
        except NonFiniteGradient as e:
            why = explain(self._step, lambda: values(run()), optimizer=self.optimizer, bias=self._bias)
            message = f"the {e} in {where}, {why}; the weights are unchanged"
            if not may_skip:
                raise RuntimeError(message) from None
            if self.parallel.rank == 0:
                _log.warning("step skipped: %s", message)
            return stats | {"train/skipped": _step_stat(1.0)}
        self.weights_changed()
        self.steps_done += 1
        return stats | {"train/grad_norm": _step_stat(norm)} | ({"train/skipped": _step_stat(0.0)} if may_skip else {})

    def _check_routes(self, stats: Stats, where: str) -> None:
        if self.config.replay.mode == "r3":
            check_routes(values(stats), self.config.agreement, self.family.moe_layers(self.hf), where)

    def evaluate(self, shard: Sequence[MicroBatch], loss_tokens: int) -> Mapping[str, float]:
        """The loss function's statistics and train/loss, forward only; no state changes."""
        self._sleep.require_awake("evaluate")
        return self._step.run(shard, loss_tokens, forward_only=True, refs=self._reference_logprobs([shard])[0])

    def logprobs(
        self, shard: Sequence[MicroBatch], weights: str | None = None, *, candidates: bool = False
    ) -> list[Tensor]:
        """[T] fp32 for every micro-batch, the same on every rank of the data-parallel shard: of labels with loss, 0
        elsewhere; with `candidates` of MicroBatch.candidates, [T, C].

        Under the current weights, or under the copy named `weights`. Forward only and with the routers' own choices,
        regardless of `replay.mode`; no state changes. Raises ValueError when there is no such copy.
        """
        self._sleep.require_awake("logprobs")
        with self.copies.swapped(weights) if weights is not None else nullcontext():
            return self._step.logprobs(shard, candidates=candidates)

    def load_copy(self, name: str, path: Path) -> None:
        """Load a converted `torch_dist` directory as a named copy in host memory; raises as `WeightCopies.load`."""
        self._sleep.require_awake("load_copy")
        self.copies.load(name, path)

    def score(
        self,
        shard: Sequence[MicroBatch],
        *,
        temperature: float | None = None,
        replay: bool = False,
        states: bool = False,
    ) -> Scored:
        """Log-probabilities, routes and states of layers of this rank's micro-batches under the current weights, at
        `temperature` (None: the run's); see Step.score. No state changes."""
        self._sleep.require_awake("score")
        of_run = [model.temperature for model in self.models]
        try:
            for model in self.models:
                model.temperature = of_run[0] if temperature is None else temperature
            return self._step.score(shard, replay=replay, states=states)
        finally:
            for model, own in zip(self.models, of_run, strict=True):
                model.temperature = own

    def _reference_logprobs(self, shards: Sequence[Sequence[MicroBatch]]) -> Sequence[list[Tensor] | None]:
        # scored before: the batches carry the reference's log-probs
        scored = all(REFERENCE in batch.streams for shard in shards for batch in shard)
        if scored or not (self.config.reference and self.config.reference_for_loss):
            return [None] * len(shards)
        if REFERENCE not in self.copies:
            raise ValueError(
                "reference = true, but load does not keep reference weights: call load_weights with the run's "
                "initial weights, then load"
            )
        with self.copies.swapped(REFERENCE):
            return [self._step.logprobs(shard) for shard in shards]

    def _old_policies(self, shards: Sequence[Sequence[MicroBatch]]) -> Sequence[OldPolicy | None]:
        """The old-log-prob passes. With a single optimizer step only r2 needs one, to record routes: the old log-probs
        are the update's own."""
        if len(shards) == 1 and self.config.replay.mode != "r2":
            return [None]
        return [self._step.old_policy(shard) for shard in shards]

    def _round(self) -> None:
        """Refresh the rounded weights. The policy and the reference compute with rounding, a teacher without."""
        assert self._fake is not None
        self._fake.refresh(rounding=self.copies.current in (None, REFERENCE))

    def weights_changed(self) -> None:
        """Invalidate cached quantized weights; call on every rank after changing parameters."""
        if self._fake is not None:
            self._fake.weights_changed()

    def export(self, *, computed: bool = False) -> Iterator[NamedTensor]:
        """Yield the weights as complete Hugging Face tensors, one at a time; `computed`: as the model computes with
        them, which with `precision.qat` is decode(encode(weight)). Draining the iterator is collective. A trainer that
        sleeps exports inside of `parameters` only, and not `computed`."""
        self._sleep.require_awake("export", parameters=not computed)
        self.copies.assert_not_swapped()
        finish_param_gather(self.chunks)
        if computed and self._fake is not None:
            self._fake.refresh()
        return self._export_plan().export(computed=computed)

    def sources(self, most: int) -> WeightSources:
        """The division of what `export` yields among ranks that send it, for weights that do not change until all have
        sent them. Raises as `export`. Collective."""
        self._sleep.require_awake("sources", parameters=True)
        self.copies.assert_not_swapped()
        finish_param_gather(self.chunks)
        if self._sources is None or self._sources.most != most:
            plan = self._export_plan()
            self._sources = WeightSources(plan, self.config.parallel, rank=self.parallel.rank, most=most)
        return self._sources

    def _export_plan(self) -> ExportPlan:
        if self._export is None:
            mtp = bool(self.models[0].config.mtp_num_layers)
            self._export = ExportPlan(self.chunks, self.family, self.hf, self.parallel, mtp=mtp)
        return self._export

    def shards(self) -> LocalShards:
        """The part of `export` that this rank holds, and where its current values are. Collective, under the conditions
        of `export`; the same object each time."""
        self._sleep.require_awake("shards", parameters=True)
        self.copies.assert_not_swapped()
        finish_param_gather(self.chunks)
        if self._shards is None:
            tensors = self.family.bind(self.hf, mtp=bool(self.models[0].config.mtp_num_layers))
            self._shards = LocalShards(self.chunks, tensors, self.parallel, self._export_plan())
        return self._shards

    def sleep(self) -> Mapping[str, int]:
        """Free the device's memory of parameters, gradients and optimizer state, which the host keeps meanwhile;
        returns the bytes freed by part. Collective. Until `wake` only `parameters` with `export`, `finish_save` and
        `close` may be called; the others raise RuntimeError. No effect on a trainer that sleeps."""
        self.copies.assert_not_swapped()
        self._step.replay.reset()
        return self._sleep.sleep()

    def wake(self) -> None:
        """Restore what `sleep` freed, bit for bit. No effect on a trainer that is awake."""
        self._sleep.wake()

    def parameters(self) -> AbstractContextManager[None]:
        """A context in which the parameters are on the device for `export`, also of a trainer that sleeps."""
        return self._sleep.parameters()

    def load_weights(self, path: Path) -> None:
        """Load weights from a converted `torch_dist` directory; the optimizer starts without state.

        With `config.reference` they also become the reference; weights that `load` reads later do not.
        """
        self._sleep.require_awake("load_weights")
        self.copies.assert_not_swapped()
        finish_param_gather(self.chunks)
        self.weights_changed()
        load_weights(path, self.models, self.optimizer, self.parallel)
        if self.config.reference:
            self.copies.keep(REFERENCE)

    def save(self, path: Path, *, asynchronous: bool = False) -> None:
        """Save weights, optimizer state, step number, random states and a moving reference, loadable in any layout.

        With `asynchronous` this returns when the state is copied; `finish_save` renames the directory to `path`.
        """
        self._sleep.require_awake("save")
        self.copies.assert_not_swapped()
        finish_param_gather(self.chunks)
        self.finish_save(wait=True)
        reference = None
        if self.config.reference_every:
            with self.copies.swapped(REFERENCE):
                reference = host_copy(REFERENCE, self.models, self.parallel)
        self._saving = begin_save(
            path,
            self.models,
            self.optimizer,
            self.parallel,
            step=self.steps_done,
            asynchronous=asynchronous,
            copies=reference,
        )
        if not asynchronous:
            self.finish_save(wait=True)

    def finish_save(self, *, wait: bool) -> bool:
        """Whether no save is in progress; always true with `wait`. Raises RuntimeError on every rank when a rank could
        not write."""
        if (saving := self._saving) is None:
            return True
        self._saving = None  # a failed save is not retried
        if done := saving.finish(wait=wait):
            return done
        self._saving = saving
        return done

    def load(self, path: Path) -> None:
        """Load what `save` wrote, including a reference that moves; for a fixed reference call `load_weights` first."""
        self._sleep.require_awake("load")
        self.copies.assert_not_swapped()
        finish_param_gather(self.chunks)
        self.weights_changed()
        if self.config.reference_every:
            load_host_copy(path, REFERENCE, self.models, self.parallel)
            self.copies.keep(REFERENCE)
        self.steps_done = load_checkpoint(path, self.models, self.optimizer, self.parallel, seed=self.config.seed)

    def close(self) -> None:
        """Leave the process groups and release the model. Idempotent; no other call may follow."""
        for chunk in vars(self).get("chunks", ()):
            # A chunk's gradient hooks keep it alive, and so every process group: a dozen threads each, which spin once
            # their peers have exited.
            vars(chunk).clear()
        vars(self).clear()
        close_parallel()
        gc.collect()


def _agreed_fingerprint() -> str:
    """The fingerprint of the bits that every rank computes. Raises ValueError when ranks differ. Collective."""
    own: list[str] = gather_objects(fingerprint())
    if len(set(own)) > 1:
        raise ValueError(
            f"alignment.deterministic: the self-test returns different values {own} on the trainer's ranks, so "
            "their log-probabilities would differ: use the same kind of processor and the same version of torch "
            "on all ranks, or set it to false"
        )
    return own[0]


def _step_stat(value: float) -> Stat:
    """A statistic of one optimizer step."""
    return Stat(torch.tensor(value, dtype=torch.float64), torch.tensor(1.0))
