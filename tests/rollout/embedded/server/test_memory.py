"""Law: a served model gives back every byte of what it releases, and answers as before once all of its
weights have come again; in between it answers nothing, and says why.

Why it must hold: trainer and engine take turns on the same devices; bytes that stay are missing to the trainer, and an
answer that is computed over freed memory would be trained on. Not covered: devices, CUDA graphs.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_like.types import NamedTensor, Prompt
from quant.hf_config import quantized_config
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from rollout.embedded.engine.requests import Completed
from rollout.embedded.server.service import Service
from rollout.sglang import client as client_module
from rollout.sglang.client import SGLangClient
from rollout.sglang.http_replies import RolloutError
from rollout.wire.bodies import MemoryTag
from rollout.wire.control import encode_safetensors
from tests.support.embedded_fixtures import QWEN_MOE, Held, oracle, run, save, served, service, spec
from tests.support.refusals import refuses

KV, WEIGHTS, GRAPH = MemoryTag
ALL = tuple(MemoryTag)
Answer = tuple[list[int], list[float]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(oracle(), tmp_path_factory.mktemp("hf"))


def answer(s: Service) -> Answer:
    ((done,),) = run(s.engine, spec([5, 9, 33, 2, 71]))
    return list(done.reply.output_ids), list(done.reply.logprobs)


def publish(s: Service, path: Path, *, keep: Callable[[str], bool] = lambda name: True) -> None:
    from miles_like.hf.checkpoint import HFCheckpoint

    s.begin_update("1")
    s.update((NamedTensor(n, t) for n, t in HFCheckpoint(path).stream() if keep(n)), flush_cache=False, version="1")
    s.end_update("1")


def reachable(s: Service) -> int:
    """Bytes of all storages that can be reached from the served model: not by the engine's own lists of them."""
    todo, seen, sizes = (
        [s.store, s.engine.model.weights, s.engine.cache, s.part.preparation],
        set[int](),
        dict[int, int](),
    )
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
        elif type(thing).__module__.startswith(("rollout", "quant", "builtins", "collections")):
            todo += [x for x in gc.get_referents(thing) if not callable(x) or hasattr(x, "held")]
    return sum(sizes.values())


def quantized(path: Path, out: Path) -> Path:
    """The checkpoint in FP8, with small blocks."""
    spec, config = QuantSpec(format=QuantFormat.FP8, block=(16, 16)), json.loads((path / "config.json").read_text())
    out.mkdir()
    weights = ((n, t.bfloat16()) for n, t in load_file(path / "model.safetensors").items())
    save_file(dict(quantize_stream((NamedTensor(n, t) for n, t in weights), spec)), out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(quantized_config(config, spec)))
    return out


@pytest.mark.parametrize("weights", ["decoded", "codes"])
def test_every_byte_is_released_and_the_answers_come_back(tmp_path: Path, weights: str) -> None:
    where = quantized(save(oracle(base=QWEN_MOE), tmp_path / "bf16"), tmp_path / "fp8")
    s = service(where, weights=weights)
    before, held = answer(s), s.held()
    assert held["kv_cache"] > 1e5 and held["weights"] > 1e5 and held["cuda_graph"] == 0
    assert reachable(s) == held["kv_cache"] + held["weights"]

    assert s.release([KV]) == held | {"kv_cache": 0}
    assert s.release([WEIGHTS, GRAPH]) == dict.fromkeys(held, 0)
    assert reachable(s) == 0

    assert s.resume([WEIGHTS]) == dict.fromkeys(held, 0)
    publish(s, where)
    assert s.held()["weights"] > 0 == s.held()["kv_cache"]
    assert s.resume([KV, GRAPH])["kv_cache"] == held["kv_cache"]
    assert answer(s) == before
    assert s.held() == held  # the buffer for decoded values too, once it has been used
    assert reachable(s) == held["kv_cache"] + held["weights"]


def test_prefixes_are_dropped_with_the_cache(path: Path) -> None:
    """Their keys and values are gone; what is cached after the resume must be fed again."""
    s = service(path)
    prompt = spec(list(range(2, 60)))
    cold: list[list[Completed]] = run(s.engine, prompt)
    assert run(s.engine, prompt)[0][0].reply.cached_tokens > 0
    s.release([KV])
    s.resume([KV])
    again = run(s.engine, prompt)[0][0].reply
    assert again.cached_tokens == 0 and list(again.logprobs) == list(cold[0][0].reply.logprobs)


@pytest.mark.slow
def test_the_process_shrinks_by_a_large_model(tmp_path: Path) -> None:
    """More than 64 MB of weights: by the operating system's count, not by ours."""
    big = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 4096}
    s = service(save(oracle(base=QWEN_MOE | big, moe_intermediate_size=512), tmp_path))
    before, first = s.held(), rss()
    assert before["weights"] >= 64 << 20
    s.release(ALL)
    freed = first - rss()
    assert freed > 0.9 * before["weights"], f"{freed:,} of {before['weights']:,}"
    assert sum(s.held().values()) == 0


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- refusals


def test_nothing_is_released_while_a_request_runs_or_waits(path: Path) -> None:
    s = service(path, max_running=1)
    held = s.held()
    s.engine.submit(spec([5, 9], n=2), lambda done: None)
    with refuses(ValueError, 0, 2):
        s.release(ALL)
    s.engine.step()
    with refuses(ValueError, 1, 1):
        s.release([KV])
    assert s.held() == held and not s.engine.refusal
    while s.engine.step():
        pass
    s.release(ALL)


def test_release_and_resume_go_by_turns(path: Path) -> None:
    s = service(path)
    with refuses(ValueError, "kv_cache, cuda_graph"):
        s.resume([KV, GRAPH])
    s.release([KV])
    with refuses(ValueError, "kv_cache"):
        s.release([KV, WEIGHTS])
    with refuses(ValueError, "weights"):
        s.resume([KV, WEIGHTS])
    assert s.held()["weights"] > 0 == s.held()["kv_cache"]


def test_no_answer_before_the_whole_model_is_there_again(path: Path) -> None:
    s = service(path)
    before = answer(s)
    s.release(ALL)
    with refuses(ValueError, "kv_cache, weights, cuda_graph"):
        run(s.engine, spec([5]))
    for change in (s.begin_update, s.checksums, lambda: s.update_from_disk(path, flush_cache=False, version="1")):
        with refuses(ValueError, "weights"):
            change()
    s.resume(ALL)
    with refuses(ValueError, "weights"):
        run(s.engine, spec([5]))
    with refuses(ValueError, len(s.store.whole_shapes), 1, "model.norm.weight"):
        publish(s, path, keep=lambda name: name != "model.norm.weight")
    with refuses(ValueError, "weights"):
        run(s.engine, spec([5]))
    publish(s, path)
    assert answer(s) == before
    publish(s, path, keep=lambda name: name == "model.norm.weight")  # a part is enough again
    assert answer(s) == before


def test_an_unfinished_update_keeps_the_weights(path: Path) -> None:
    s = service(path)
    s.begin_update("1")
    with refuses(ValueError):
        s.release([WEIGHTS])
    s.release([KV])


# ---- over HTTP


def test_the_order_of_a_turn_over_http(path: Path) -> None:
    """With the client of the product and the requests of its publisher."""
    from miles_like.hf.checkpoint import HFCheckpoint

    payload = encode_safetensors(HFCheckpoint(path).stream())

    async def turn(url: str) -> tuple[Any, Any]:
        client = SGLangClient(url, routing=None)
        prompt = Prompt(id="a", token_ids=(5, 9, 33), answer="")
        params = spec([5], max_new_tokens=8, temperature=1.0).sampling
        first = await client.generate([prompt], n=2, params=params)
        await client.release_memory(ALL)
        assert (await client.server_info())["held_bytes"] == {"kv_cache": 0, "weights": 0, "cuda_graph": 0}
        await client.resume_memory([WEIGHTS])
        await client._change("/begin_weight_update", {})
        await client._change(
            "/update_weights_from_tensor",
            {"serialized_named_tensors": [payload], "load_format": "safetensors", "flush_cache": False},
        )
        await client._change("/end_weight_update", {})
        client.occupation.published()
        await client.resume_memory([KV, GRAPH])
        second = await client.generate([prompt], n=2, params=params)
        await client.close()
        return first, second

    s = service(path)
    s.engine.set_version("0")
    with served(s) as url:
        first, second = asyncio.run(turn(url))
    for a, b in zip(first[0].samples, second[0].samples, strict=True):
        assert a.token_ids.equal(b.token_ids) and a.logprobs.equal(b.logprobs)


def test_refusals_over_http_are_sentences(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a stock server dies of, sent to this one directly."""
    monkeypatch.setattr(client_module, "_FLUSH_S", 0.2)
    s = service(path)
    held = Held(s.engine)
    held.until = 3
    with served(s) as url, httpx.Client(base_url=url, trust_env=False, timeout=30) as http:

        def refused(endpoint: str, body: Any) -> str:
            reply = http.post(endpoint, json=body)
            assert reply.status_code == 400, reply.text
            return str(reply.json()["error"]["message"])

        assert "was not released" in refused("/resume_memory_occupation", {"tags": ["kv_cache"]})
        assert "'wights'" in refused("/release_memory_occupation", {"tags": ["wights"]})

        async def busy() -> None:
            params = {"max_new_tokens": 8, "ignore_eos": True}  # an end that is sampled would leave nothing to hold
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as other:
                asked = asyncio.create_task(
                    other.post("/generate", json={"input_ids": [5, 9], "sampling_params": params})
                )
                await held.reached()
                assert "1 samples run" in await asyncio.to_thread(refused, "/release_memory_occupation", {})
                client = SGLangClient(url, routing=None)
                with refuses(RolloutError, "/flush_cache", "HTTP", 400, unrecorded="it names the port"):
                    await client.release_memory(ALL)
                await client.close()
                held.until = 1 << 60
                await other.get("/server_info")  # wakes the engine
                assert (await asked).status_code == 200

        asyncio.run(busy())
        assert not any(http.post("/release_memory_occupation").json()["held"].values())
        assert "is released" in refused("/generate", {"input_ids": [5]})
        assert "is released" in refused("/weights_checker", {})
        assert http.get("/health").status_code == 200


def test_memory_that_is_not_there_when_it_is_resumed_is_asked_for_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of it had been allocated by then; it is free again."""
    s = service(path)
    before = answer(s)
    s.release([KV])
    cache, zeros, left = s.engine.cache, torch.zeros, iter((True, False))

    def scarce(*shape: Any, **how: Any) -> torch.Tensor:
        if not next(left, True):
            raise RuntimeError("not enough memory")
        return zeros(*shape, **how)

    with monkeypatch.context() as planted:
        planted.setattr(torch, "zeros", scarce)
        with pytest.raises(RuntimeError, match="not enough memory"):
            s.resume([KV])
    assert cache.nbytes == 0
    with refuses(ValueError, "kv_cache"):
        s.engine.submit(spec([5]), lambda done: None)
    s.resume([KV])
    assert answer(s) == before
