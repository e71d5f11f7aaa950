"""Records the residual stream of this rank's layers in one forward pass.

State 0 is the embedding; of layer i (its number in the whole model), state 2i + 1 is the stream after its attention and
2i + 2 after its MLP or experts.

Letters: rows of a micro-batch on this rank, n states of this rank, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.model.build import unwrap
from miles_like.types import LayerStates
from routing_replay.replay import FedRows


class StateRecorder:
    """A context in which hooks on the layers record. micro: the micro-batch whose forward is running."""

    def __init__(self, chunks: Sequence[Any], micro: Callable[[], int]) -> None:
        self._chunks, self._micro = chunks, micro
        self._seen: dict[tuple[int, int], Tensor] = {}  # (micro-batch, state) -> [rows, H]
        self._hooks = ExitStack()

    def __enter__(self) -> StateRecorder:
        for layer in (layer for chunk in self._chunks for layer in unwrap(chunk).decoder.layers):
            i = layer.layer_number - 1
            hooks = [
                layer.pre_mlp_layernorm.register_forward_pre_hook(partial(self._norm, 2 * i + 1)),
                layer.register_forward_hook(partial(self._after, 2 * i + 2)),
            ]
            if i == 0:
                hooks.append(layer.register_forward_pre_hook(self._before, with_kwargs=True))
            for hook in hooks:
                self._hooks.callback(hook.remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.close()

    def _keep(self, state: int, stream: Tensor) -> None:
        self._seen[self._micro(), state] = stream.detach()[:, 0].cpu()  # [rows, 1, H]

    def _norm(self, state: int, _: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._keep(state, inputs[0])

    def _after(self, state: int, _: torch.nn.Module, inputs: object, output: tuple[Tensor, object]) -> None:
        self._keep(state, output[0])

    def _before(self, _: torch.nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        self._keep(0, inputs[0] if inputs else named["hidden_states"])

    def states(self, fed: Sequence[FedRows]) -> list[LayerStates]:
        """The states of each micro-batch. fed: its rows."""
        return [self._of(micro, rows) for micro, rows in enumerate(fed)]

    def _of(self, micro: int, fed: FedRows) -> LayerStates:
        found = {state: stream for (of, state), stream in self._seen.items() if of == micro}
        ours = tuple(sorted(found))
        assert all(len(stream) == len(fed.tokens) for stream in found.values()), "layers see the rows that were fed"
        return LayerStates(fed=fed, states=ours, values=torch.stack([found[state] for state in ours], 1))
