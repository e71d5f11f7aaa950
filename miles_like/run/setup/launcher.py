"""Starts the processes of a run: trainer ranks, critic ranks and rollout servers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from megatron_bridge.config import TrainerConfig
from miles_like.algorithms.registry import make_critic_loss
from miles_like.cluster.factories import MegatronFactory
from miles_like.cluster.observed.profiling import Observed
from miles_like.cluster.placement import Slot
from miles_like.cluster.rollout_servers import RayServers
from miles_like.cluster.run_nodes import RunNodes
from miles_like.cluster.trainer_ranks import RayTrainer
from miles_like.cluster.workers.actors import StartActor
from miles_like.cluster.workers.pool import StartWorker
from miles_like.protocols import LossFn
from miles_like.report.traces.writer import parts_of
from miles_like.run.setup.model_plan import ModelPlan
from miles_like.run.setup.rollout_side import RolloutSide
from miles_like.run.setup.run_cluster import RunCluster
from miles_like.run.setup.teachers import TeacherPlaces
from miles_like.run.setup.worker_side import worker_recipe, worker_slots, workers_of


class Launcher:
    """Starts the processes of a run as Ray actors. cluster: of the run; None: nodes are chosen from the cluster that
    this process has joined, or else from a local one."""

    cluster: RunCluster | None

    def __init__(self, cluster: RunCluster | None = None) -> None:
        self.cluster = cluster

    def nodes(self, plan: ModelPlan) -> RunNodes:
        """The nodes of the run, chosen by the first call. Raises as `RunCluster.nodes`."""
        if self.cluster is None:
            self.cluster = RunCluster(plan.config, plan.run_dir, Console(), None)
        return self.cluster.nodes()

    def check(self, plan: ModelPlan) -> None:
        """Choose the run's nodes and reserve their GPUs. Raises as `RunCluster.nodes`."""
        self.nodes(plan)

    def replace_lost_nodes(self, plan: ModelPlan) -> tuple[frozenset[int], frozenset[int]]:
        """(numbers of nodes that are lost, of nodes that were and in whose place others are). Raises as
        `RunCluster.replace_lost`."""
        self.nodes(plan)
        assert self.cluster is not None, "made by `nodes`"
        return self.cluster.replace_lost(plan.weights)

    def clocks(self, plan: ModelPlan) -> Sequence[Callable[[], tuple[str, int]]]:
        """As `RunNodes.clocks`."""
        return self.nodes(plan).clocks()

    def trainer(self, plan: ModelPlan, loss: LossFn) -> RayTrainer:
        """Start the trainer ranks with the run's initial weights."""
        return self.ranks(plan, plan.placement.of("trainer"), plan.model.trainer, loss)

    def critic(self, plan: ModelPlan) -> RayTrainer | None:
        """Start the critic ranks: the run's initial model with a scalar head. None: the algorithm has no critic."""
        config, loss = plan.model.critic, make_critic_loss(plan.config.algorithm)
        if config is None or loss is None:
            return None
        return self.ranks(plan, plan.placement.critics(), config, loss)

    def reference(self, plan: ModelPlan, loss: LossFn) -> RayTrainer | None:
        """Start the ranks that compute log-probabilities under the reference's weights, the run's initial ones. loss:
        of the trainer, which they never compute. None: the reference has no pool."""
        config = plan.model.reference
        return None if config is None else self.ranks(plan, plan.placement.of("reference"), config, loss)

    def ranks(self, plan: ModelPlan, slots: Sequence[Slot], config: TrainerConfig, loss: LossFn) -> RayTrainer:
        """Start the ranks in `slots`, which are of one role, with the run's initial weights."""
        timeout_s = plan.config.cluster.timeout_s
        return RayTrainer(
            MegatronFactory(config, plan.weights, loss, 2 * timeout_s, observed(plan, slots[0].role)),
            slots,
            self.nodes(plan),
            dp_size=plan.config.parallel.dp,
            log_dir=plan.logs,
            timeout_s=timeout_s,
        )

    def servers(self, rollout: RolloutSide, version: int, *, routing: bool = True) -> RayServers:
        """Begin to start the rollout servers, with their weights numbered `version`. routing: False: the servers return
        no expert routes; True: they return them if the run uses them."""
        plan = rollout.plan
        launches = [(slot, rollout.launch(slot, version, routing=routing)) for slot in plan.placement.of("rollout")]
        return RayServers(launches, self.nodes(plan), plan.logs, plan.placement.ports_of("rollout"))

    def workers(
        self, rollout: RolloutSide, urls: Mapping[int, str], teachers: TeacherPlaces, *, goes_on: bool
    ) -> StartWorker | None:
        """What starts the run's rollout workers for the servers at `urls`, by their numbers; None: the driver samples.
        teachers, goes_on: as in `WorkerRecipe`."""
        plan, n = rollout.plan, workers_of(rollout.plan)
        if not n:
            return None
        slots = worker_slots(plan.placement, n)
        return StartActor(
            nodes=self.nodes(plan),
            slots=[slot for slot, _ in slots],
            urls=[[urls[s] for s in own] for _, own in slots],
            factory=worker_recipe(rollout, [*urls.values()], teachers, goes_on=goes_on),
            logs=plan.logs,
            start_s=plan.config.cluster.timeout_s,
            silent_s=plan.config.rollout.worker_timeout_s,
        )


def observed(plan: ModelPlan, role: str) -> Observed:
    """What is recorded of the ranks of a role; the trainer's alone are profiled."""
    trace, run_dir = plan.config.trace, plan.run_dir.resolve()
    return Observed(
        role,
        traces=parts_of(run_dir) if trace.on else None,
        profiles=run_dir / "profiles" if trace.profiled and role == "trainer" else None,
        steps=trace.profiled,
        ranks=trace.profile_ranks,
    )


def freeze_gc() -> None:
    """Moves all existing objects to the permanent generation of the garbage collector: a full collection over the
    objects of Ray, torch and transformers would take a large part of a short iteration."""
    gc.collect()
    gc.freeze()


def ready(plan: ModelPlan, servers: int, seconds: float, *, critic: bool) -> str:
    """`Ready in 17 s: 2 trainer ranks, 1 rollout server. Routing data: 8 B/token (int32 would need 48).`"""
    ranks = [
        (len(plan.placement.of("trainer")), "trainer rank"),
        (len(plan.placement.critics()) * critic, "critic rank"),
    ]
    counted = [f"{n} {what}{'s' * (n > 1)}" for n, what in (*ranks, (servers, "rollout server")) if n]
    routes = f" {shape.payload}." if (shape := plan.model.routing) else ""
    return f"Ready in {seconds:.0f} s: {', '.join(counted)}.{routes}"
