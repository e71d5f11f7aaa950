"""A reply whose routes stay where they are is the reply that a JSON parser reads."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.sglang import payloads
from rollout.sglang.payloads import read_generated, uncollected

TEXTS = st.text() | st.sampled_from(['"routed_experts":"#0"', "routed_experts", '\\"routed_experts\\":\\"', "#0"])
ROUTES = st.none() | st.text("ABCabc019+/=", max_size=40)
METAS = st.fixed_dictionaries({"id": TEXTS}, optional={"routed_experts": ROUTES, "weight_version": TEXTS})
REPLIES = st.fixed_dictionaries(
    {"meta_info": METAS}, optional={"text": TEXTS, "output_ids": st.lists(st.integers(0, 9))}
)
WRITERS: list[Callable[[Any], bytes]] = [
    orjson.dumps,
    lambda body: orjson.dumps(body, option=orjson.OPT_INDENT_2),
    lambda body: json.dumps(body).encode(),
    lambda body: json.dumps(body, ensure_ascii=False, separators=(" ,", "\t: ")).encode("utf-8", "replace"),
]


def plain(body: Any) -> Any:
    """With routes as text again."""
    for reply in body if isinstance(body, list) else [body]:
        if isinstance(view := reply["meta_info"].get("routed_experts"), memoryview):
            reply["meta_info"]["routed_experts"] = bytes(view).decode()
    return body


@settings(deadline=None)
@given(REPLIES | st.lists(REPLIES, min_size=1, max_size=4), st.sampled_from(WRITERS), st.integers(0, 40))
def test_every_reply_is_read_as_by_the_parser(body: Any, write: Callable[[Any], bytes], window: int) -> None:
    content = write(body)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(payloads, "_WINDOW", window)
        found = read_generated(memoryview(content) if window else content)
    for reply in found if isinstance(found, list) else [found]:
        assert not isinstance(reply["meta_info"].get("routed_experts"), str)
    assert plain(found) == json.loads(content)


@pytest.mark.parametrize("body", [[1, "x"], {"meta_info": 3}, {"routed_experts": "AA=="}, [], "routed_experts", None])
def test_what_is_no_reply_is_read_as_json(body: Any) -> None:
    found = read_generated(orjson.dumps(body))
    assert found == (body if body != {"routed_experts": "AA=="} else {"routed_experts": "#0"})


@pytest.mark.parametrize(
    "content", [b'{"routed_experts":"AA', b'{"routed_experts":', b'{"routed_experts"', b'{"a":"b" "c"}']
)
def test_what_is_not_json_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"JSON|end|expected|unexpected"):
        read_generated(content)


def test_no_collection_runs_while_a_reply_is_read_and_the_collector_is_on_again() -> None:
    """A reply has a list for each token; also after one that is not JSON."""
    runs = list[str]()

    def seen(phase: str, info: dict[str, int]) -> None:
        runs.append(phase)

    content = orjson.dumps({"meta_info": {"output_token_logprobs": [[-0.5, i, None] for i in range(50_000)]}})
    gc.callbacks.append(seen)
    usual = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's default
    try:
        gc.collect()
        runs.clear()
        body = read_generated(content)
        assert len(runs) <= 2, "beginnings and ends: one collection, after it"
        with uncollected():
            assert not gc.isenabled() and len(body["meta_info"]["output_token_logprobs"]) == 50_000
    finally:
        gc.set_threshold(*usual)
        gc.callbacks.remove(seen)
    assert gc.isenabled()
    with pytest.raises(ValueError):
        read_generated(b'{"meta_info":')
    assert gc.isenabled()
    gc.disable()
    try:
        read_generated(content)
        assert not gc.isenabled()  # as the caller had it
    finally:
        gc.enable()
