"""Updates of weights: the rules of a session, both paths, versions, checksums, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.types import NamedTensor
from rollout.publish.servers import ServerSet
from rollout.sglang.client import SGLangClient
from rollout.wire import endpoints
from rollout.wire.control import PauseMode, encode_safetensors, encode_sglang_pickle
from tests.support.engine_contract.control import one
from tests.support.engine_contract.served_engine import A, B, ServedEngine, params

NORMS = [f"model.layers.2.{part}_layernorm.weight" for part in ("input", "post_attention")]
TEXT = torch.tensor([*B.token_ids, *A.token_ids])


def checksums(engine: ServedEngine) -> Mapping[str, str]:
    servers = ServerSet([engine.url], 300)
    try:
        (reply,) = servers.checksums()
    finally:
        servers.close()
    assert len(reply.ranks) == 1
    return reply.ranks[0].checksums


def scored(engine: ServedEngine) -> Tensor:
    """Log-probs of one text, of a prompt that is fed whole."""
    ((logprobs, _),) = engine.ask(lambda client: client.score([TEXT]))
    return logprobs


def outcome(engine: ServedEngine, endpoint: str, **body: Any) -> tuple[int, bool]:
    reply = engine.post(endpoint, body)
    assert isinstance(reply.json()["message"], str)
    return reply.status_code, reply.json()["success"]


def some_weights(engine: ServedEngine, source: Path) -> dict[str, Any]:
    """A request with NORMS."""
    tensors = [NamedTensor(name, HFCheckpoint(source).read(name)) for name in NORMS]
    if engine.kind == "embedded":
        return {"serialized_named_tensors": [encode_safetensors(tensors)], "load_format": "safetensors"}
    return {"serialized_named_tensors": list(encode_sglang_pickle(tensors, 1))}


class WeightsContract:
    def test_tensors_are_taken_between_begin_and_end_only(self, engine: ServedEngine) -> None:
        """A part of the weights is enough, and has no effect on what it does not name."""
        before, payload = checksums(engine), some_weights(engine, engine.other) | {"flush_cache": False}
        assert outcome(engine, endpoints.UPDATE_FROM_TENSOR, **payload) == (400, False)
        assert outcome(engine, endpoints.END_UPDATE) == (400, False)
        assert outcome(engine, endpoints.BEGIN_UPDATE) == (200, True)
        assert outcome(engine, endpoints.BEGIN_UPDATE) == (400, False)
        assert outcome(engine, endpoints.UPDATE_FROM_TENSOR, **payload, weight_version="7") == (200, True)
        assert outcome(engine, endpoints.END_UPDATE) == (200, True)
        assert outcome(engine, endpoints.END_UPDATE) == (400, False)
        after = checksums(engine)
        changed = {n for n in before if before[n] != after[n]}
        assert after.keys() == before.keys()
        assert changed == set(NORMS)
        assert engine.ask(SGLangClient.weight_version) == 7
        assert engine.generate(3)["meta_info"]["weight_version"] == "7"

    def test_an_update_that_flushes_is_refused_while_samples_are_frozen(self, engine: ServedEngine) -> None:
        async def frozen(client: SGLangClient) -> None:
            async with engine.under_way(one(client)) as asked:
                await client.pause(PauseMode.IN_PLACE)
                await asyncio.to_thread(outcome, engine, endpoints.BEGIN_UPDATE)
                body = some_weights(engine, engine.first)
                found = await asyncio.to_thread(lambda: outcome(engine, endpoints.UPDATE_FROM_TENSOR, **body))
                assert found == (400, False)
                await asyncio.to_thread(outcome, engine, endpoints.END_UPDATE)
                await client.resume()
                await client.abort_all()
                await asked

        engine.ask(frozen)

    def test_every_path_and_bucket_size_serves_the_same_weights(self, engine: ServedEngine) -> None:
        first, values = checksums(engine), scored(engine)
        served = []
        for version, how in enumerate(
            [{"bucket_bytes": 1 << 30}, {"bucket_bytes": 1}, {"bucket_bytes": 1 << 15}, {"path": "disk"}], 1
        ):
            report = engine.publish(engine.other, version, **how)  # type: ignore[arg-type]
            assert engine.ask(SGLangClient.weight_version) == version
            assert report.checksums == (checksums(engine),)
            served.append((checksums(engine), scored(engine)))
            engine.restore()
            assert checksums(engine) == first
        assert torch.equal(scored(engine), values)
        for sums, logprobs in served:
            assert sums == served[0][0] and torch.equal(logprobs, served[0][1])
        changed = sum(served[0][0][n] != first[n] for n in first)
        assert changed > 0.9 * len(first)  # a few of a stock server's are constants, as k_scale
        assert float((served[0][1] - values).abs().mean()) > 0.1

    def test_a_directory_that_cannot_be_loaded_leaves_what_is_served(self, engine: ServedEngine) -> None:
        before, values = checksums(engine), scored(engine)
        nowhere = engine.directory / "nowhere"
        reply = engine.post(endpoints.UPDATE_FROM_DISK, {"model_path": str(nowhere), "weight_version": "9"})
        assert (reply.status_code, reply.json()["success"]) == (400, False)
        assert "nowhere" in reply.json()["message"]
        assert checksums(engine) == before and torch.equal(scored(engine), values)
        assert engine.ask(SGLangClient.weight_version) == 0

    def test_a_version_is_set_without_weights(self, engine: ServedEngine) -> None:
        before = checksums(engine)
        engine.ask(lambda client: client.set_weight_version(5))
        assert engine.ask(SGLangClient.weight_version) == 5
        (group,) = engine.ask(lambda client: client.generate([A], n=1, params=params(3)))
        assert [span.version for span in group.samples[0].versions] == [5]
        assert checksums(engine) == before

    def test_what_is_served_is_named(self, engine: ServedEngine) -> None:
        """With the directory that was loaded last."""
        info = engine.ask(SGLangClient.model_info)
        assert (info.model_path, info.is_generation) == (str(engine.first), True)
        assert list(info.architectures) == engine.hf["architectures"]
        engine.publish(engine.other, 1, path="disk")
        info = engine.ask(SGLangClient.model_info)
        assert (Path(info.model_path), info.weight_version) == (engine.directory / "version_1", "1")
        server = engine.ask(SGLangClient.server_info)
        assert server["max_total_num_tokens"] >= 8192 and server["version"]
