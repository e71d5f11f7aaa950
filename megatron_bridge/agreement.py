"""Whether the experts that a step replays are those of its tokens and layers: judged by the trainer's own routers.

Seals prove that routes arrive as they were sent. They cannot prove that the server sent the right ones. The trainer's
routers can: for the right rows they choose the recorded experts but for near-ties, for another token's or another
layer's they share no more with them than chance. So the share of recorded experts that the routers choose too, over all
ranks and without padding, is held to a bound, for each layer and for all together.

A layer's bound is set above what neighbouring rows of that layer share in that very step. Neighbouring tokens often
share far more than the K / E of random sets (up to 0.8 was measured in models that were never trained), so a fixed
bound would be too low for one model or too high for another. Agreement beyond the neighbours' is therefore measured as
Cohen's kappa does (Educational and Psychological Measurement 20, 1960): (agreement - neighbours) / (1 - neighbours), 1
where all agree, 0 where rows agree no better than with their neighbours. The bound is half of the kappa that the
precision explains. Exchanged layers share K / E; shifted rows share what neighbours do, and have a neighbour with the
right routes, which raises the bound. Where nearly all rows are alike nothing tells them apart: no layer needs more than
`_SURE`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megatron_bridge.config import AgreementConfig
from miles_like.types import Stat
from routing_replay.agreement import RouteCounts

COVERAGE = "routing/replay_coverage"
SETS = "routing/agreement"
EXPERTS = "routing/expert_agreement"  # of all layers; EXPERTS/{layer} of one
NEIGHBOURS = "routing/neighbour_agreement"  # NEIGHBOURS/{layer}
_SHOWN = 4  # layers that a message lists
_SURE = 0.95  # share that is enough for a layer, whatever its neighbouring rows share

_UNCHANGED = (
    "The weights are unchanged and nothing of this step is published: --resume goes on from the last checkpoint, "
    "`miles-like verify` looks for the cause; mismatch.expert_agreement_min and mismatch.layer_agreement_min set the "
    "bounds"
)


class RoutingBreach(RuntimeError):
    """The routes that a step replays are not those of its tokens and layers; no weight was touched."""


def agreement_stats(layers: Mapping[int, RouteCounts], top_k: int, *, updated: bool) -> dict[str, Stat]:
    """Means over the rows of each layer (global numbers from 0) and of all. `updated`: after an old-log-prob pass the
    weights may have moved since, so only `routing/update_agreement` is measured."""
    if not layers:
        return {}
    every = layers.values()
    sets = _stat(sum(c.same_sets for c in every), sum(c.rows for c in every))
    if updated:
        return {"routing/update_agreement": sets}
    out = {SETS: sets, EXPERTS: _stat(sum(c.shared for c in every), top_k * sum(c.rows for c in every))}
    for layer, c in layers.items():
        out[f"{EXPERTS}/{layer}"] = _stat(c.shared, top_k * c.rows)
        out[f"{NEIGHBOURS}/{layer}"] = _stat(c.shared_with_neighbour, top_k * c.pairs)
    return out


def _stat(total: float, count: float) -> Stat:
    return Stat(torch.tensor(total, dtype=torch.float64), torch.tensor(count, dtype=torch.float64))


def check_routes(metrics: Mapping[str, float], bounds: AgreementConfig, layers: Iterable[int], where: str) -> None:
    """Raises RoutingBreach naming `where` (the step) and the layers. metrics: of `agreement_stats`, reduced; `layers`:
    those that replay routes, each of which must have a figure, unless both bounds are 0. The same on every rank, since
    the metrics are."""
    replaying = sorted(layers)
    if not replaying or (bounds.overall == 0 and bounds.layer == 0):
        return
    unmeasured = [i for i in replaying if f"{EXPERTS}/{i}" not in metrics]
    if unmeasured or EXPERTS not in metrics:
        which = ", ".join(f"layer {i}" for i in unmeasured[:_SHOWN]) or "all layers together"
        more = f" and {len(unmeasured) - _SHOWN} more" if len(unmeasured) > _SHOWN else ""
        raise RoutingBreach(
            f"{where}: no agreement of the replayed routes with the trainer's own was measured for {which}{more}, so "
            f"they may belong to other tokens or layers. {_UNCHANGED}"
        )
    overall = metrics[EXPERTS]
    shares = {int(k.rpartition("/")[2]): v for k, v in metrics.items() if k.startswith(f"{EXPERTS}/")}
    limits = {i: layer_bound(bounds, metrics.get(f"{NEIGHBOURS}/{i}", 0.0)) for i in shares}
    low = sorted((i for i in shares if not shares[i] >= limits[i]), key=lambda i: shares[i] - limits[i])
    if not low and overall >= bounds.overall:
        return
    worst = low or sorted(shares, key=lambda i: shares[i])[:1]
    named = ", ".join(f"layer {i} {shares[i]:.6g} (bound {limits[i]:.6g})" for i in sorted(worst[:_SHOWN]))
    more = f" and {len(worst) - _SHOWN} more" if len(worst) > _SHOWN else ""
    raise RoutingBreach(
        f"{where}: the replayed routes are not those of these tokens and layers: of the experts that the rollout "
        f"recorded, the trainer's routers choose {overall:.6g} over all layers (bound {bounds.overall:.6g}); "
        f"{named}{more}. {_UNCHANGED}"
    )


def layer_bound(bounds: AgreementConfig, neighbours: float) -> float:
    """neighbours: the share of experts that neighbouring rows of the layer have in common."""
    if bounds.layer is not None:
        return bounds.layer
    return min(neighbours + (1 - neighbours) * bounds.explained / 2, _SURE)
