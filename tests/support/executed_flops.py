"""Floating-point operations that one rank of the trainer executes for a micro-batch, recomputation included.

`megatron_bridge/plan/flops.py` has the model's FLOPs, which utilization is reported in. These are what a counter sees:
products by weights ("linears"), and attention as a fused kernel computes it ("core attention"), with the masked half
skipped and its scores computed again in backward.
"""

from __future__ import annotations

from miles_like.timing.layers import ATTENTION_BACKWARD, LayerSetup
from miles_like.timing.shape import ModelShape
from miles_like.timing.train import Stage, stages_of


def executed_flops(
    shape: ModelShape, setup: LayerSetup, stage: int, *, tokens: float, pairs: float, loss_rows: float
) -> dict[str, float]:
    """ "linears" and "core attention" of a rank of pipeline stage `stage`.

    tokens, pairs, loss_rows: of a micro-batch over its context-parallel ranks; pairs: of a query and a key that it
    attends, n (n + 1) / 2 of a sample of n tokens. The rank's experts get `setup.imbalance` times the mean of tokens.
    """
    p = setup.parallel
    found = stages_of(shape, p, setup.mtp)[stage]
    layers = found.dense + found.moe
    per_layer = _forward_of_layers(shape, setup, found, tokens)
    if stage == p.pp - 1:
        per_layer["mtp inputs"] = setup.mtp * 4.0 * tokens / p.cp * shape.hidden * shape.hidden / p.tp
    gradients = 1 if setup.adapters else 2
    linears = (1 + gradients) * sum(per_layer.values()) + _again(per_layer, setup)
    if stage == p.pp - 1:
        # logits once more in backward, where they are not kept
        linears += (1 + setup.mtp) * (2 + gradients) * 2 * loss_rows / p.cp * shape.hidden * shape.vocab / p.tp
    core = layers * 2 * pairs * shape.core / (p.tp * p.cp)
    passes = 1 + ATTENTION_BACKWARD + (setup.recompute == "full" or "core_attn" in _selected(setup))
    return {"linears": linears, "core attention": passes * core}


def _forward_of_layers(shape: ModelShape, setup: LayerSetup, stage: Stage, tokens: float) -> dict[str, float]:
    """FLOPs of one forward of a stage's layers by module."""
    p = setup.parallel
    layers, mine, kept = stage.dense + stage.moe, tokens / p.cp, tokens / (p.tp * p.cp)
    routed = kept * shape.top_k * (setup.imbalance if p.ep > 1 else 1.0)
    return {
        "projections": 2.0 * layers * mine * (shape.attention - shape.up) / p.tp,
        "mla_up_proj": 2.0 * layers * mine * shape.up / p.tp,
        "mlp": 2.0 * stage.dense * mine * shape.dense / p.tp,
        "moe": 2.0 * stage.moe * (routed * shape.expert + kept * shape.router),
        "shared_experts": 2.0 * stage.moe * mine * shape.shared / p.tp,
    }


def _again(modules: dict[str, float], setup: LayerSetup) -> float:
    if setup.recompute == "full":
        return sum(modules.values())
    selected = _selected(setup)
    return sum(flops for name, flops in modules.items() if name in selected)


def _selected(setup: LayerSetup) -> frozenset[str]:
    if setup.recompute != "selective":
        return frozenset()
    return setup.again | ({"shared_experts"} if "moe" in setup.again else set())
