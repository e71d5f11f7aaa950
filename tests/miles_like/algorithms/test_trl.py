"""Our losses, aggregations, masks and advantages give the number and the gradient that trl's trainers give.

trl is other people's code for the same papers. Its `_compute_loss` is run as it is, on a trainer without a model that
is handed log-probabilities; ours are weighted and divided as a step does it. Old log-probabilities are given, so that
ratios are not 1. Advantages it computes amid generation: those lines of its source are run alone. Not covered: where
both differ by choice (its dapo divides by one device's share of the tokens, its entropy bonus is a mean over tokens
whatever the aggregation, its epsilon of a group's deviation is 1e-4).
"""

from __future__ import annotations

import functools
import inspect
import sys
import textwrap
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from miles_like.algorithms.registry import make_algorithm
from miles_like.batch.aggregation import sample_weights
from miles_like.config.sections.algorithm import AlgorithmConfig
from miles_like.config.sections.correction import CorrectionConfig
from miles_like.types import REFERENCE, Aggregation, LossInputs
from tests.support.made_samples import group, rewarded, sample

TESTS = Path(__file__).parents[2]
LENGTHS = [5, 1, 9, 4, 2, 12]
PROMPTS = np.array([0, 0, 0, 1, 1, 1])
LONGEST = 12
CONSTANT = 16  # tokens: trl's max_completion_length
NAMES = ("new", "old", "ref", "entropy")


@functools.cache
def trl() -> SimpleNamespace:
    """Imported by the worker that runs these tests: every worker collects them, and an import takes 2 s."""
    with pytest.MonkeyPatch.context() as patch:  # tests/rollout, on the path of tests, has a folder named vllm
        patch.setattr(sys, "path", [p for p in sys.path if not p.startswith(str(TESTS))])
        from trl import GRPOTrainer, RLOOTrainer
        from trl.trainer.utils import nanstd

    return SimpleNamespace(GRPOTrainer=GRPOTrainer, RLOOTrainer=RLOOTrainer, nanstd=nanstd)


def samples(spread: float = 0.4) -> dict[str, Tensor]:
    """[samples, LONGEST] fp64, padded; ratios on both sides of every bound."""
    g = torch.Generator().manual_seed(0)
    shape = (len(LENGTHS), LONGEST)
    new = -3 * torch.rand(shape, generator=g, dtype=torch.float64)
    return {
        "new": new,
        "old": new + spread * torch.randn(shape, generator=g, dtype=torch.float64),
        "ref": new + 0.5 * torch.randn(shape, generator=g, dtype=torch.float64),
        "entropy": torch.rand(shape, generator=g, dtype=torch.float64),
        "mask": torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None],
        "advantages": torch.tensor([1.3, -0.7, 0.4, -1.1, 0.9, -0.6], dtype=torch.float64),
    }


def trainer(kind: type, data: dict[str, Tensor], **changed: Any) -> Any:
    """A trl trainer of that kind which never met a model: what its `_compute_loss` looks at, and nothing else."""
    it = kind.__new__(kind)
    beta, args = changed.pop("beta", 0.0), changed.pop("args", {})
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    own = {
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "beta": beta,
        "importance_sampling_level": "token",
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "aux_loss_enabled": False,
        "use_vllm": False,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": CONSTANT,
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(**vars(accelerator), sync_gradients=False),
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "args": SimpleNamespace(
            **{
                "delta": None,
                "use_bias_correction_kl": False,
                "steps_per_generation": 1,
                "sapo_temperature_pos": 1.0,
                "sapo_temperature_neg": 1.05,
            }
            | args
        ),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (data["new"], data["entropy"], None),
    }
    for name, value in (own | changed).items():
        setattr(it, name, value)
    return it


def theirs(kind: type, **changed: Any) -> tuple[float, Tensor, Any]:
    """Loss and its gradient by the log-probabilities [samples, LONGEST]."""
    data = samples()
    data["new"].requires_grad_()
    data["entropy"].requires_grad_()
    it = trainer(kind, data, **changed)
    ids = torch.zeros(data["mask"].shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones_like(ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": data["mask"].int(),
        "advantages": data["advantages"],
        "old_per_token_logps": data["old"],
        "old_logps": (data["old"] * data["mask"]).sum(1),
        "ref_per_token_logps": data["ref"],
        "num_items_in_batch": data["mask"].sum(),
    }
    loss = it._compute_loss(it.model, inputs)
    loss.backward()
    return float(loss), data["new"].grad, it


def ours(config: AlgorithmConfig, old: str = "old") -> tuple[float, Tensor, dict[str, Any]]:
    """The same of one pack, as a step sums it: weighted, over what is under loss, by the number of such tokens."""
    data = samples()
    mask, n = data["mask"], torch.tensor(LENGTHS)
    flat = {name: data[name][mask] for name in NAMES}
    flat["new"].requires_grad_()
    per_token, stats = make_algorithm(config, CorrectionConfig()).loss(
        LossInputs(
            logprobs=flat["new"],
            entropy=flat["entropy"].requires_grad_(),
            rollout_logprobs=flat[old],
            old_logprobs=flat[old],
            ref_logprobs=flat["ref"],
            advantages=data["advantages"].repeat_interleave(n),
            loss_mask=torch.ones(len(flat["new"]), dtype=torch.bool),
            cu_seqlens=torch.tensor([0, *n.cumsum(0).tolist()], dtype=torch.int32),
        )
    )
    lengths = np.array(LENGTHS)
    aggregation = Aggregation(config.parts.aggregation.aggregation)
    weights = sample_weights(lengths, PROMPTS, np.arange(len(lengths)), aggregation, config.parts.constant(CONSTANT))
    factors = None if weights is None else torch.from_numpy(weights).float().repeat_interleave(n)
    loss = (per_token if factors is None else per_token * factors).sum() / lengths.sum()
    loss.backward()
    grad = torch.zeros(mask.shape, dtype=torch.float64)
    grad[mask] = flat["new"].grad
    return float(loss), grad, dict(stats)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"aggregation": "sequence_mean"}, {"loss_type": "grpo"}),
    "dr_grpo": ({"name": "dr_grpo"}, {"loss_type": "dr_grpo"}),
    "bnpo": ({"name": "grpo"}, {"loss_type": "bnpo"}),
    "dapo": ({"name": "dapo"}, {"loss_type": "dapo"}),
    "dual clip": ({"clip_dual": 1.5}, {"loss_type": "dapo", "args": {"delta": 1.5}}),
    "cispo": ({"name": "cispo", "clip_high": 0.3}, {"loss_type": "cispo", "epsilon_high": 1.3}),
    "sapo": ({"name": "sapo"}, {"loss_type": "sapo"}),
    "gspo": (
        {"name": "gspo", "clip_low": 0.05, "clip_high": 0.06},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.06},
    ),
    "off-policy mask": ({"off_policy_delta": 0.05}, {"loss_type": "dapo", "off_policy_mask_threshold": 0.05}),
    "k3": ({"kl_coefficient": 0.3}, {"loss_type": "dapo", "beta": 0.3}),
    "k3, unbiased": (
        {"kl_coefficient": 0.3, "kl_unbiased": True},
        {"loss_type": "dapo", "beta": 0.3, "args": {"use_bias_correction_kl": True}},
    ),
    "entropy": (
        {"entropy_coefficient": 0.2},
        {"loss_type": "dapo", "_entropy_bonus_enabled": True, "entropy_coef": 0.2},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_trl_s(name: str) -> None:
    config, changed = CASES[name]
    want, of_want, _ = theirs(trl().GRPOTrainer, **changed)
    got, of_got, _ = ours(AlgorithmConfig(**config))
    assert got == pytest.approx(want, rel=1e-6)  # weights are fp32
    torch.testing.assert_close(of_got, of_want, rtol=1e-6, atol=1e-9)


def test_clip_fractions_are_trl_s() -> None:
    _, _, it = theirs(trl().GRPOTrainer, loss_type="dapo")
    _, _, stats = ours(AlgorithmConfig(name="dapo"))
    for side in ("low", "high"):
        stat = stats[f"train/clip_frac/{side}"]
        assert float(stat.total / stat.count) == pytest.approx(it._metrics["train"][f"clip_ratio/{side}_mean"][0])
        assert float(stat.total) > 0


def test_something_is_masked_and_something_is_not() -> None:
    """Or the case above would say nothing."""
    _, _, stats = ours(AlgorithmConfig(off_policy_delta=0.05))
    assert 0 < float(stats["train/off_policy/mask_frac"].total) < sum(LENGTHS)


def test_rloo_s_gradient_is_trl_s_on_policy() -> None:
    """trl's ratio is of whole samples and its loss a mean over them: where nothing has moved, our sum over a sample's
    tokens has its gradient."""
    data = samples(spread=0.0)
    data["new"].requires_grad_()
    it = trainer(trl().RLOOTrainer, data)
    ids = torch.zeros(data["mask"].shape, dtype=torch.int64)
    old = (data["new"].detach() * data["mask"]).sum(1)
    inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids}
    inputs |= {"completion_mask": data["mask"].int(), "advantages": data["advantages"], "old_logps": old}
    it._compute_loss(it.model, inputs).backward()
    _, got, _ = ours(AlgorithmConfig(name="rloo"), old="new")
    torch.testing.assert_close(got, data["new"].grad, rtol=1e-6, atol=1e-9)


def their_advantages(kind: type, first: str, last: str, rewards: Tensor, own: dict[str, Any], **names: Any) -> Tensor:
    """What the lines of the trainer's source from `first` up to `last` make of rewards [prompts, G]."""
    source = inspect.getsource(kind._generate_and_score_completions)  # type: ignore[attr-defined]
    lines = textwrap.dedent(" " * 8 + source[source.index(first) : source.index(last)])
    known = {"torch": torch, "nanstd": trl().nanstd, "rewards": rewards.flatten(), "num_generations": rewards.shape[1]}
    known |= {"self": SimpleNamespace(**own), "rewards_per_func": rewards.reshape(-1, 1), "device": "cpu"}
    found = names | known
    exec(lines, found)
    return found["advantages"].view(rewards.shape)


REWARDS = torch.tensor([[1.0, 0.0, 0.5, 0.0], [1.0, 1.0, 1.0, 1.0], [-1.0, 2.0, 0.0, 0.25]], dtype=torch.float64)


@pytest.mark.parametrize(("name", "scale"), [("grpo", "group"), ("dr_grpo", "none")])
def test_group_relative_advantages_are_trl_s(name: str, scale: str) -> None:
    own = {"multi_objective_aggregation": "sum_then_normalize", "scale_rewards": scale, "reward_weights": torch.ones(1)}
    first, last = 'if self.multi_objective_aggregation == "sum_then_normalize"', "# Unscorable completions (every"
    want = their_advantages(
        trl().GRPOTrainer, first, last, REWARDS, own, unscorable_mask=torch.zeros(REWARDS.numel(), dtype=torch.bool)
    )
    if scale == "group":  # to our epsilon
        std = REWARDS.std(1, keepdim=True)
        want = want * (std + 1e-4) / (std + 1e-6)
    got = make_algorithm(AlgorithmConfig(name=name), CorrectionConfig()).advantages(
        [rewarded(row) for row in REWARDS.tolist()]
    )
    torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), want)


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_rloo_s_advantages_are_trl_s(beta: float) -> None:
    """With the penalty in the reward too: there k1, summed over a sample's tokens."""
    g = torch.Generator().manual_seed(0)
    groups, old, ref = [], torch.zeros(REWARDS.numel(), 3), torch.zeros(REWARDS.numel(), 3)
    for n, row in enumerate(REWARDS.tolist()):
        samples = []
        for i, reward in enumerate(row):
            s = sample(f"p{n}", i, reward=reward)
            k = n * len(row) + i
            old[k], ref[k] = s.logprobs[s.loss_mask], -torch.rand(3, generator=g)
            stream = torch.zeros(5).masked_scatter(s.loss_mask, ref[k])
            samples.append(replace(s, streams={REFERENCE: stream}))
        groups.append(group(samples))
    names = {"old_per_token_logps": old.double(), "ref_per_token_logps": ref.double(), "gather": lambda x: x}
    want = their_advantages(
        trl().RLOOTrainer,
        "# Include the KL penalty in the reward",
        "is_std_zero = ",
        REWARDS,
        {"beta": beta, "normalize_advantages": False},
        completion_mask=torch.ones_like(old),
        **names,
    )
    config = AlgorithmConfig(name="rloo", kl_coefficient=beta, kl_in="reward") if beta else AlgorithmConfig(name="rloo")
    got = make_algorithm(config, CorrectionConfig()).advantages(groups)
    torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), want, rtol=1e-6, atol=1e-7)
