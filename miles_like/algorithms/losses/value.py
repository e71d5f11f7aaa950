"""The critic's loss.

Letters: N samples a micro-batch, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from miles_like.algorithms.terms.mismatch import mean_stat
from miles_like.types import RETURNS, VALUES, LossInputs, LossOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2, c = `value_clip` (arXiv:2005.12729; halved, as in
    verl). v is the critic's current value, v_old its value before the rollout's first step, R the return.

    The larger error counts: a value that moved towards its return by more than c has no gradient, one that moved away
    from it always has.
    """

    value_clip: float

    def __post_init__(self) -> None:
        if not self.value_clip > 0:
            raise ValueError(f"value_clip {self.value_clip} must be above 0")

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """[T] loss, 0 where not `loss_mask`, and `critic/...` over loss tokens. `inputs.logprobs` are the values v; the
        streams VALUES and RETURNS, [T] fp32, are read, and no other log-probabilities."""
        loss_mask, streams = inputs.loss_mask, inputs.streams
        assert VALUES in streams and RETURNS in streams, (
            f"a critic needs the streams of old values and returns, but got {list(streams)}"
        )
        values = torch.where(loss_mask, inputs.logprobs, 0.0)
        before, returns = (torch.where(loss_mask, streams[name], 0.0) for name in (VALUES, RETURNS))
        near = before + (values - before).clamp(-self.value_clip, self.value_clip)
        error, clipped = (values - returns).square(), (near - returns).square()
        loss = torch.maximum(error, clipped) / 2
        return loss, {
            "critic/loss": mean_stat(loss, loss_mask),
            "critic/clip_frac": mean_stat(clipped > error, loss_mask),
            "critic/value/mean": mean_stat(values, loss_mask),
            "critic/return/mean": mean_stat(returns, loss_mask),
            _ERROR_SQUARE: mean_stat(error, loss_mask),
            _RETURN_SQUARE: mean_stat(returns.square(), loss_mask),
        }


def critic_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics of the critic's trainer -> the logged metrics, all under `critic/...`: the critic's statistics, with the
    explained variance 1 - mean (R - v)^2 / var R in place of the means that it is computed from, and the optimizer's
    grad_norm, lr and skipped."""
    out = {key: value for key, value in metrics.items() if key.startswith("critic/")}
    error, square = out.pop(_ERROR_SQUARE, None), out.pop(_RETURN_SQUARE, None)
    if error is not None and square is not None:
        variance = square - out["critic/return/mean"] ** 2
        if variance > 0:
            out["critic/explained_variance"] = 1 - error / variance
    return out | {f"critic/{name}": metrics[f"train/{name}"] for name in _OPTIMIZER if f"train/{name}" in metrics}


_ERROR_SQUARE, _RETURN_SQUARE = "critic/error_sq", "critic/return_sq"
_OPTIMIZER = ("grad_norm", "lr", "skipped")
