"""One rank of the trainer: what a run asks of it, as one class.

All ranks make the same calls in the same order; each is collective.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megatron_bridge.device import init_device, set_environment

_ENV = init_device()  # before anything below imports megatron

from megatron_bridge.agree import gather  # noqa: E402
from megatron_bridge.agreement import RoutingBreach, check_routes  # noqa: E402
from megatron_bridge.checkpoint import begin_save, copied, load_checkpoint, load_weights, read_copied  # noqa: E402
from megatron_bridge.checkpoint_writer import CheckpointSave  # noqa: E402
from megatron_bridge.config import TrainerConfig  # noqa: E402
from megatron_bridge.cuda_deterministic import use_deterministic_kernels  # noqa: E402
from megatron_bridge.deterministic import environment  # noqa: E402
from megatron_bridge.fake_quant import FakeQuant  # noqa: E402
from megatron_bridge.families.base import is_scalar  # noqa: E402
from megatron_bridge.families.registry import family_of, with_scalar_head  # noqa: E402
from megatron_bridge.hf_export import ExportPlan  # noqa: E402
from megatron_bridge.layout import check_layout  # noqa: E402
from megatron_bridge.model import build_model, unwrap  # noqa: E402
from megatron_bridge.nonfinite import RoutingBias, explain  # noqa: E402
from megatron_bridge.optimizer import NonFiniteGradient, apply_gradients, build_optimizer  # noqa: E402
from megatron_bridge.overlap import connect_overlap, settle_parameters  # noqa: E402
from megatron_bridge.parallel import close_parallel, init_parallel  # noqa: E402
from megatron_bridge.param_names import matching  # noqa: E402
from megatron_bridge.precision import trained_spec  # noqa: E402
from megatron_bridge.recompute import routes_again  # noqa: E402
from megatron_bridge.replay_hook import RoutingReplay  # noqa: E402
from megatron_bridge.resolve import resolve  # noqa: E402
from megatron_bridge.schedule import learning_rate  # noqa: E402
from megatron_bridge.stats import Stats, combine, values  # noqa: E402
from megatron_bridge.step import OldPolicy, Step  # noqa: E402
from megatron_bridge.weight_copies import WeightCopies  # noqa: E402
from miles_like.hf_checkpoint import read_config  # noqa: E402
from miles_like.protocols import LossFn  # noqa: E402
from miles_like.types import REFERENCE, MicroBatch, NamedTensor, Scored, Stat, StepReport  # noqa: E402
from quant.exact.selftest import fingerprint  # noqa: E402
from routing_replay.align import RankPart  # noqa: E402

_log = logging.getLogger(__name__)


def read_hf_config(directory: Path) -> dict[str, object]:
    """A model directory's config.json. Raises ValueError when it is missing or not a JSON object."""
    return read_config(directory)


class MegatronTrainer:
    """A rank. `rank` and `world_size` count trainer ranks only; each owns its process. timeout_s: of a collective.

    Raises ValueError when the layout does not fit the model or the number of ranks.
    """

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
        self.config, self.hf = config, _with_head(config, read_hf_config(Path(config.hf_config)))
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
        self.chunks = build_model(config, self.hf, resolved, self.parallel, _ENV)
        self.models = [unwrap(chunk) for chunk in self.chunks]
        no_decay = matching(self.models, self.parallel, config.optimizer.no_decay, key="optimizer.no_decay")
        self.optimizer = build_optimizer(resolved, self.chunks, no_decay)
        tf = self.models[0].config
        tf.grad_scale_func = self.optimizer.scale_loss
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
        self._fake: FakeQuant | None = None
        if (spec := trained_spec(config, self.hf)) is not None:
            tensors = self.family.bind(self.hf, mtp=bool(tf.mtp_num_layers))
            self._fake = FakeQuant(self.chunks, self.parallel, tensors, spec, config.precision, _ENV.device)
            self._step.prepare = self._round
        self.copies = WeightCopies(self.chunks, self.parallel, self.weights_changed)
        self.steps_done = 0
        self.fingerprint = _agreed_fingerprint() if resolved.forward == "exact" else None
        self._export: ExportPlan | None = None
        self._saving: CheckpointSave | None = None

    @property
    def dp_rank(self) -> int:
        """Which row of a batch's grid this rank trains on."""
        return self.parallel.dp_rank

    @property
    def part(self) -> RankPart:
        """Which rows and layers of that row's routes it needs."""
        return self._step.part

    def step(self, row: Sequence[MicroBatch], loss_tokens: int, version: int) -> StepReport:
        """`train` on a rollout that is one mini-batch."""
        return self.train([row], [loss_tokens], version)

    def train(self, rows: Sequence[Sequence[MicroBatch]], loss_tokens: Sequence[int], version: int) -> StepReport:
        """All optimizer steps of one rollout: one for each of this rank's rows, in order; `version` is the weight
        version after them.

        Where there are several, or replay.mode is "r2", an old-log-prob pass over all rows comes first, under the
        weights of this moment. With `config.reference_every` the weights after every so many versions become the
        reference.

        Metrics are of all steps: means over their tokens, the largest of all, `train/grad_norm` and `train/skipped` as
        means over steps, the last step's learning rate.

        Raises ValueError with `config.reference` when `load_weights` was never called, and what Step.stats refuses.

        Raises RoutingBreach on every rank, before the rollout's first optimizer step, when mode "r3" replays routes
        that are below the bounds of `config.agreement`; weights, optimizer state and routing biases stay as they were.

        When the loss or the gradient norm is not finite the weights, the optimizer's state and the routing biases stay
        as they were before that optimizer step, bit for bit. With on_nonfinite "stop", RuntimeError on every rank, one
        sentence naming where it began; with "skip", that sentence is logged by rank 0, the metrics say train/skipped,
        and the next step is the one that would have come without this: the learning-rate schedule has not moved either.
        """
        self.copies.assert_own()
        assert len(rows) == len(loss_tokens) >= 1, "a number of loss tokens for each of one or more rows"
        refs, olds = self._refs(rows), self._olds(rows)
        found: list[Stats] = []
        judged = [old.agreement for old in olds if old is not None]
        if judged:
            self._check_routes(combine(judged), f"step {version}")
        for i, (row, n, ref, old) in enumerate(zip(rows, loss_tokens, refs, olds, strict=True)):
            where = f"step {version}" + (f" (optimizer step {i + 1} of {len(rows)})" if len(rows) > 1 else "")
            lr = learning_rate(self.config.optimizer, self.steps_done)
            found.append(self._update(partial(self._step.stats, row, n, refs=ref, old=old), lr, where, not judged))
        found += judged
        if (every := self.config.reference_every) and version % every == 0:
            self.copies.keep(REFERENCE)
        return StepReport(version=version, metrics=values(combine(found)) | {"train/lr": lr})

    def _update(self, run: Callable[[], Stats], lr: float, where: str, judge: bool) -> Stats:
        """One optimizer step on the gradients that `run` leaves behind; its statistics and the step's own. judge: the
        routes that it replays have not been checked yet."""
        self.optimizer.zero_grad()  # without a distributed optimizer, .grad is the buffer that gradients are added to
        self._bias.keep()
        try:
            stats = run()
            if judge:
                self._check_routes(stats, where)
        except (ValueError, RoutingBreach):
            self._bias.restore()  # a wrong loss_tokens shows after backward, as do wrong routes
            raise
        may_skip = self.config.on_nonfinite == "skip"
        try:
            if not math.isfinite(loss := values(stats)["train/loss"]):
                raise NonFiniteGradient(f"loss is {loss}")
            norm = apply_gradients(self.optimizer, lr=lr, clip=self.config.optimizer.clip_grad)
        except NonFiniteGradient as e:
            why = explain(self._step, lambda: values(run()), optimizer=self.optimizer, bias=self._bias)
            said = f"the {e} in {where}, {why}; the weights are unchanged"
            if not may_skip:
                raise RuntimeError(said) from None
            if self.parallel.rank == 0:
                _log.warning("step skipped: %s", said)
            return stats | {"train/skipped": _of_step(1.0)}
        self.weights_changed()
        self.steps_done += 1
        return stats | {"train/grad_norm": _of_step(norm)} | ({"train/skipped": _of_step(0.0)} if may_skip else {})

    def _check_routes(self, stats: Stats, where: str) -> None:
        if self.config.replay.mode == "r3":
            check_routes(values(stats), self.config.agreement, self.family.moe_layers(self.hf), where)

    def evaluate(self, row: Sequence[MicroBatch], loss_tokens: int) -> Mapping[str, float]:
        """The loss function's statistics and train/loss, forward only; nothing changes."""
        return self._step.run(row, loss_tokens, forward_only=True, refs=self._refs([row])[0])

    def logprobs(
        self, row: Sequence[MicroBatch], weights: str | None = None, *, candidates: bool = False
    ) -> list[Tensor]:
        """[T] fp32 for every micro-batch, the same on every rank that has the row: of labels with loss, 0 elsewhere;
        with `candidates` of those that the micro-batch names, [T, C].

        Under the weights now, or under a copy of that name in `copies`. Forward only and with the weights' own routing,
        whatever `replay.mode` is; nothing changes. Raises ValueError when there is no such copy.
        """
        with self.copies.swapped(weights) if weights is not None else nullcontext():
            return self._step.logprobs(row, candidates=candidates)

    def load_copy(self, name: str, path: Path) -> None:
        """Keep a converted `torch_dist` directory's weights in host memory, beside those of the model; raises as
        `WeightCopies.load`."""
        self.copies.load(name, path)

    def score(self, row: Sequence[MicroBatch], *, temperature: float | None = None, replay: bool = False) -> Scored:
        """What this rank's row is given under the weights now, where told at another temperature than the run's;
        see Step.score. Nothing changes."""
        of_run = [model.temperature for model in self.models]
        try:
            for model in self.models:
                model.temperature = of_run[0] if temperature is None else temperature
            return self._step.score(row, replay=replay)
        finally:
            for model, own in zip(self.models, of_run, strict=True):
                model.temperature = own

    def _refs(self, rows: Sequence[Sequence[MicroBatch]]) -> Sequence[list[Tensor] | None]:
        told = all(REFERENCE in batch.streams for row in rows for batch in row)  # with the batch: asked before
        if told or not (self.config.reference and self.config.reference_told):
            return [None] * len(rows)
        if REFERENCE not in self.copies:
            raise ValueError(
                "reference = true, but no weights were kept to refer to, since load keeps none: call load_weights with "
                "the weights that the run began with, then load"
            )
        with self.copies.swapped(REFERENCE):
            return [self._step.logprobs(row) for row in rows]

    def _olds(self, rows: Sequence[Sequence[MicroBatch]]) -> Sequence[OldPolicy | None]:
        """With one optimizer step the old log-probs are the update's own, and only r2 has something to record."""
        if len(rows) == 1 and self.config.replay.mode != "r2":
            return [None]
        return [self._step.old_policy(row) for row in rows]

    def _round(self) -> None:
        """The policy is trained through the rounding, and so was a reference; a teacher was not."""
        assert self._fake is not None
        self._fake.refresh(rounding=self.copies.current in (None, REFERENCE))

    def weights_changed(self) -> None:
        """The parameters got other values: what is made of them is made anew before the next forward pass. Who sets
        them by hand calls this, on every rank."""
        if self._fake is not None:
            self._fake.weights_changed()

    def export(self, *, computed: bool = False) -> Iterator[NamedTensor]:
        """The weights as whole Hugging Face tensors, one at a time; `computed`: as the model computes with them, which
        with `precision.qat` is decode(encode(weight)). Draining it is collective."""
        self.copies.assert_own()
        settle_parameters(self.chunks)
        if computed and self._fake is not None:
            self._fake.refresh()
        if self._export is None:
            mtp = bool(self.models[0].config.mtp_num_layers)
            self._export = ExportPlan(self.chunks, self.family, self.hf, self.parallel, mtp=mtp)
        return self._export.export(computed=computed)

    def load_weights(self, path: Path) -> None:
        """Weights from a converted `torch_dist` directory; the optimizer starts anew.

        With `config.reference` they are the reference from now on; weights that `load` reads later are not.
        """
        self.copies.assert_own()
        settle_parameters(self.chunks)
        self.weights_changed()
        load_weights(path, self.models, self.optimizer, self.parallel)
        if self.config.reference:
            self.copies.keep(REFERENCE)

    def save(self, path: Path, *, asynchronous: bool = False) -> None:
        """Weights, optimizer state, step number and random states, and a reference that moves, readable at any layout.

        With `asynchronous` this returns when the state is copied; `finish_save` gives `path` its name.
        """
        self.copies.assert_own()
        settle_parameters(self.chunks)
        self.finish_save(wait=True)
        reference = None
        if self.config.reference_every:
            with self.copies.swapped(REFERENCE):
                reference = copied(REFERENCE, self.models, self.parallel)
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
        """Whether no save is under way any more; with `wait` always. Raises RuntimeError on every rank when one could
        not write."""
        if (saving := self._saving) is None:
            return True
        self._saving = None  # a save that fails is not tried again
        if done := saving.finish(wait=wait):
            return done
        self._saving = saving
        return done

    def load(self, path: Path) -> None:
        """What `save` wrote, a reference that moves too; with `config.reference` alone call `load_weights` first."""
        self.copies.assert_own()
        settle_parameters(self.chunks)
        self.weights_changed()
        if self.config.reference_every:
            read_copied(path, REFERENCE, self.models, self.parallel)
            self.copies.keep(REFERENCE)
        self.steps_done = load_checkpoint(path, self.models, self.optimizer, self.parallel, seed=self.config.seed)

    def close(self) -> None:
        """Leave the world of ranks and let go of the model. Idempotent; no other call may follow."""
        for chunk in vars(self).get("chunks", ()):
            # Its gradient hooks hold a chunk for good, and so every process group: a dozen threads a group, which spin
            # once their peers have gone.
            vars(chunk).clear()
        vars(self).clear()
        close_parallel()
        gc.collect()


def _with_head(config: TrainerConfig, hf: dict[str, object]) -> dict[str, object]:
    """config.json of the model that is trained. Raises ValueError for a head that it is not to have."""
    if config.head == "scalar":
        return with_scalar_head(hf)
    if is_scalar(hf):
        raise ValueError(
            f"{config.hf_config}: config.json names {hf['architectures']}, which has no vocabulary head: set head = "
            "'scalar', or give a language model"
        )
    return hf


def _agreed_fingerprint() -> str:
    """Of the bits that every rank computes. Raises ValueError where they differ. Collective."""
    own = gather(fingerprint())
    if len(set(own)) > 1:
        raise ValueError(
            f"alignment.deterministic: the self-test gives {own} on the trainer's ranks, so their log-probabilities "
            "would differ: run them on one kind of processor with one version of torch, or set it to false"
        )
    return own[0]  # type: ignore[no-any-return]


def _of_step(value: float) -> Stat:
    """A statistic of one optimizer step."""
    return Stat(torch.tensor(value, dtype=torch.float64), torch.tensor(1.0))
