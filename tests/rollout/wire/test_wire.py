"""SGLang's JSON, both ways. Golden replies are written by hand after what a 0.5.23 server answers."""

from __future__ import annotations

import base64
import io
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.types import Finish, NamedTensor, SamplingParams
from rollout.config import RolloutConfig
from rollout.wire import endpoints
from rollout.wire.control import (
    AbortRequest,
    ChecksumReply,
    ModelInfo,
    Outcome,
    PauseMode,
    PauseRequest,
    RankReply,
    UpdateFromDisk,
    UpdateFromTensor,
    UpdateVersion,
    decode_safetensors,
    encode_safetensors,
    encode_sglang_pickle,
)
from rollout.wire.generate import GenerateReply, GenerateRequest, WireSpan, replies_from_json
from rollout.wire.replies import Reply, error_message
from tests.support.refusals import Facts, refuses


def golden_reply() -> dict:
    """As a stock server answers after an in-place weight update in the middle of a response."""
    return {
        "text": " 24",
        "output_ids": [17, 19, 1],
        "meta_info": {
            "id": "7f3c",
            "finish_reason": {"type": "stop", "matched": 1},
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "reasoning_tokens": 0,
            "cached_tokens": 4,
            "cached_tokens_details": {"device": 4, "host": 0},
            "num_retractions": 0,
            "dp_rank": None,
            "weight_version": "8",
            "weight_versions": [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 3}],
            "input_token_logprobs": [],
            "output_token_logprobs": [[-0.25, 17, None], [-1.5, 19, None], [-0.125, 1, None]],
            "output_token_logprobs_length": 3,
            "routed_experts": "AAAAAA==",
            "e2e_latency": 0.1,
        },
    }


def test_a_stock_reply_is_read_field_by_field() -> None:
    """Each value has its place in the JSON; a mix-up would train on another field. Not covered: streamed chunks."""
    reply = GenerateReply.from_json(golden_reply(), want_logprobs=True)
    assert reply.output_ids.tolist() == [17, 19, 1]
    assert reply.logprobs is not None and reply.logprobs.tolist() == [-0.25, -1.5, -0.125]
    assert (reply.finish, reply.matched, reply.text, reply.rid) == (Finish.STOP, 1, " 24", "7f3c")
    assert (reply.prompt_tokens, reply.cached_tokens, reply.weight_version) == (5, 4, "8")
    assert reply.weight_versions == (WireSpan("7", 0, 2), WireSpan("8", 2, 3))
    assert reply.routed_experts == "AAAAAA=="


@pytest.mark.parametrize("versions", ["7", (WireSpan("7", 2, 4), WireSpan("8", 4, 7)), (), None])
def test_versions_of_rows_go_both_ways(versions: str | tuple[WireSpan, ...] | None) -> None:
    """One word where one version computed all rows, else spans; a stock server, which does not tell, has no key."""
    reply = replace(GenerateReply.from_json(golden_reply()), row_versions=versions)
    sent = reply.to_json()
    assert ("routed_experts_versions" in sent["meta_info"]) == (versions is not None)
    assert GenerateReply.from_json(sent).row_versions == versions


@pytest.mark.parametrize(
    "key", ["id", "finish_reason", "prompt_tokens", "completion_tokens", "weight_version", "weight_versions"]
)
def test_a_missing_key_is_named(key: str) -> None:
    """A reply of another server version must not be read with defaults."""
    body = golden_reply()
    del body["meta_info"][key]
    with refuses(ValueError, key):
        GenerateReply.from_json(body, want_logprobs=True)


def test_missing_logprobs_are_an_error_only_when_asked_for() -> None:
    """Without them a sample cannot be trained on, but text alone is a fair request."""
    body = golden_reply()
    del body["meta_info"]["output_token_logprobs"]
    assert GenerateReply.from_json(body).logprobs is None
    with refuses(ValueError, "output_token_logprobs"):
        GenerateReply.from_json(body, want_logprobs=True)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"output_token_logprobs": [[-0.25, 17, None]]}, (1, 3)),
        ({"output_token_logprobs": [[-0.25, 17, None], [-1.5, 18, None], [-1, 1, None]]}, (3, 3)),
        ({"output_token_logprobs": [[-0.25, 17, None], [float("-inf"), 19, None], [-1, 1, None]]}, (19,)),
        ({"completion_tokens": 4}, (3, "output_ids", "completion_tokens", 4)),
        ({"weight_versions": [{"version": "7", "start": 0, "end": 2}]}, (3, "weight_versions")),
        ({"weight_versions": [{"version": "7", "start": 1, "end": 3}]}, (3, "weight_versions")),
        ({"finish_reason": {"type": "tired"}}, ("tired",)),
    ],
)
def test_streams_that_do_not_belong_together_are_refused(change: dict, facts: Facts) -> None:
    """Log-probs of other tokens, or version spans with holes, would be silent poison."""
    body = golden_reply()
    body["meta_info"] |= change
    with refuses(ValueError, *facts):
        GenerateReply.from_json(body, want_logprobs=True)


def test_an_aborted_reply_without_tokens_is_read() -> None:
    """A request dropped from the queue has no tokens, log-probs or spans."""
    body = {
        "output_ids": [],
        "meta_info": {
            "id": "x",
            "finish_reason": {"type": "abort", "message": "Abort", "status_code": None, "err_type": None},
            "prompt_tokens": 5,
            "completion_tokens": 0,
            "weight_version": "1",
        },
    }
    reply = GenerateReply.from_json(body, want_logprobs=True)
    assert reply.finish is Finish.ABORT and reply.abort_message == "Abort"
    assert reply.logprobs is not None and len(reply.logprobs) == 0


@pytest.mark.parametrize("ids", [[], [7, 8]])
def test_a_reply_to_a_request_that_was_aborted_in_the_queue_has_no_tokens(ids: list[int]) -> None:
    """The keys of stock SGLang's: no count of the prompt, and no routes, which tokens from before a retraction had."""
    meta = {
        "id": "0",
        "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
        "weight_version": "2",
        "weight_versions": [{"version": "1", "start": 0, "end": len(ids)}] if ids else [],
        "completion_tokens": len(ids),
        "input_token_logprobs": [],
        "output_token_logprobs": [[-0.5, i, None] for i in ids],
        "output_token_logprobs_length": len(ids),
    }
    reply = GenerateReply.from_json({"output_ids": ids, "meta_info": meta}, want_logprobs=True)
    assert (reply.finish, reply.abort_message) == (Finish.ABORT, "Abort in waiting queue")
    assert len(reply.output_ids) == 0 and reply.logprobs is not None and len(reply.logprobs) == 0
    assert (reply.weight_versions, reply.routed_experts) == ((), None)
    meta["finish_reason"] = {"type": "length", "length": len(ids)}
    with refuses(ValueError, "prompt_tokens"):
        GenerateReply.from_json({"output_ids": ids, "meta_info": meta}, want_logprobs=True)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-50, 0, width=32), max_size=20), st.sampled_from(list(Finish)))
def test_replies_survive_json_bit_for_bit(logprobs: list[float], finish: Finish) -> None:
    """fp32 -> JSON double -> fp32 loses nothing, so a log-prob is the same on both sides of the wire."""
    r = len(logprobs)
    reply = GenerateReply(
        rid="a",
        output_ids=np.arange(r) * 7,
        logprobs=np.array(logprobs, np.float32),
        finish=finish,
        prompt_tokens=3,
        weight_version="4",
        weight_versions=(WireSpan("4", 0, r),) if r else (),
    )
    back = GenerateReply.from_json(json.loads(json.dumps(reply.to_json())), want_logprobs=True)
    assert back.logprobs is not None and reply.logprobs is not None
    assert back.logprobs.tobytes() == reply.logprobs.tobytes()
    assert back.output_ids.tolist() == reply.output_ids.tolist()
    assert (back.finish, back.weight_versions) == (finish, reply.weight_versions)


def test_another_number_of_samples_is_an_error() -> None:
    """A flat list that is short would shift samples to the wrong prompts."""
    assert len(replies_from_json(golden_reply(), want=1, want_logprobs=True)) == 1
    with refuses(ValueError, 2, 4):
        replies_from_json([golden_reply()] * 2, want=4, want_logprobs=True)


SAMPLING = SamplingParams(
    max_new_tokens=9, temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=(1, 2), sampling_seed=11
)


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest(input_ids=((1, 2),), sampling=(SAMPLING,), single=True, rid=("a",)),
        GenerateRequest(input_ids=((1, 2), (3,)), sampling=(SAMPLING, SamplingParams(max_new_tokens=1)), n=3),
        GenerateRequest(
            input_ids=((1,), (3,)),
            sampling=(SAMPLING, SAMPLING),
            rid=("a", "b"),
            ignore_eos=True,
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=4,
            return_routed_experts=True,
            routed_experts_start_len=1,
        ),
    ],
)
def test_requests_survive_json(request_: GenerateRequest) -> None:
    """Client and embedded server read the same values; what stock SGLang makes of them is not covered here."""
    assert GenerateRequest.from_json(json.loads(json.dumps(request_.to_json()))) == request_


def test_a_request_is_the_json_that_sglang_documents() -> None:
    """The keys are SGLang's, spelt by hand: a round trip alone could agree on wrong ones."""
    request = GenerateRequest(input_ids=((1, 2), (3,)), sampling=(SAMPLING, SAMPLING), n=2, return_logprob=True)
    params = {
        "max_new_tokens": 9,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "stop_token_ids": [1, 2],
        "sampling_seed": 11,
        "n": 2,
    }
    assert request.to_json() == {
        "input_ids": [[1, 2], [3]],
        "sampling_params": [params, params],
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_routed_experts": False,
        "routed_experts_start_len": 0,
    }


def test_sglangs_defaults_and_unknown_top_level_keys() -> None:
    """A minimal request means what it means to SGLang (128 tokens); unknown top-level keys are ignored."""
    request = GenerateRequest.from_json({"input_ids": [4, 5], "priority": 3})
    assert request.single and request.sampling == (SamplingParams(max_new_tokens=128),)
    assert not request.return_logprob and request.logprob_start_len == -1


@pytest.mark.parametrize(
    ("body", "facts"),
    [
        ({"input_ids": [1], "sampling_params": {"max_tokens": 3}}, ("max_tokens",)),
        ({"input_ids": [1], "sampling_params": {"min_p": 1.5}}, ("min_p", 1.5)),
        ({"input_ids": [1], "sampling_params": {"min_new_tokens": 2}}, ("sampling_params.min_new_tokens", 2)),
        ({"input_ids": [1], "sampling_params": {"frequency_penalty": 0.5}}, ("sampling_params.frequency_penalty", 0.5)),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": None}}, ("max_new_tokens", "None")),
        ({"input_ids": [1], "sampling_params": {"temperature": float("nan")}}, ("temperature", "nan")),
        ({"input_ids": [1], "sampling_params": {"temperature": float("inf")}}, ("temperature", "inf")),
        ({"input_ids": [1], "sampling_params": {"temperature": True}}, ("temperature", "True")),
        ({"input_ids": [1], "sampling_params": {"top_k": 2**31}}, ("top_k", 2147483648)),
        ({"input_ids": [1], "sampling_params": {"sampling_seed": 2**63}}, ("sampling_seed", 9223372036854775808)),
        ({"input_ids": [1], "sampling_params": {"sampling_seed": "7"}}, ("sampling_seed", "'7'")),
        ({"input_ids": [1], "sampling_params": {"stop_token_ids": ["7"]}}, ("stop_token_ids", "'7'")),
        ({"input_ids": [1], "sampling_params": {"ignore_eos": "no"}}, ("ignore_eos", "no")),
        ({"input_ids": [1], "token_ids_logprob": [3]}, ("token_ids_logprob",)),
        ({"input_ids": [1], "return_sampling_mask": True}, ("return_sampling_mask",)),
        ({"input_ids": [[1], [2]], "logprob_start_len": [0, 1]}, ("logprob_start_len", "[0, 1]")),
        ({"input_ids": [[1], [2]], "return_logprob": [True, False]}, ("return_logprob", "[True, False]")),
        ({"input_ids": [1], "sampling_params": {"temperature": "hot"}}, ("temperature", "hot")),
        ({"input_ids": [1], "sampling_params": {"top_p": 0.0}}, ("top_p", 0.0)),
        ({"input_ids": [1], "sampling_params": {"top_k": 0}}, ("top_k", 0)),
        ({"input_ids": [1], "sampling_params": {"n": 0}}, ("n", 0, 1)),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 1.5}}, ("max_new_tokens", 1.5)),
        ({"input_ids": [[1], [2]], "sampling_params": [{"n": 2}, {"n": 3}]}, ("n", "ignore_eos")),
        ({"input_ids": [[1], [2]], "sampling_params": [{}]}, (1, "sampling_params", 2)),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, ("rids", 1, 2)),
        ({"input_ids": [[1], []]}, ("input_ids",)),
        ({"input_ids": ["a"]}, ("input_ids", "a")),
        ({"text": "hello"}, ("input_ids",)),
        ({"input_ids": [1], "stream": True}, ("stream", "true")),
    ],
)
def test_bad_requests_are_named(body: dict, facts: Facts) -> None:
    """Each is a 400 of the server with this sentence."""
    with refuses(ValueError, *facts):
        GenerateRequest.from_json(body)


def test_neutral_sampling_keys_of_stock_clients_are_accepted() -> None:
    """Clients send full dictionaries; values that change nothing must not be refused."""
    params = {"min_p": 0.0, "repetition_penalty": 1.0, "stop": [], "skip_special_tokens": False, "regex": None}
    assert GenerateRequest.from_json({"input_ids": [1], "sampling_params": params}).n == 1


def test_null_is_the_default() -> None:
    nulls = dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "n", "ignore_eos", "stop_token_ids"))
    request = GenerateRequest.from_json({"input_ids": [[1], [2]], "sampling_params": nulls})
    assert request.sampling == (SamplingParams(max_new_tokens=128),) * 2
    assert (request.n, request.ignore_eos) == (1, False)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b'{"error": {"message": "too long"}}', "HTTP 400: too long"),
        (b'{"error": "unknown key"}', "HTTP 400: unknown key"),
        (b'{"success": false, "message": "no session"}', "HTTP 400: no session"),
        (b"<html>proxy</html>", "HTTP 400: <html>proxy</html>"),
        (b"", "HTTP 400 without a message"),
        (b"[1]", "HTTP 400: [1]"),
    ],
)
def test_every_error_shape_gives_its_text(body: bytes, sentence: str) -> None:
    """SGLang has three shapes of error; a proxy has its own."""
    assert error_message(400, body) == sentence


def test_control_messages_survive_json() -> None:
    """Fakes, embedded server and client must agree; defaults are SGLang's own."""
    update = UpdateFromTensor(
        serialized_named_tensors=["a", "b"], load_format="safetensors", flush_cache=False, weight_version="3"
    )
    assert UpdateFromTensor.from_json(update.to_json()) == update
    disk = UpdateFromDisk(model_path="/m", weight_version="3", keep_pause=True)
    assert UpdateFromDisk.from_json(disk.to_json()) == disk
    for absent in ({}, {"flush_cache": None}):
        assert UpdateFromDisk.from_json({"model_path": "/m"} | absent).flush_cache is True
    version = UpdateVersion(new_version="3", abort_all_requests=False)
    assert UpdateVersion.from_json(version.to_json()) == version
    assert UpdateVersion.from_json({"new_version": "3"}).abort_all_requests
    assert PauseRequest.from_json({}).mode is PauseMode.ABORT
    assert [PauseRequest.from_json({"mode": m.value}).mode for m in PauseMode] == list(PauseMode)
    assert PauseRequest(mode=PauseMode.IN_PLACE).to_json() == {"mode": "in_place"}
    assert AbortRequest.from_json(AbortRequest(rid="a").to_json()) == AbortRequest(rid="a")
    info = ModelInfo(model_path="/m", weight_version="3")
    assert ModelInfo.from_json(info.to_json(), endpoints.MODEL_INFO) == info
    ranks = tuple(RankReply(checksums={"w": n}, per_gpu_checksum=gpu) for n, gpu in (("1", "a"), ("2", "b")))
    sums = ChecksumReply(ranks=ranks, per_engine_checksum="e")
    assert ChecksumReply.from_json(sums.to_json(), endpoints.CHECKSUM) == sums
    assert Outcome.from_json({"success": False, "message": "no"}, endpoints.BEGIN_UPDATE) == Outcome(
        success=False, message="no"
    )
    for mode in ("gently", None):
        with refuses(ValueError, mode, "abort", "retract", "in_place"):
            PauseRequest.from_json({"mode": mode})
    with refuses(ValueError, "model_path"):
        UpdateFromDisk.from_json({})


def test_replies_have_sglangs_keys() -> None:
    """Those of SGLang 0.5.23's sources that the client reads or the embedded server sends."""
    assert Outcome(success=True, message="Succeeded.").to_json() == {"success": True, "message": "Succeeded."}
    assert ModelInfo(model_path="/m", weight_version="3", architectures=("A",)).to_json() == {
        "model_path": "/m",
        "weight_version": "3",
        "architectures": ["A"],
        "tokenizer_path": None,
        "is_generation": True,
    }
    rank = RankReply(checksums={"w": "1"}, per_gpu_checksum="g")
    assert ChecksumReply(ranks=(rank,), per_engine_checksum="e").to_json() == {
        "success": True,
        "message": "",
        "ranks": [{"checksums": {"w": "1"}, "per_gpu_checksum": "g", "parallelism_info": []}],
        "per_engine_checksum": "e",
    }


def test_replies_of_stock_servers_are_read() -> None:
    """They have other keys too, and null where there is nothing to say."""
    stock = {"model_path": "/m", "weight_version": 3, "architectures": None, "preferred_sampling_params": None}
    assert ModelInfo.from_json(stock, endpoints.MODEL_INFO) == ModelInfo(model_path="/m", weight_version="3")
    outcome = Outcome.from_json({"success": True, "message": None, "num_paused_requests": 0}, endpoints.END_UPDATE)
    assert outcome == Outcome(success=True)


@pytest.mark.parametrize(
    ("reply", "body", "facts"),
    [
        (Outcome, {"message": "no"}, ("success", "message")),
        (Outcome, [True], ("list", "object")),
        (ModelInfo, {"model_path": ["/m"], "weight_version": "3"}, ("model_path", "/m")),
        (ChecksumReply, {"success": False, "message": "no"}, ("ranks", "message, success")),
        (ChecksumReply, {"per_engine_checksum": "e", "ranks": [{"checksums": {}}]}, ("per_gpu_checksum", "checksums")),
        (ChecksumReply, {"per_engine_checksum": "e", "ranks": [7]}, ("ranks.0", 7)),
    ],
)
def test_what_is_wrong_in_a_reply_is_named(reply: type[Reply], body: object, facts: Facts) -> None:
    with refuses(ValueError, "/weights_checker", *facts):
        reply.from_json(body, endpoints.CHECKSUM)


def some_tensors() -> list[NamedTensor]:
    torch.manual_seed(0)
    return [
        NamedTensor("b.weight", torch.randn(4, 6).to(torch.float8_e4m3fn)),
        NamedTensor("b.weight_scale_inv", torch.randn(1, 1)),
        NamedTensor("a.weight", torch.randn(6, 4).bfloat16().T),
        NamedTensor("scalar", torch.tensor(3)),
    ]


def raw(t: torch.Tensor) -> bytes:
    return t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_safetensors_payload_is_bit_exact() -> None:
    """Codes and scales must arrive as they were sent, of every dtype and memory layout, ordered by their names."""
    back = decode_safetensors(encode_safetensors(some_tensors()))
    want = sorted(some_tensors(), key=lambda t: t.name)
    assert [t.name for t in back] == [t.name for t in want]
    for a, b in zip(back, want, strict=True):
        assert (a.tensor.dtype, a.tensor.shape, raw(a.tensor)) == (b.tensor.dtype, b.tensor.shape, raw(b.tensor))


def test_damaged_or_double_weights_are_refused() -> None:
    """A cut payload must not load in part."""
    whole = base64.b64decode(encode_safetensors(some_tensors()))
    with refuses(ValueError, "safetensors"):
        decode_safetensors(base64.b64encode(whole[:-5]).decode())
    with refuses(ValueError, "base64"):
        decode_safetensors("a*b")
    with refuses(ValueError, "scalar"):
        encode_safetensors(some_tensors()[-1:] * 2)


class LikeSGLang(pickle.Unpickler):
    """The rules of SGLang 0.5.23's unpickler, less every global that we do not use."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return self.load_storage
        assert (module, name) in {
            ("torch._utils", "_rebuild_tensor_v3"),
            ("collections", "OrderedDict"),
            ("torch", "float8_e4m3fn"),
            ("torch", "float32"),
            ("torch", "bfloat16"),
            ("torch", "int64"),
        }
        return super().find_class(module, name)

    @staticmethod
    def load_storage(data: bytes) -> object:
        storage = torch.load(io.BytesIO(data), weights_only=True)
        assert isinstance(storage, torch.storage.TypedStorage | torch.UntypedStorage)
        return storage


def test_sglang_pickle_is_one_list_for_each_rank() -> None:
    """What SGLang's ranks unpickle: a list of (name, tensor), FP8 too, whatever this process has imported.

    Not covered: that a live server accepts it.
    """
    big = torch.arange(1000.0)
    items = [*some_tensors(), NamedTensor("view", big[3:5])]
    payloads = encode_sglang_pickle(items, 3)
    assert len(payloads) == 3 and len(set(payloads)) == 1
    back = LikeSGLang(io.BytesIO(base64.b64decode(payloads[0]))).load()
    assert [type(i) for i in back] == [tuple] * 5
    for (name, t), want in zip(back, items, strict=True):
        assert (name, t.dtype, t.shape, raw(t)) == (want.name, want.tensor.dtype, want.tensor.shape, raw(want.tensor))
    assert back[-1][1].untyped_storage().nbytes() == 8  # a view does not bring its whole storage


@pytest.mark.parametrize(
    ("keys", "facts"),
    [
        ({"top_k": 1, "temperature": 0.7}, (1, 0.7)),
        ({"temperature": 1e-7}, ("rollout.temperature", 1e-07)),
        ({"top_k": 0}, ("rollout.top_k", 0)),
    ],
)
def test_a_run_whose_trainer_would_score_at_another_temperature_is_refused(keys: dict, facts: Facts) -> None:
    with refuses(ValueError, *facts):
        RolloutConfig(**keys)
    assert RolloutConfig(top_k=1).top_k == 1
