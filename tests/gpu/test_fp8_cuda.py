"""FP8 recipes of TransformerEngine on a CUDA device: its linears multiply what the codecs of `quant/` decode, as over
the emulated extension (tests/laws/test_te_fp8.py). Needs TransformerEngine. Prints the distances.

Not covered: a trainer's step in FP8 (its mismatch is in that law), several ranks.
"""

from __future__ import annotations

import json

import pytest

from megatron_bridge.plan.kernels import CAPABILITIES
from tests.support.fp8_products import Distances, both
from tests.support.spawn import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
BOUND = 2**-6  # tensor cores add products of e4m3 in fewer bits than FP32


def _found(rank: int, world: int, port: int) -> dict[str, dict[str, Distances]]:
    from megatron_bridge.device.device import init_device

    env = init_device()
    recipes = [r for r, least in CAPABILITIES.items() if env.capability is not None and env.capability >= least]
    return {recipe: both(recipe, env.device) for recipe in recipes}


def test_linears_multiply_what_the_codecs_decode() -> None:
    """Under every recipe that the device has."""
    (found,) = run_ranks(_found, 1, cold=True)
    assert found
    for recipe, kinds in found.items():
        print("\n" + json.dumps({recipe: kinds}))
        for kind, products in kinds.items():
            for what, (apart, rounding) in products.items():
                assert apart < BOUND < rounding < 0.2, (recipe, kind, what, apart, rounding)
