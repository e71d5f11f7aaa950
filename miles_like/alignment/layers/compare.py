"""The first layer at which the residual streams of trainer and rollout differ by more than the precision explains.

Both sides computed the same text with the same experts, so that no flipped expert hides in the difference. A difference
in one layer reaches all layers after it. Therefore each part of a layer (attention; MLP or experts) is held to what it
adds: the change of the stream that it makes may differ by what its inputs differ already, times `_GAIN`, and by
`_ROUNDINGS` roundings, of the change and of the stream that it is added to.

States are numbered as in rollout/wire/layer_states.py. Letters: S tokens, L layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Measured on random models of both shapes (tests/laws/test_first_layer_that_differs.py): healthy parts reach a third of
# the bound that both give.
_GAIN = 3.0
_ROUNDINGS = 3.0


def part_name(state: int) -> str:
    """Of the part of the model that makes this state from the one before."""
    if not state:
        return "the embedding"
    return f"the {'attention' if state % 2 else 'MLP'} of layer {(state - 1) // 2}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDifference:
    """Of one part of the model, at the token at which it is largest."""

    state: int
    difference: float  # of the change that the part makes, relative to the change
    explained: float  # relative to the change
    stream: float  # relative difference of the stream after it, median over tokens

    @property
    def share(self) -> float:
        """Of what is explained; above 1 the part differs. A nan differs."""
        if self.difference == 0:
            return 0.0
        return self.difference / self.explained if self.explained else float("inf")

    @property
    def differs(self) -> bool:
        return not self.share <= 1

    @property
    def name(self) -> str:
        return part_name(self.state)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerComparison:
    """Of one server."""

    url: str
    tokens: int
    parts: Sequence[PartDifference]  # [2L+1]

    @property
    def first(self) -> PartDifference | None:
        """The first part that differs."""
        return next((part for part in self.parts if part.differs), None)

    def sentence(self) -> str:
        """Names the first part; only of a comparison that has one."""
        first = self.first
        assert first is not None
        return (
            f"{first.name} is the first that differs on server {self.url}: its change of the residual stream "
            f"differs by a share of {first.difference:.2g}, but the precision explains only {first.explained:.2g}"
        )


def compare_states(trainer: Tensor, rollout: Tensor, *, rounding: float, of_stream: float) -> list[PartDifference]:
    """trainer, rollout: [S, 2L+1, H]. rounding, of_stream: relative error of one rounding in a part, and of the stream;
    0 where both sides compute the same bits. The tokens that a part attends to may differ more than its own, so that
    all up to it count as its inputs."""
    a, b = trainer.double(), rollout.double()
    apart = (a - b).norm(dim=-1)  # [S, 2L+1]
    size = b.norm(dim=-1)
    change = torch.cat([b[:, :1], b.diff(dim=1)], 1)
    made = change.norm(dim=-1)
    error = torch.cat([(a - b)[:, :1], (a - b).diff(dim=1)], 1).norm(dim=-1)
    relative = torch.where(apart == 0, 0.0, apart / size)  # a token whose embedding is zero has no stream to compare
    inputs = torch.cat([torch.zeros_like(relative[:, :1]), relative[:, :-1]], 1).cummax(0).values
    explained = _GAIN * inputs * made + _ROUNDINGS * (rounding * made + of_stream * size)
    return [_worst(i, error[:, i], explained[:, i], made[:, i], relative[:, i]) for i in range(a.shape[1])]


def _worst(state: int, error: Tensor, explained: Tensor, made: Tensor, relative: Tensor) -> PartDifference:
    """At the token whose error is the largest share of what is explained."""
    share = torch.where(error == 0, 0.0, error / explained).nan_to_num(torch.inf, torch.inf)
    at = int(share.argmax())
    change = made[at].clamp(min=torch.finfo(torch.float32).tiny)
    return PartDifference(
        state=state,
        difference=float(error[at] / change),
        explained=float(explained[at] / change),
        stream=float(relative.median()),
    )
