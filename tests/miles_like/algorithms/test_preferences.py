"""DPO, IPO and Bradley-Terry losses over packed pairs.

A preference loss that is wrong by a sign or a factor still falls while it trains. Oracles: closed forms, and what trl's
own trainers compute of the same log-probabilities and scores; gradients numerically. Not covered: where log-probs and
scores come from (test_reference_weights, test_scalar_head).
"""

from __future__ import annotations

import math
import pickle
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_like.algorithms.dpo import DpoLoss
from miles_like.algorithms.reward_model import BradleyTerryLoss
from miles_like.types import LossInputs
from tests.support.refusals import refuses

LENGTHS = (4, 6, 3, 5, 6, 2)  # three pairs
CU = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
T = sum(LENGTHS)
DPO = {
    "sigmoid": DpoLoss(beta=0.3),
    "conservative": DpoLoss(beta=0.3, label_smoothing=0.2),
    "ipo": DpoLoss(kind="ipo", beta=0.3),
}
# trl's names; its unpaired form of AOT is, of one pair at a time, conservative DPO
THEIRS = {"sigmoid": "sigmoid", "conservative": "aot_unpaired", "ipo": "ipo"}


def made(seed: int = 0) -> dict[str, Tensor]:
    """Log-probs of six samples, whose first half is the prompt."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.cat([torch.arange(n) >= n // 2 for n in LENGTHS])
    return {
        "logprobs": (-3 * torch.rand(T, generator=g)).requires_grad_(),
        "ref_logprobs": -3 * torch.rand(T, generator=g),
        "loss_mask": mask,
        "cu_seqlens": CU,
        "entropy": torch.rand(T, generator=g),
        "rollout_logprobs": torch.zeros(T),
        "advantages": torch.zeros(T),
    }


def of_pairs(loss: Tensor, mask: Tensor) -> Tensor:
    """[B] from [T]: each token carries its pair's loss."""
    values = [part[m].unique() for part, m in zip(loss.split(LENGTHS), mask.split(LENGTHS), strict=True)]
    assert all(len(v) == 1 for v in values)
    found = torch.cat(values).view(-1, 2)
    assert torch.equal(found[:, 0], found[:, 1])
    return found[:, 0]


def mean_over_pairs(loss: Tensor, mask: Tensor) -> Tensor:
    """As the trainer takes it under sequence means: each sample's mean over tokens, then over samples."""
    parts = zip(loss.split(LENGTHS), mask.split(LENGTHS), strict=True)
    return torch.stack([part[m].mean() for part, m in parts]).mean()


@pytest.fixture(scope="module")
def trl_dpo() -> Any:
    from trl.trainer.dpo_trainer import DPOTrainer

    return DPOTrainer


def their_dpo(trainer: Any, kind: str, given: dict[str, Tensor], pair: int, beta: float, smoothing: float) -> Tensor:
    """trl's `_compute_loss` of one pair, on a model that says our log-probs."""
    ends = CU.tolist()
    chosen, rejected = (slice(ends[i], ends[i + 1]) for i in (2 * pair, 2 * pair + 1))
    width = max(chosen.stop - chosen.start, rejected.stop - rejected.start)

    def padded(x: Tensor) -> Tensor:
        rows = [torch.nn.functional.pad(x[at].double(), (0, width - at.stop + at.start)) for at in (chosen, rejected)]
        return torch.stack(rows)

    mask = padded(given["loss_mask"])
    outputs = [SimpleNamespace(log_probs=padded(given[name]) * mask) for name in ("logprobs", "ref_logprobs")]
    for out in outputs:
        out.entropy = out.mean_logits = torch.zeros_like(mask)
        out.is_top1 = torch.zeros_like(mask, dtype=torch.bool)
    ours = SimpleNamespace(
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        ref_model=lambda **_: outputs[1],
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        args=SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=smoothing,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    ids = torch.zeros(2, width + 1, dtype=torch.int64)
    completion = torch.nn.functional.pad(mask, (1, 0)).long()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": completion}
    model: Any = torch.nn.Module()
    model.forward = lambda **_: outputs[0]
    loss: Tensor = trainer._compute_loss(ours, model, inputs, False)
    return loss


@pytest.mark.parametrize("name", DPO)
def test_dpo_is_trls(name: str, trl_dpo: Any) -> None:
    """Of each pair, the loss and its gradient."""
    given, fn = made(), DPO[name]
    loss, _ = fn(LossInputs(**given))
    theirs = [their_dpo(trl_dpo, THEIRS[name], given, i, fn.beta, fn.label_smoothing) for i in range(3)]
    assert of_pairs(loss.detach(), given["loss_mask"]).tolist() == pytest.approx([float(x) for x in theirs], rel=1e-5)
    mine = torch.autograd.grad(mean_over_pairs(loss, given["loss_mask"]), given["logprobs"])[0]
    other = torch.autograd.grad(torch.stack(theirs).mean(), given["logprobs"])[0]
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


def test_dpo_by_hand() -> None:
    """One token a sample: log-ratios 0.5 and -0.25 make h = 0.75; the policy that is the reference pays log 2."""
    given = {"loss_mask": torch.tensor([True, True]), "cu_seqlens": torch.tensor([0, 1, 2], dtype=torch.int32)}
    zeros = {k: torch.zeros(2) for k in ("entropy", "rollout_logprobs", "advantages")}
    logp, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.75])
    loss, stats = DpoLoss(beta=2.0)(LossInputs(logprobs=logp, ref_logprobs=ref, **given, **zeros))
    assert loss.tolist() == pytest.approx([math.log1p(math.exp(-1.5))] * 2)
    assert {k: float(s.total / s.count) for k, s in stats.items()} == pytest.approx(
        {
            "preference/accuracy": 1.0,
            "preference/margin": 1.5,
            "preference/reward_chosen": 1.0,
            "preference/reward_rejected": -0.5,
            "preference/logprob_chosen": -1.0,
            "preference/logprob_rejected": -2.0,
            "train/entropy": 0.0,
        }
    )
    still, _ = DpoLoss(beta=2.0, label_smoothing=0.1)(LossInputs(logprobs=ref, ref_logprobs=ref, **given, **zeros))
    assert still.tolist() == pytest.approx([math.log(2)] * 2)
    squared, _ = DpoLoss(kind="ipo", beta=2.0)(LossInputs(logprobs=logp, ref_logprobs=ref, **given, **zeros))
    assert squared.tolist() == pytest.approx([(0.75 - 0.25) ** 2] * 2)


def test_a_reward_model_is_trls() -> None:
    """`RewardTrainer.compute_loss` on a model that says our scores: with the centre term too."""
    from trl.trainer.reward_trainer import RewardTrainer

    given = made() | {"loss_mask": torch.cat([torch.arange(n) == n - 1 for n in LENGTHS])}
    scores = given["logprobs"][CU[1:].long() - 1]  # [N], chosen first in each pair
    ours = SimpleNamespace(
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        args=SimpleNamespace(center_rewards_coefficient=0.03),
        accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    batch = {"attention_mask": torch.ones(6, 2)}
    head_output = torch.cat([scores[::2], scores[1::2]])[:, None].double()
    theirs = RewardTrainer.compute_loss(ours, lambda **_: SimpleNamespace(logits=head_output), batch)
    loss, stats = BradleyTerryLoss(center_coefficient=0.03)(LossInputs(**given))
    mine = mean_over_pairs(loss, given["loss_mask"])
    assert float(mine) == pytest.approx(float(theirs), rel=1e-6)
    grads = [torch.autograd.grad(x, given["logprobs"])[0] for x in (mine, theirs)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-7)
    logged = ours._metrics["train"]
    assert float(stats["preference/accuracy"].total / 3) == pytest.approx(logged["accuracy"][0])
    assert float(stats["preference/margin"].total / 3) == pytest.approx(logged["margin"][0], rel=1e-5)


@pytest.mark.parametrize("fn", [*DPO.values(), BradleyTerryLoss(center_coefficient=0.1)], ids=str)
def test_gradients_are_numeric_ones(fn: Any) -> None:
    given = made(1)

    def mean(logprobs: Tensor) -> Tensor:
        loss, _ = fn(LossInputs(**given | {"logprobs": logprobs}))
        return mean_over_pairs(loss.double(), given["loss_mask"])

    x = given["logprobs"].detach()
    mine = torch.autograd.functional.jacobian(mean, x)
    step = 1e-2
    for t in range(0, T, 3):
        more, less = (x.index_add(0, torch.tensor([t]), torch.tensor([s])) for s in (step, -step))
        assert float(mine[t]) == pytest.approx(float(mean(more) - mean(less)) / (2 * step), rel=2e-2, abs=1e-4)


def test_every_figure_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    for fn in (*DPO.values(), BradleyTerryLoss()):
        for key in fn(LossInputs(**made()))[1]:
            assert f"`{key}`" in page, key


def test_what_fills_up_a_row_teaches_nothing_and_half_a_pair_is_refused() -> None:
    one = {k: v[:1] for k, v in made().items()} | {"cu_seqlens": torch.tensor([0, 1], dtype=torch.int32)}
    one["loss_mask"] = torch.tensor([False])
    for fn in (*DPO.values(), BradleyTerryLoss()):
        loss, stats = fn(LossInputs(**one))
        assert loss.tolist() == [0.0] and all(float(s.count) == 0 for s in stats.values())
        loss.sum().backward()  # the schedule does, so there must be a graph
        with refuses(ValueError, 3, "True"):
            fn(LossInputs(**made() | {"cu_seqlens": torch.tensor([0, 4, 10, T], dtype=torch.int32)}))
        assert pickle.loads(pickle.dumps(fn)) == fn
    with refuses(ValueError, "DPO"):
        DpoLoss()(LossInputs(**made() | {"ref_logprobs": None}))
