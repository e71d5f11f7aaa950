"""Checks with the trainer's own routers that the replayed experts belong to the step's tokens and layers.

Checksums prove that routes arrive as they were sent, but not that the server sent the right routes. The trainer's
routers can show that: for the right rows they choose the recorded experts except for near-ties; for another token's or
another layer's routes the overlap is no larger than chance. So the share of recorded experts that the routers choose
too, over all ranks and without padding, must reach a bound, for each layer and over all layers.

A layer's bound lies above the share that neighbouring rows of that layer have in common in the same step. Neighbouring
tokens often share far more than the K / E of random sets (up to 0.8 was measured in untrained models), so a fixed bound
would be too low for one model or too high for another. Agreement beyond the neighbours' is therefore measured as in
Cohen's kappa (Educational and Psychological Measurement 20, 1960): (agreement - neighbours) / (1 - neighbours), 1 for
full agreement, 0 where rows agree no better than with their neighbours. The bound is half of the kappa that the
precision explains. Swapped layers share K / E; shifted rows share what neighbours share, and have a neighbour with the
right routes, which raises the bound. Where nearly all rows are alike they cannot be distinguished, so no layer needs
more than `_SUFFICIENT`.
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
_SUFFICIENT = 0.95  # a share that is enough for a layer even if its neighbouring rows share more

_UNCHANGED = (
    "The weights are unchanged and nothing of this step is published: --resume continues from the latest "
    "checkpoint, and `miles-like verify` searches for the cause; mismatch.expert_agreement_min and "
    "mismatch.layer_agreement_min set the bounds"
)


class RoutingBreach(RuntimeError):
    """The replayed routes do not belong to the step's tokens and layers; no weight has changed."""


def agreement_stats(layers: Mapping[int, RouteCounts], top_k: int, *, updated: bool) -> dict[str, Stat]:
    """Means over the rows of each layer (global numbers from 0) and over all layers. `updated`: an old-log-prob pass
    came before, so weights may have changed since, and only `routing/update_agreement` is measured."""
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
    """Raise RoutingBreach, naming `where` (the step) and the layers, if a bound is missed. metrics: `agreement_stats`
    after reduction; `layers`: those that replay routes, each of which needs a measurement unless both bounds are 0.
    All ranks raise or none does, since the metrics are equal on all."""
    replaying = sorted(layers)
    if not replaying or (bounds.overall == 0 and bounds.layer == 0):
        return
    unmeasured = [i for i in replaying if f"{EXPERTS}/{i}" not in metrics]
    if unmeasured or EXPERTS not in metrics:
        which = ", ".join(f"layer {i}" for i in unmeasured[:_SHOWN]) or "all layers together"
        more = f" and {len(unmeasured) - _SHOWN} more" if len(unmeasured) > _SHOWN else ""
        raise RoutingBreach(
            f"{where}: the agreement of the replayed routes with the trainer's own was not measured for {which}{more}, "
            f"so they may belong to other tokens or layers. {_UNCHANGED}"
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
        f"{where}: the replayed routes do not belong to these tokens and layers: the trainer's routers choose a share "
        f"of {overall:.6g} of the recorded experts over all layers (bound {bounds.overall:.6g}); {named}{more}. "
        f"{_UNCHANGED}"
    )


def layer_bound(bounds: AgreementConfig, neighbours: float) -> float:
    """The bound of one layer. neighbours: the share of experts that neighbouring rows of the layer have in common."""
    if bounds.layer is not None:
        return bounds.layer
    return min(neighbours + (1 - neighbours) * bounds.explained / 2, _SUFFICIENT)
