"""States of layers in a reply: read back as they were sent, and refused where they do not fill their shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollout.wire.layer_states import KEY, states_bytes, states_from_json, states_to_json
from tests.support.refusals import refuses


def test_states_are_read_back_as_they_were_sent() -> None:
    states = np.random.default_rng(0).normal(size=(5, 7, 8)).astype(np.float32)
    sent = states_to_json(states)
    assert np.array_equal(states_from_json({"meta_info": {KEY: sent}}), states)
    assert len(str(sent)) < states_bytes(states.size)


@pytest.mark.parametrize("changed", [{"shape": [5, 7]}, {"shape": [5, 7, 9]}])
def test_values_that_do_not_fill_the_shape_are_refused(changed: dict[str, Any]) -> None:
    sent = states_to_json(np.zeros((5, 7, 8), np.float32)) | changed
    with refuses(ValueError, "layer_states", changed["shape"], 5 * 7 * 8):
        states_from_json({"meta_info": {KEY: sent}})


def test_a_reply_without_them_names_the_flag() -> None:
    with refuses(ValueError, "layer_states", "--enable-layer-states"):
        states_from_json({"meta_info": {}})
