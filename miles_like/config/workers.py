"""What rollout workers cannot do yet. Torch-free."""

from __future__ import annotations

from miles_like.config.sections import algorithm as parts
from miles_like.config.sections.algorithm import AlgorithmConfig
from miles_like.config.sections.cluster import ClusterConfig
from miles_like.config.sections.distillation import DistillationConfig
from miles_like.config.sections.loop import BufferConfig

# advantages that are computed from the values of tokens, or by a user's function, which may read them
_OF_TOKENS = (parts.ReinforcePlusPlus, parts.Ppo, parts.Remax, parts.CustomAdvantage)


def why_no_workers(
    algorithm: AlgorithmConfig,
    buffer: BufferConfig,
    cluster: ClusterConfig,
    distillation: DistillationConfig,
    *,
    takes_turns: bool,
) -> str | None:
    """What needs the values of tokens in the driver, or one user of the servers; None: nothing does."""
    of = algorithm.parts
    if takes_turns:
        return "cluster.colocate = true, where the driver alone may use the servers"
    if isinstance(of.advantage, _OF_TOKENS):
        return f"algorithm.advantage = {of.advantage.advantage!r}, which the driver computes from tokens"
    if isinstance(of.penalty, parts.PenaltyInReward):
        return f"algorithm.kl_coefficient = {of.penalty.kl_coefficient:g} in the reward, which the driver computes"
    if cluster.pools.reference is not None:
        return "[cluster.pools.reference], whose ranks score tokens that the driver sends"
    if distillation.teaching is not None:
        return "[distillation], whose teachers score tokens that the driver sends"
    if buffer.old_tokens == "mask":
        return "buffer.old_tokens = 'mask', by which the driver masks tokens of waiting groups"
    return None


def check_workers(
    workers: int | None,
    algorithm: AlgorithmConfig,
    buffer: BufferConfig,
    cluster: ClusterConfig,
    distillation: DistillationConfig,
    *,
    takes_turns: bool,
) -> None:
    """Raises ValueError where workers are configured for what they cannot do."""
    why = why_no_workers(algorithm, buffer, cluster, distillation, takes_turns=takes_turns)
    if workers and why is not None:
        raise ValueError(
            f"rollout.workers = {workers} with {why}: the tokens are in the workers; set rollout.workers = 0"
        )
