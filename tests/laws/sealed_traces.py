"""A sample's tokens and sealed routes, for the laws of what is refused, and how a refusal reads.

Letters: S tokens, k experts a token.
"""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from routing_replay.ids import id_dtype
from routing_replay.trace import RoutingTrace
from routing_replay.versions import VersionSpan

LAYERS = (1, 2, 3, 5)
ALL = r"layers 1, 2, 3, 5"


def made(
    seed: int, *, tokens: int = 12, experts: int = 16, k: int = 4, sealed: bool = True
) -> tuple[Tensor, RoutingTrace]:
    """Tokens [S] and their trace [S-1, 4, k]."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens - 1, len(LAYERS), experts, generator=g).argsort(-1)[..., :k].to(id_dtype(experts))
    trace = RoutingTrace(experts=ids, layers=LAYERS, num_experts=experts)
    fed = torch.randint(0, 50, (tokens,), generator=g)
    return fed, trace.seal(fed[:-1], versions=(VersionSpan(0, 0, tokens - 1),)) if sealed else trace


def refused(trace: RoutingTrace, tokens: Tensor, *, layer: str, position: int, what: str) -> None:
    with pytest.raises(ValueError) as caught:
        trace.verify(tokens, sample="p7/3")
    said = str(caught.value)
    assert said.startswith(f"sample p7/3, {layer}, position {position}: "), said
    assert re.search(what, said), said
