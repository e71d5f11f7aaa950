"""The FLOP formula against torch's counter over transformers' models, and against published figures.

Not covered: multi-token prediction beyond its arithmetic, since transformers has no model of it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry
from transformers import AutoModelForCausalLM

from megatron_bridge.plan.flops import forward_flops, forward_terms, train_flops
from tests.support.refusals import refuses
from tests.support.tiny_models import CONFIGS, transformers_config

DEEPSEEK_V3 = json.loads((Path(__file__).parents[3] / "configs/deepseek_v3/config.json").read_text())


@functools.cache
def transformers_model(name: str) -> Any:
    """With attention and experts in plain matrix products."""
    cfg = transformers_config(CONFIGS[name])
    cfg._experts_implementation = "eager"
    return AutoModelForCausalLM.from_config(cfg).float()


class Flops(TorchDispatchMode):
    """The total of torch's FlopCounterMode, from the same formulas, in a third of the time: not by module."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func.overloadpacket)) is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


def counted(name: str, n: int, *, backward: bool, how: Callable[[], Any] = Flops) -> int:
    """Of transformers' model on n tokens."""
    hf, model = CONFIGS[name], transformers_model(name)
    model.requires_grad_(backward)
    with how() as counter:
        logits = model(torch.arange(n)[None] % hf["vocab_size"], use_cache=False).logits
        if backward:
            logits.sum().backward()
    total: int = counter.total if how is Flops else counter.get_total_flops()
    return total


@pytest.mark.slow
def test_the_total_is_that_of_torch_s_counter() -> None:
    for backward in (False, True):
        by_torch = counted("tiny", 7, backward=backward, how=lambda: FlopCounterMode(display=False))
        assert counted("tiny", 7, backward=backward) == by_torch > 0


def expected(hf: dict[str, Any], n: int) -> float:
    """The formula, with the masked half of the attention that transformers computes too."""
    terms = forward_terms(hf, [n])
    return sum(terms.values()) + terms["core"] * (2 * n / (n + 1) - 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_forward_is_what_torch_counts(name: str) -> None:
    """Every matrix product of the model is in the formula and nothing else is: exactly, but for the masked half of the
    attention, which a causal kernel skips."""
    for n in (7, 64):
        assert counted(name, n, backward=False) == pytest.approx(expected(CONFIGS[name], n), rel=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
def test_training_is_three_forwards(name: str) -> None:
    """Each product has two in backward, less the gradient of what needs none; within 2 %."""
    hf, n = CONFIGS[name], 64
    assert counted(name, n, backward=True) == pytest.approx(3 * expected(hf, n), rel=0.02)
    assert train_flops(hf, [n]) == 3 * forward_flops(hf, [n])


def test_deepseek_v3_has_37_billion_active_parameters() -> None:
    """arXiv:2412.19437, abstract: 37 B of 671 B activated a token. Without attention's scores a token costs 2 FLOPs a
    parameter forward, 6 in training; the published figure also counts the embedding, a lookup."""
    terms = forward_terms(DEEPSEEK_V3, [1])
    active = (sum(terms.values()) - terms["core"]) / 2
    embedding = DEEPSEEK_V3["vocab_size"] * DEEPSEEK_V3["hidden_size"]
    assert active + embedding == pytest.approx(37e9, rel=0.02)
    one = train_flops(DEEPSEEK_V3, [1])
    assert one == pytest.approx(6 * active, rel=1e-3)


def test_samples_pay_attention_to_themselves_only() -> None:
    """Packing changes nothing; a longer sample costs more a token, by the closed form h (d_q + d_v) a pair."""
    hf = CONFIGS["tiny"]
    assert forward_flops(hf, [10, 20]) == forward_flops(hf, [10]) + forward_flops(hf, [20])
    heads, layers = hf["num_attention_heads"], hf["num_hidden_layers"]
    size = hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"] + hf["v_head_dim"]
    more = forward_flops(hf, [30]) - forward_flops(hf, [10, 20])
    assert more == 2 * heads * size * layers * (10 * 20)  # the pairs across
    with refuses(ValueError, 0, 1):
        forward_flops(hf, [4, 0])


def test_the_head_costs_what_has_loss() -> None:
    hf = CONFIGS["tiny"]
    less = forward_flops(hf, [30]) - forward_flops(hf, [30], head_rows=12)
    assert less == 2 * 18 * hf["hidden_size"] * hf["vocab_size"]


def test_a_prediction_depth_is_a_layer_a_projection_and_a_head() -> None:
    """A model with one more layer, and 4 T H^2 plus the head again."""
    hf, n = CONFIGS["tiny"], 9
    deeper = {**hf, "num_hidden_layers": hf["num_hidden_layers"] + 1}
    h, v = hf["hidden_size"], hf["vocab_size"]
    extra = 4 * n * h * h + 2 * n * h * v
    assert forward_flops(hf, [n], mtp_depths=1) == forward_flops(deeper, [n]) + extra
