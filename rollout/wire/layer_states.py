"""The residual stream of a scored prompt at every layer, in a reply to /generate: an extension of this project.

State 0 is the embedding; of layer i, state 2i + 1 is the stream after its attention, 2i + 2 after its MLP or experts.

Letters: S prompt tokens, L layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pybase64
from numpy.typing import NDArray

from rollout.wire.endpoints import GENERATE
from rollout.wire.replies import Json, an_object, need

KEY = "layer_states"  # in `meta_info`
FLAG = "--enable-layer-states"  # of the embedded server
MAX_TOKENS = 1024  # of all prompts of a request: a token has (2L + 1) * H values


def states_bytes(values: int) -> int:
    """Upper bound on the size of `values` numbers in a reply."""
    return 6 * values + (1 << 16)


def states_to_json(states: NDArray[np.float32]) -> Json:
    """states: [S, 2L+1, H]."""
    raw = np.ascontiguousarray(states, "<f4")
    return {"shape": list(raw.shape), "float32": pybase64.b64encode(raw.data).decode()}


def states_from_json(body: object) -> NDArray[np.float32]:
    """[S, 2L+1, H] of a reply. Raises ValueError where it has none, or values that do not fill the shape."""
    meta: Mapping[str, Any] = an_object(need(an_object(body, GENERATE), "meta_info", GENERATE), GENERATE)
    if KEY not in meta:
        raise ValueError(f"{GENERATE}: the reply has no {KEY}: start the server with {FLAG}")
    found = an_object(meta[KEY], GENERATE)
    shape = need(found, "shape", GENERATE)
    values = np.frombuffer(pybase64.b64decode(need(found, "float32", GENERATE), validate=True), "<f4")
    if len(shape) != 3 or len(values) != int(np.prod(shape)):
        raise ValueError(f"{GENERATE}: {KEY} of shape {shape} has {len(values)} values")
    return values.reshape(shape)
