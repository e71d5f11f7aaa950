"""The driver's global random states as JSON: a user's reward, filter or environment may draw from any of the three.

The run itself does not use them: its draws are keyed by (seed, place). The trainer ranks' states are in their
checkpoints (megatron_bridge/device/rng.py).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from miles_like.types import Json

RANDOM = "random"  # its key in RunState.parts


def random_state() -> Json:
    """The states of `random`, numpy's legacy generator and torch's CPU generator."""
    version, words, gauss = random.getstate()
    kind, key, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [str(kind), np.asarray(key).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def set_random_state(state: Json) -> None:
    """The inverse of `random_state`, also after a JSON round trip."""
    assert isinstance(state, Mapping)
    found: Mapping[str, Any] = state
    version, words, gauss = found["python"]
    random.setstate((version, tuple(words), gauss))
    kind, key, position, has_gauss, cached = found["numpy"]
    np.random.set_state((kind, np.array(key, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(found["torch"]), dtype=torch.uint8))
