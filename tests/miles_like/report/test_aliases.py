"""Names of other frameworks beside the run's own.

`foreign_metrics.json` has the names that verl 0.9.0 and slime 0.3.1 write, read from their sources; the formulas below
are those of their sources, written down again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import torch

from miles_like.algorithms.losses.clipped import ClippedLoss
from miles_like.algorithms.losses.value import ValueLoss, critic_metrics
from miles_like.algorithms.terms.mismatch import finish
from miles_like.config.sections.watched.report import OtherNames
from miles_like.report.aliases import ALIASES, Aliased, aliased
from miles_like.report.metrics import TIMINGS
from miles_like.report.rows import read_metrics
from miles_like.report.sinks import JsonlSink
from miles_like.types import RETURNS, VALUES, LossInputs, LossOutput, Reduce

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
FOREIGN = json.loads(Path(__file__).with_name("foreign_metrics.json").read_text())
ROW = {
    "rollout/reward/mean": 0.5,
    "train/entropy": 1.0,
    "train/clip_frac/low": 0.25,
    "train/clip_frac/high": 0.5,
    "perf/experience_s": 2.0,
    "perf/step_s": 9.0,
    "eval/a.b/avg@8": 0.25,
    "eval/a.b/pass@8": 1.0,
}


def test_an_alias_has_the_value_of_its_metric() -> None:
    """A sum has all of its parts, or there is none of it."""
    assert aliased(3, ROW, ["verl"]) == {
        "training/global_step": 3.0,
        "critic/score/mean": 0.5,
        "critic/rewards/mean": 0.5,
        "actor/entropy": 1.0,
        "actor/pg_clipfrac": 0.75,
        "perf/time_per_step": 9.0,
        "timing_s/step": 9.0,
        "val-core/a.b/reward/mean@8": 0.25,
    }
    assert aliased(3, ROW, ["slime"]) == {
        "rollout/raw_reward": 0.5,
        "train/entropy_loss": 1.0,
        "train/pg_clipfrac": 0.75,
        "perf/step_time": 9.0,
        "eval/a.b": 0.25,
        "eval/a.b-pass@8": 1.0,
    }
    assert aliased(3, ROW, []) == {}


def test_a_run_has_them_on_request_beside_its_own(tmp_path: Path) -> None:
    sink = Aliased(JsonlSink(tmp_path / "metrics.jsonl"), ("verl", "slime"))
    sink.write(3, ROW)
    sink.close()
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row == {"step": 3.0, **ROW, **aliased(3, ROW, ["verl", "slime"])}
    plain = Aliased(JsonlSink(tmp_path / "plain.jsonl"), ())
    plain.write(3, ROW)
    plain.close()
    assert json.loads((tmp_path / "plain.jsonl").read_text()) == {"step": 3, **ROW}


def test_aliases_are_of_documented_metrics_and_collide_with_none() -> None:
    assert set(ALIASES) == set(get_args(OtherNames))
    for names in ALIASES.values():
        of = {alias: (keys,) if isinstance(keys, str) else keys for alias, keys in names.items()}
        assert not [key for keys in of.values() for key in keys if f"`{key}`" not in PAGE]
        assert not [alias for alias in names if f"| `{alias}`" in PAGE]
        timed = {alias for alias, keys in of.items() if any(key.startswith(TIMINGS) for key in keys)}
        assert all(alias.startswith(TIMINGS) for alias in timed), "they differ between two runs with the same bits"


def test_the_other_framework_writes_every_alias() -> None:
    for name, names in ALIASES.items():
        (written,) = [set(names) for source, names in FOREIGN.items() if source.startswith(f"{name} ")]
        assert set(names) <= written, f"{name} has no {sorted(set(names) - written)}"
        assert f"{name} {next(s for s in FOREIGN if s.startswith(name)).split()[1]}" in PAGE


def inputs(**streams: torch.Tensor) -> LossInputs:
    """400 tokens, some of them without loss."""
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(400, generator=g) * 3
    moved = old + 0.7 * torch.randn(400, generator=g)
    return LossInputs(
        logprobs=moved,
        entropy=torch.rand(400, generator=g),
        rollout_logprobs=old + 0.05 * torch.randn(400, generator=g),
        old_logprobs=old,
        ref_logprobs=None,
        advantages=torch.randn(400, generator=g),
        loss_mask=torch.rand(400, generator=g) < 0.7,
        cu_seqlens=torch.tensor([0, 150, 400], dtype=torch.int32),
        streams=streams,
    )


def row_of(output: LossOutput) -> dict[str, float]:
    return {n: float(s.total / s.count if s.reduce is Reduce.MEAN else s.total) for n, s in output[1].items()}


def assert_close(found: dict[str, float], want: dict[str, torch.Tensor]) -> None:
    for alias, value in want.items():
        torch.testing.assert_close(found[alias], float(value), rtol=1e-4, atol=1e-6, msg=alias)


def test_aliases_of_the_policys_loss_have_the_definitions_of_verl_and_slime() -> None:
    """verl's core_algos.compute_policy_loss_vanilla and rollout_corr_helper, slime's ppo_utils.compute_policy_loss."""
    x = inputs()
    assert x.old_logprobs is not None
    mask, a = x.loss_mask, x.advantages
    own = finish(row_of(ClippedLoss(clip_low=0.2, clip_high=0.28, clip_dual=3.0)(x)))
    log_ratio = x.logprobs - x.old_logprobs
    ratio = log_ratio.exp()
    losses, clipped = -a * ratio, -a * ratio.clamp(0.8, 1.28)
    worse = torch.maximum(losses, clipped)
    rho = x.old_logprobs - x.rollout_logprobs
    gap = (x.old_logprobs.exp() - x.rollout_logprobs.exp()).abs()
    verl = {
        "actor/pg_loss": torch.where(a < 0, torch.min(-a * 3.0, worse), worse)[mask].mean(),
        "actor/ppo_kl": -log_ratio[mask].mean(),
        "actor/pg_clipfrac": (clipped > losses)[mask].float().mean(),
        "actor/pg_clipfrac_lower": ((worse > -a * 3.0) & (a < 0))[mask].float().mean(),
        "rollout_corr/kl": -rho[mask].mean(),
        "rollout_corr/k3_kl": (rho.exp() - rho - 1)[mask].mean(),
        "rollout_corr/chi2_token": rho.exp().square()[mask].mean() - 1,
        "training/rollout_probs_diff_mean": gap[mask].mean(),
    }
    assert verl["actor/pg_clipfrac_lower"] > 0 and verl["actor/pg_clipfrac"] > 0
    assert_close(aliased(1, own, ["verl"]), verl)
    slime = {
        "train/ppo_kl": verl["actor/ppo_kl"],
        "train/pg_clipfrac": verl["actor/pg_clipfrac"],
        "train/train_rollout_logprob_abs_diff": rho.abs()[mask].mean(),
    }
    assert_close(aliased(1, own, ["slime"]), slime)


def test_aliases_of_the_critic_have_the_definitions_of_verl() -> None:
    """core_algos.compute_value_loss, half of the mean clipped square, and metric_utils.compute_data_metrics, whose
    explained variance leaves out a bias of the values: here there is none."""
    g = torch.Generator().manual_seed(1)
    before, returns = torch.randn(400, generator=g), torch.randn(400, generator=g)
    x = inputs(**{VALUES: before, RETURNS: returns})
    mask = x.loss_mask
    returns[mask] += (x.logprobs - returns)[mask].mean()
    own = critic_metrics(row_of(ValueLoss(value_clip=0.5)(x)))
    near = torch.clamp(x.logprobs, before - 0.5, before + 0.5)
    error, clipped = (x.logprobs - returns).square(), (near - returns).square()
    verl = {
        "critic/vf_loss": 0.5 * torch.maximum(error, clipped)[mask].mean(),
        "critic/vf_clipfrac": (clipped > error)[mask].float().mean(),
        "critic/vpred_mean": x.logprobs[mask].mean(),
        "critic/returns/mean": returns[mask].mean(),
        "critic/vf_explained_var": 1 - (returns - x.logprobs)[mask].var() / returns[mask].var(),
    }
    assert_close(aliased(1, own, ["verl"]), verl)
