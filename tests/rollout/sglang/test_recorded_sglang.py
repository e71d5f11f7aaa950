"""What stock SGLang 0.5.23 sends for routed experts is read as it is meant.

The answers were recorded (recorded/record.py) from two models of three layers, 16 experts, 4 a token. Not covered:
other versions of SGLang, servers over several GPUs, MTP.
"""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_like.types import Finish, Prompt, Sample, VersionSpan
from rollout.sglang.samples import RoutingShape, SampleReader, empty_sample, routing_rows
from rollout.wire.generate import GenerateReply, GenerateRequest, WireSpan, replies_from_json
from rollout.wire.replies import error_message
from routing_replay.trace import RoutingTrace
from tests.support.made_samples import packed
from tests.support.refusals import refuses

RECORDED = Path(__file__).parent / "recorded"
LAYERS = {"qwen3_moe": (0, 1, 2), "deepseek_v3": (1, 2)}
FED = 7 + 8 - 1  # rows of "whole"


@pytest.fixture(scope="module", params=list(LAYERS))
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def recorded(model: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDED / f"sglang_{model}.json").read_text())
    return found


def _replies(case: dict[str, Any]) -> list[GenerateReply]:
    answers = case["answer"] if isinstance(case["answer"], list) else [case["answer"]]
    body = [a | {"meta_info": a["meta_info"] | {"id": "0"}} for a in answers]  # ids are random and were not kept
    return replies_from_json(body, want=len(answers), want_logprobs=True)


def _reply(recorded: dict[str, Any], case: str) -> GenerateReply:
    return _replies(recorded[case])[0]


def _trace(case: dict[str, Any], reply: GenerateReply, prompt: list[int], model: str) -> RoutingTrace:
    start = case["request"].get("routed_experts_start_len", 0)
    assert reply.routed_experts is not None and len(prompt) == reply.prompt_tokens
    tokens = torch.tensor([*prompt, *reply.output_ids.tolist()])
    return RoutingTrace.from_wire(
        reply.routed_experts, tokens=tokens, start=start, layers=LAYERS[model], num_layers=3, top_k=4, num_experts=16
    )


def _rows(recorded: dict[str, Any], case: str, model: str) -> torch.Tensor:
    prompt = recorded[case]["request"]["input_ids"]
    return _trace(recorded[case], _reply(recorded, case), prompt, model).experts


def test_every_answer_is_read_and_written_back_byte_for_byte(recorded: dict[str, Any], model: str) -> None:
    seen = 0
    for case in recorded.values():
        if case["status"] != 200:
            continue
        start, ids = case["request"].get("routed_experts_start_len", 0), case["request"]["input_ids"]
        for reply, prompt in zip(_replies(case), ids if isinstance(ids[0], list) else [ids], strict=True):
            if reply.routed_experts is None:
                continue
            trace = _trace(case, reply, prompt, model)
            assert len(trace) == reply.prompt_tokens + len(reply.output_ids) - 1 - start
            assert trace.experts.dtype is torch.uint8
            assert trace.to_wire(num_layers=3) == reply.routed_experts  # dense layers are zero-filled there too
            seen += 1
    assert seen == 13


def test_a_dense_layer_is_all_zeros_and_is_not_read(recorded: dict[str, Any], model: str) -> None:
    raw = np.frombuffer(base64.b64decode(recorded["whole"]["answer"]["meta_info"]["routed_experts"]), "<i4")
    dense = [i for i in range(3) if i not in LAYERS[model]]
    assert not raw.reshape(FED, 3, 4)[:, dense].any()
    assert raw.reshape(FED, 3, 4)[:, list(LAYERS[model])].any((0, 2)).all()


def test_rows_from_a_start_are_the_last_of_all_rows(recorded: dict[str, Any], model: str) -> None:
    """Also across turns, and out of the prefix cache."""
    whole, both = _rows(recorded, "whole", model), _rows(recorded, "second_turn_whole", model)
    assert torch.equal(_rows(recorded, "from_row_3", model), whole[3:])
    assert torch.equal(_rows(recorded, "second_turn", model), both[FED:])
    assert torch.equal(both[:FED], whole)
    assert _reply(recorded, "second_turn").cached_tokens >= FED
    assert torch.equal(_rows(recorded, "start_at_prompt", model), whole[7:8])


def test_the_token_that_stops_has_no_row(recorded: dict[str, Any], model: str) -> None:
    stopped = _reply(recorded, "stop_token")
    assert stopped.finish is Finish.STOP and stopped.matched == int(stopped.output_ids[-1])
    rows = _rows(recorded, "stop_token", model)
    assert torch.equal(rows, _rows(recorded, "whole", model)[: len(rows)])


def test_an_aborted_answer_has_the_rows_of_what_it_said(recorded: dict[str, Any], model: str) -> None:
    assert _reply(recorded, "aborted").finish is Finish.ABORT
    assert len(_rows(recorded, "aborted", model)) == 7 + len(_reply(recorded, "aborted").output_ids) - 1


def test_routes_after_a_retraction_are_of_the_last_weights(recorded: dict[str, Any], model: str) -> None:
    """A retracted request is fed again, all of it, under the weights that are there then. So its rows are not those its
    first log-probs were computed with, though the spans still report version 0 for them: pairing the two trains other
    experts than were sampled from."""
    spans = _reply(recorded, "retract").weight_versions
    assert [s.version for s in spans] == ["0", "1"] and spans[0].end > 2
    rows = _rows(recorded, "retract", model)
    again, before = (_rows(recorded, f"retract_under_{v}", model)[: len(rows)] for v in (1, 0))

    def agree(a: torch.Tensor, b: torch.Tensor) -> float:
        return float((a.sort(-1).values == b.sort(-1).values).all(-1).float().mean())

    first = 8 + spans[0].end - 1  # rows whose log-probs, or whose text, are version 0's
    assert agree(rows[:first], again[:first]) > 0.9  # other batches round otherwise: near ties flip
    assert agree(rows[:first], before[:first]) < 0.5


def test_a_retracted_answer_is_not_replayed_and_one_paused_in_place_is(recorded: dict[str, Any], model: str) -> None:
    """A stock server says nothing of its rows' weights; that it was retracted under one version and went on under the
    next is enough. It retracts for want of memory too, whatever the pause mode: where routes are only compared with
    (replay.mode r2 and off) that must not end a run."""
    reader = SampleReader(routing=RoutingShape(num_layers=3, moe_layers=LAYERS[model], top_k=4, num_experts=16))

    def sample(case: str) -> Sample:
        prompt = Prompt(id=case, token_ids=tuple(recorded[case]["request"]["input_ids"]), answer="")
        return reader.extend([empty_sample(prompt, 0)], [()], [_reply(recorded, case)])[0]

    with refuses(ValueError, "retract/0", 7):
        packed(sample("retract"))
    packed(sample("retract"), replayed=False)
    frozen = sample("in_place")
    packed(frozen)
    assert frozen.routing is not None and frozen.routing.versions is not None
    assert [v.version for v in frozen.versions] == [v.version for v in frozen.routing.versions] == [1, 2]
    assert sample("whole").routing is not None


def test_a_sample_goes_on_under_new_weights_with_the_rows_it_had(recorded: dict[str, Any], model: str) -> None:
    """Aborted under version 0 and continued under version 1, which a stock server tells by its spans of tokens alone:
    the row before the first new token is of the new version, the first reply's rows stay, and those between, which
    came out of the cache, have no reported version. The second turn was recorded under the same weights, so its rows
    are those of one request."""
    reader = SampleReader(routing=RoutingShape(num_layers=3, moe_layers=LAYERS[model], top_k=4, num_experts=16))
    prompt = Prompt(id="p", token_ids=tuple(recorded["whole"]["request"]["input_ids"]), answer="")
    first, second = _reply(recorded, "whole"), _reply(recorded, "second_turn")
    new = len(second.output_ids)
    fed = recorded["second_turn"]["request"]["input_ids"][FED + 1 :]
    changed = replace(second, weight_version="1", weight_versions=(WireSpan("1", 0, new),))
    (cut,) = reader.extend([empty_sample(prompt, 0)], [()], [replace(first, finish=Finish.ABORT)])
    assert (cut.finish, routing_rows(cut)) == (Finish.ABORT, FED)
    (sample,) = reader.extend([cut], [fed], [changed])
    at = 8 + len(fed)
    assert sample.versions == (VersionSpan(0, 0, 8), VersionSpan(1, at, at + new))
    assert sample.routing is not None and sample.routing.versions is not None
    assert sample.routing.versions[0] == VersionSpan(0, 0, FED)
    assert sample.routing.versions[-1] == VersionSpan(1, second.prompt_tokens - 1, len(sample.routing))
    assert torch.equal(sample.routing.experts, _rows(recorded, "second_turn_whole", model))
    sample.routing.check_tokens(sample.token_ids, sample=sample.name)


def test_an_abort_that_brings_tokens_without_routes_leaves_the_sample_as_it_was(
    recorded: dict[str, Any], model: str
) -> None:
    """So does one that was retracted and ended while it waited. What ended by itself must have brought them; and where
    no routes are wanted the tokens stay."""
    shape = RoutingShape(num_layers=3, moe_layers=LAYERS[model], top_k=4, num_experts=16)
    reader, begin = SampleReader(routing=shape), empty_sample(Prompt(id="p", token_ids=tuple(range(7)), answer=""), 0)
    bare = replace(_reply(recorded, "aborted"), routed_experts=None)
    (kept,) = reader.extend([begin], [()], [bare])
    assert kept.token_ids.tolist() == list(range(7)) and (kept.versions, kept.routing) == ((), None)
    assert kept.finish is Finish.ABORT
    with refuses(ValueError, "routed_experts", "--enable-return-routed-experts"):
        reader.extend([begin], [()], [replace(bare, finish=Finish.LENGTH)])
    (unrouted,) = SampleReader(routing=None).extend([begin], [()], [bare])
    assert unrouted.response_len == len(bare.output_ids) > 0


def test_a_start_beyond_the_prompt_is_refused_in_words(recorded: dict[str, Any]) -> None:
    case = recorded["start_beyond_prompt"]
    text = error_message(case["status"], json.dumps(case["answer"]).encode())
    assert case["status"] == 400 and "routed_experts_start_len=8" in text


def test_what_is_asked_is_what_our_requests_ask(recorded: dict[str, Any]) -> None:
    """The recorder wrote its requests by hand; ours use no other names."""
    asked = recorded["second_turn"]["request"]
    ours = GenerateRequest.from_json(asked | {"return_routed_experts": True}).to_json()
    assert set(asked) <= set(ours) and ours["routed_experts_start_len"] == FED
