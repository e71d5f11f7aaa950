"""Law: an answer with HTTP 200 that reports a failure, or nothing, is no success.

The answers were recorded from stock vLLM 0.32 (recorded/record.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from rollout.vllm.control import check_reset, pause_query, served_model, weight_hashes
from rollout.wire.control import PauseMode
from tests.support.fake_vllm import recorded
from tests.support.refusals import Facts, refuses

CASES = recorded()
NOTHING = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"  # sha256sum < /dev/null


def test_hashes_of_no_bytes_are_left_out() -> None:
    """Those of linears that CPU kernels hold packed; with them two servers of different weights would look equal."""
    reported = CASES["checker"]["answer"]["checksums"]
    packed = {name for name, digest in reported.items() if digest == NOTHING}
    assert packed and all("_proj" in name or ".gate." in name for name in packed)
    reply = weight_hashes(CASES["checker"]["answer"])
    assert reply.tensors == {name: digest for name, digest in reported.items() if name not in packed}
    other = {**reported, next(iter(reply.tensors)): "0" * 64}
    assert weight_hashes({"checksums": other}).per_engine_checksum != reply.per_engine_checksum


@pytest.mark.parametrize("table", [{}, {"a.weight": NOTHING}, {"a.weight": 3}])
def test_hashes_of_no_weight_are_refused(table: dict[str, Any]) -> None:
    with refuses(ValueError, "/weight_checker", "checksums"):
        weight_hashes({"checksums": table})


def test_a_cache_that_was_not_dropped_is_an_error() -> None:
    """Recorded while a request was frozen in place: HTTP 200."""
    assert CASES["not_reset"]["status"] == 200
    with refuses(ValueError, "/reset_prefix_cache"):
        check_reset(CASES["not_reset"]["answer"])
    check_reset(CASES["reset"]["answer"])


def test_every_pause_names_what_vllm_would_otherwise_choose() -> None:
    for mode in PauseMode:
        assert "mode=" in pause_query(mode) and "clear_cache=" in pause_query(mode)
    assert pause_query(PauseMode.RETRACT) == CASES["paused"]["path"].removeprefix("/pause")


@pytest.mark.parametrize(("models", "facts"), [([], (0,)), ([{}, {}], (2,)), ([{"id": "a"}], ("root",))])
def test_other_than_one_model_is_refused(models: list[Any], facts: Facts) -> None:
    with refuses(ValueError, "/v1/models", *facts):
        served_model({"data": models}, 0)
    assert served_model(CASES["models"]["answer"], 4).weight_version == "4"
