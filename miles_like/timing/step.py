"""Predicted seconds of one step of the loop, and the phase and term that determine them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from miles_like.timing.engine import EngineSetup
from miles_like.timing.phase import NOTHING, Phase, together
from miles_like.timing.publish import READING, PublishSetup, publish_time, served_bytes
from miles_like.timing.rates.calibration import HOST, REACHED
from miles_like.timing.rollout import rollout_time, steady_rollout_time
from miles_like.timing.shape import ModelShape
from miles_like.timing.train import TrainSetup, passes_time, sleep_time, train_time
from miles_like.timing.workload import Workload

# Phases that follow each other; or sampling beside training, on other devices; or both in turn on the same ones, where
# samples that are not finished continue in the next turn.
Overlap = Literal["none", "beside", "partial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSetup:
    """`seconds` of one score; `at_once` scores are computed concurrently, while other samples are still being
    sampled."""

    seconds: float = 0.0
    at_once: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSetup:
    """One step of a run."""

    train: TrainSetup
    publish: PublishSetup
    load: Workload
    gpus: int
    """Of the whole run."""
    colocated: bool
    """Trainer and servers take turns on the same devices."""
    staleness: float = 0.0
    """Steps by which samples may be older than the weights that they train."""
    ahead: float | None = None
    """Requests that are outstanding beyond those of a step, as a share of these; None: `staleness`."""
    loads_beside: bool = False
    """Servers load a version while the next step trains (publish.during_training)."""
    rounds: bool = False
    """A step's samples are requested together, and the next ones only after the last of them has ended ("lockstep")."""
    reward: RewardSetup = RewardSetup()
    sampler: EngineSetup | None = None
    """The servers as they sample, where these hold other weights than they receive; None: `publish.engine`."""
    copies: float | None = None
    """Bytes/s of the copies of the trainer's sleep and wake, if not the host link's."""
    engine_copies: bool = False
    """Sleeping engines keep their weights on the host, although a publication replaces them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step by phase; `seconds` is their sum, or less where phases overlap."""

    rollout: Phase
    reward: Phase
    passes: Phase
    train: Phase
    turns: Phase
    publish: Phase
    overlap: Overlap
    gpus: int
    tokens: float
    """Of prompts and responses, that a step trains."""
    model_flops: float
    """Of forward and backward of these tokens, without recomputation."""
    peak: float
    """BF16 FLOP/s of a device."""
    loads_beside: bool = False
    """As in `StepSetup`."""

    @property
    def phases(self) -> dict[str, Phase]:
        names = ("rollout", "reward", "passes", "train", "turns", "publish")
        return {name: getattr(self, name) for name in names}

    @property
    def sampling(self) -> float:
        """Seconds from the start of sampling until the step's last reward is computed."""
        return self.rollout.seconds + self.reward.seconds

    @property
    def training(self) -> float:
        return self.passes.seconds + self.train.seconds

    @property
    def _sides(self) -> tuple[dict[str, Phase], dict[str, Phase], dict[str, Phase]]:
        """With overlap "beside": the phases of the servers, those of the trainer, and those that both wait for."""
        servers = {"rollout": self.rollout, "reward": self.reward}
        trainer = {"passes": self.passes, "train": self.train}
        if not self.loads_beside:
            return servers, trainer, {"publish": self.publish}
        terms = self.publish.terms
        servers["publish"] = Phase({name: value for name, value in terms.items() if name == READING})
        trainer["publish"] = Phase({name: value for name, value in terms.items() if name != READING})
        return servers, trainer, {}

    @property
    def seconds(self) -> float:
        if self.overlap == "beside":
            servers, trainer, both = (sum(phase.seconds for phase in side.values()) for side in self._sides)
            return max(servers, trainer) + both
        return self.sampling + self.training + self.turns.seconds + self.publish.seconds

    @property
    def decides(self) -> str:
        """Names of the longest phase that the step waits for and of its longest term: "rollout: experts"."""
        waited = self.phases
        if self.overlap == "beside":
            *sides, both = self._sides
            waited = max(sides, key=lambda side: sum(phase.seconds for phase in side.values())) | both
        name = max(waited, key=lambda n: waited[n].seconds)
        return f"{name}: {waited[name].decides}"

    def flat(self) -> dict[str, float]:
        """Seconds by "total", phase, and "phase: term"."""
        out = {"total": self.seconds}
        for name, phase in self.phases.items():
            if phase.seconds:
                out[name] = phase.seconds
                out |= {f"{name}: {term}": seconds for term, seconds in phase.terms.items()}
        return out

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.gpus

    @property
    def train_mfu(self) -> float:
        """Model FLOPs utilization of the trainer in its training passes, as a share of the BF16 peak."""
        return self.model_flops / self.train.seconds / self.peak


def step_time(shape: ModelShape, setup: StepSetup) -> StepTime:
    """The time of one step of this model."""
    load, train, engine = setup.load, setup.train, setup.sampler or setup.publish.engine
    overlap = overlap_of(setup)
    if overlap == "none" or setup.rounds:
        rollout = rollout_time(shape, engine, load)
    else:
        ahead = setup.staleness if setup.ahead is None else setup.ahead
        rollout = steady_rollout_time(shape, engine, load, ahead=ahead, staleness=setup.staleness)
    p, reached = train.parallel, 1 / REACHED[train.layer.device.name]
    rollout = rollout.times(reached)
    return StepTime(
        rollout=rollout,
        reward=_reward(setup.reward, load, rollout.seconds),
        passes=passes_time(shape, train, load).times(reached),
        train=train_time(shape, train, load).times(reached),
        turns=_turns(shape, setup),
        publish=publish_time(shape, setup.publish),
        overlap=overlap,
        gpus=setup.gpus,
        tokens=load.tokens,
        model_flops=_model_flops(shape, load) / (p.tp * p.pp * p.cp * p.dp),
        peak=train.layer.device.bf16,
        loads_beside=setup.loads_beside,
    )


def _turns(shape: ModelShape, setup: StepSetup) -> Phase:
    if not setup.colocated:
        return NOTHING
    turns = sleep_time(shape, setup.train, rate=setup.copies)
    if not setup.engine_copies:
        return turns
    engine = setup.sampler or setup.publish.engine
    nbytes = 2 * served_bytes(shape, engine) / engine.tp
    return together([turns, Phase({"sleep and wake of the engines": nbytes / (HOST * engine.device.host)})])


def overlap_of(setup: StepSetup) -> Overlap:
    """How sampling and training overlap: not at all without staleness; else "partial" where both sides share devices,
    "beside" on separate devices."""
    if not setup.staleness:
        return "none"
    return "partial" if setup.colocated else "beside"


def _reward(reward: RewardSetup, load: Workload, sampling: float) -> Phase:
    """Scores are computed while others are sampled: the last one, or what they take longer than the sampling."""
    scoring = load.samples * reward.seconds / reward.at_once
    return Phase({"scores": max(reward.seconds, scoring - sampling)}) if reward.seconds else NOTHING


def _model_flops(shape: ModelShape, load: Workload) -> float:
    """Three forwards: 2 FLOPs an active element and token, and causal attention."""
    lengths = [load.prompt + x for x in load.responses.knots]
    squares = load.samples * sum(x * x for x in lengths) / len(lengths)
    return 3 * (2 * shape.active * load.tokens + squares * shape.core * shape.layers)
