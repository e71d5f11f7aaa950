"""What a trainer rank of a layout holds at least, by a few products: layouts above a device's memory are not tried.

`planning` has the whole arithmetic, which takes a hundred times longer and decides about every layout that is ranked.
"""

from __future__ import annotations

from dataclasses import dataclass

from miles_like.device_table import GIB, Device
from miles_like.layout_search.space import Layout
from miles_like.timing.layers import BF16
from miles_like.timing.shape import ModelShape
from miles_like.timing.train import MASTER, Memo, TrainSetup, parameters_of_rank

LIBRARIES = 3 * GIB  # CUDA's context and communicators take more


@dataclass(frozen=True, slots=True)
class Floor:
    """A lower bound for one model on one device. tokens: of a rank's micro-batch; rounded: bytes of a rounded copy of a
    parameter that QAT keeps, 0 without; rows: tokens of an optimizer step."""

    shape: ModelShape
    device: Device
    tokens: int
    rounded: float
    rows: float

    def fits(self, layout: Layout, setup: TrainSetup, memo: Memo) -> bool:
        return self.nbytes(layout, setup, memo) + LIBRARIES <= self.device.memory

    def nbytes(self, layout: Layout, setup: TrainSetup, memo: Memo) -> float:
        """Parameters, gradients, optimizer state that is not on the host, rounded weights, and activations."""
        held, owned = parameters_of_rank(self.shape, setup, memo)
        state = held * (BF16 + setup.gradient_bytes * setup.trained + self.rounded)
        state += 3 * MASTER * owned * (1 - layout.offload)
        return state + self._activations(layout)

    def _activations(self, layout: Layout) -> float:
        """The first stage's layers keep their inputs for as many micro-batches as there are stages, or as a rank has;
        without recomputation also what attention and experts multiply."""
        p = layout.parallel
        kept = BF16 * self.tokens / p.tp
        layer = kept * self.shape.hidden
        if layout.recompute == "none":
            layer += kept * (self.shape.core + self.shape.kv_channels)
            if self.shape.is_moe:
                layer += kept * self.shape.top_k * (self.shape.hidden + self.shape.expert_ffn) / p.etp
        in_flight = min(float(p.pp), max(1.0, self.rows / p.dp / (self.tokens * p.cp)))
        return layer * (self.shape.layers // p.pp) * in_flight
