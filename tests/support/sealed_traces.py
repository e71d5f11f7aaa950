"""A sample's tokens and sealed routes, for the laws of what is refused, and how a refusal reads.

Letters: S tokens, k experts a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from routing_replay.ids import id_dtype
from routing_replay.trace import RoutingTrace
from routing_replay.versions import VersionSpan
from tests.support.refusals import refuses

LAYERS = (1, 2, 3, 5)
ALL = "1, 2, 3, 5"
DRAWN = "hypothesis draws the values"


def made(
    seed: int, *, tokens: int = 12, experts: int = 16, k: int = 4, sealed: bool = True
) -> tuple[Tensor, RoutingTrace]:
    """Tokens [S] and their trace [S-1, 4, k]."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens - 1, len(LAYERS), experts, generator=g).argsort(-1)[..., :k].to(id_dtype(experts))
    trace = RoutingTrace(experts=ids, layers=LAYERS, num_experts=experts)
    fed = torch.randint(0, 50, (tokens,), generator=g)
    return fed, trace.with_checksums(fed[:-1], versions=(VersionSpan(0, 0, tokens - 1),)) if sealed else trace


def refused(
    trace: RoutingTrace, tokens: Tensor, *facts: object, layer: object, position: int, unrecorded: str = ""
) -> str:
    """Asserts that the trace is refused for these tokens, with the layers and the first position that are wrong.
    Returns the message."""
    with refuses(ValueError, "p7/3", layer, position, *facts, unrecorded=unrecorded) as raised:
        trace.check_tokens(tokens, sample="p7/3")
    return str(raised.value)
