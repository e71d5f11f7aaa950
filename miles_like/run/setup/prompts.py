"""What a run asks: its training prompts and held-out sets, and the rewards that score the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from miles_like.loop.evaluation import HeldOut, held_out
from miles_like.preflight.checks import check_over_sampling
from miles_like.report.reward_calls import RewardTally
from miles_like.rewards.load import OUTAGE_S, Rewards
from miles_like.run.setup.model_plan import ModelPlan
from rollout.prompts.contamination import decontaminate
from rollout.prompts.mix import PromptSource
from rollout.tools.load import prompting


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Training prompts, held-out sets and rewards of a run."""

    source: PromptSource
    held_out: Sequence[HeldOut]
    rewards: Rewards
    calls: RewardTally  # of the rewards, and of episodes that are replayed


def read_prompts(plan: ModelPlan, console: Console) -> Prompts:
    """Reads the training prompts and held-out sets and makes the rewards. Raises ValueError naming file and row, the
    reward, or the tools."""
    c = plan.config
    calls = RewardTally()
    rewards = Rewards(c.reward, sandbox=c.sandbox, outage_s=OUTAGE_S, log=calls)
    check_over_sampling(c, rewards(None))
    tokenizer = prompting(plan.tokenizer, c.rollout.tools)
    source = PromptSource(c.data, tokenizer, seed=c.seed, compared_by=rewards(None).compares)
    held = held_out(c.eval_sets, c.data, tokenizer, rewards)
    shared = decontaminate(source, {h.config.name: h.prompts for h in held}, c.data.decontaminate)
    for sentence in (*source.notes, *shared):
        console.print(f"{'':12}{sentence}", markup=False, soft_wrap=True)
    return Prompts(source=source, held_out=held, rewards=rewards, calls=calls)
