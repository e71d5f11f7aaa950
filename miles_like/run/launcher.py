"""Starts the processes of a run: trainer ranks, critic ranks and rollout servers."""

from __future__ import annotations

import gc

from miles_like.algorithms.registry import make_critic_loss
from miles_like.cluster.actors import check_nodes
from miles_like.cluster.factories import MegatronFactory
from miles_like.cluster.rollout_servers import RayServers
from miles_like.cluster.trainer_ranks import RayTrainer
from miles_like.protocols import LossFn
from miles_like.run.model_plan import ModelPlan
from miles_like.run.rollout_side import RolloutSide


class Launcher:
    """Starts the processes of a run as Ray actors on the cluster that this process has joined."""

    def check(self, plan: ModelPlan) -> None:
        """Raises ValueError when the placement needs more nodes than the cluster has."""
        check_nodes(plan.placement)

    def trainer(self, plan: ModelPlan, loss: LossFn) -> RayTrainer:
        """Start the trainer ranks with the run's initial weights."""
        timeout_s = plan.config.cluster.timeout_s
        return RayTrainer(
            MegatronFactory(plan.model.trainer, plan.weights, loss, 2 * timeout_s),
            plan.placement.of("trainer"),
            dp_size=plan.config.parallel.dp,
            log_dir=plan.logs,
            timeout_s=timeout_s,
        )

    def critic(self, plan: ModelPlan) -> RayTrainer | None:
        """Start the critic ranks: the run's initial model with a scalar head. None: the algorithm has no critic."""
        config, loss = plan.model.critic, make_critic_loss(plan.config.algorithm)
        if config is None or loss is None:
            return None
        timeout_s = plan.config.cluster.timeout_s
        return RayTrainer(
            MegatronFactory(config, plan.weights, loss, 2 * timeout_s),
            plan.placement.critics(),
            dp_size=plan.config.parallel.dp,
            log_dir=plan.logs,
            timeout_s=timeout_s,
        )

    def servers(self, rollout: RolloutSide, version: int, *, routing: bool = True) -> RayServers:
        """Begin to start the rollout servers, with their weights numbered `version`. routing: False: the servers return
        no expert routes; True: they return them if the run uses them."""
        plan = rollout.plan
        launches = [(slot, rollout.launch(slot, version, routing=routing)) for slot in plan.placement.of("rollout")]
        return RayServers(launches, plan.logs)


def freeze_gc() -> None:
    """Moves all existing objects to the permanent generation of the garbage collector: a full collection over the
    objects of Ray, torch and transformers would take a large part of a short iteration."""
    gc.collect()
    gc.freeze()
