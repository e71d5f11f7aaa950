"""Law: whichever requests carry a publication, the embedded engine serves the same bits: in requests of one byte, which
part the weights wherever they may be parted, and for every bucket size that gives another division.

Why it must hold: `publish.bucket_bytes` is a matter of memory; a boundary that changed a served value would train
against weights that nothing computed. Every family of the engine, in BF16 and in FP8, whose codes and scales belong
together; each division replaces all weights by others, in turns. The oracle is a server that was started with them.
Not covered: stock SGLang (tests/sglang_cpu/test_stock_sglang.py and test_stock_families.py); other formats, whose
divisions are those of tests/rollout/publish/test_buckets.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_bridge.families.registry import family_of
from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.types import NamedTensor
from quant.hf_config import quantized_config
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from rollout.config import PublishConfig
from rollout.embedded.families.registry import FAMILIES
from rollout.embedded.server.service import Service
from rollout.publish.buckets import cut, gathered
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from rollout.publish.servers import ServerSet
from tests.support.chosen import later
from tests.support.embedded_fixtures import run, served, service, spec
from tests.support.tiny_models import (
    random_tensors,
    tiny,
    tiny_dense,
    tiny_glm,
    tiny_kimi,
    tiny_qwen,
    write_checkpoint,
)

SMALL = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2}
FEW = SMALL | {"n_routed_experts": 3, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek": tiny(**FEW, **LATENT),
    "deepseek_no_q_lora": tiny(**FEW, **LATENT | {"q_lora_rank": None}, n_shared_experts=2),
    "kimi": tiny_kimi(**FEW, **LATENT),
    "qwen_moe": tiny_qwen(**SMALL, num_experts=3, num_experts_per_tok=2, head_dim=16),
    "qwen": tiny_dense(**SMALL, head_dim=16, tie_word_embeddings=True),
    "glm": tiny_glm(**FEW, head_dim=16),
}
pytestmark = pytest.mark.slow
FORMATS = {"bf16": None, "fp8": QuantSpec(format=QuantFormat.FP8, block=(16, 16))}
HERE = "tests/laws/test_bucket_sizes.py"
PROMPT = list(range(10, 30))


class Model(NamedTuple):
    hf: dict[str, Any]
    fused: Sequence[Sequence[str]]
    sources: tuple[Path, Path]  # checkpoints of other values
    streams: tuple[list[NamedTensor], list[NamedTensor]]  # what a publisher divides
    answers: tuple[Any, Any]  # of servers that were started with them
    sums: tuple[dict[str, str], dict[str, str]]


def answer(s: Service) -> tuple[list[int], list[float], str | None]:
    ((done,),) = run(s.engine, spec(PROMPT, max_new_tokens=2, temperature=0.0, logprob_start=0))
    return done.reply.output_ids.tolist(), list(done.prompt_logprobs), done.reply.routed_experts


def made(name: str, quantized: QuantSpec | None, where: Path) -> Model:
    hf = MODELS[name]
    fused = family_of(hf).bind(hf).fused()
    config = hf if quantized is None else quantized_config(hf, quantized)
    sources, streams, answers, sums = [], [], [], []
    for seed in (0, 1):
        weights = [NamedTensor(n, 2 * t) for n, t in random_tensors(hf, seed).items()]
        streams.append([NamedTensor(n, t) for n, t in quantize_stream(gathered(weights, fused), quantized)])
        path = write_checkpoint(where / str(seed), config, dict(streams[-1]))
        s = service(path)
        sources.append(path)
        answers.append(answer(s))
        sums.append(s.store.checksums())
    assert answers[0] != answers[1] and all(sums[0][n] != sums[1][n] for n in sums[0])
    return Model(hf, fused, (sources[0], sources[1]), (streams[0], streams[1]), tuple(answers), tuple(sums))  # type: ignore[arg-type]


def divisions(stream: Sequence[NamedTensor], fused: Sequence[Sequence[str]]) -> dict[tuple[int, ...], int]:
    """Every division that a bucket size gives, as the lengths of its requests -> such a size. A request ends where the
    next tensor would exceed the size, so the division changes at sums of neighbours only."""
    ends = [0, *itertools.accumulate(t.tensor.nbytes for t in stream)]
    sums = {b - a for a, b in itertools.combinations(ends, 2)}
    return {tuple(map(len, cut(stream, size, fused))): size for size in sorted({1, *sums})}


def test_the_models_are_of_every_family() -> None:
    assert {hf["architectures"][0] for hf in MODELS.values()} == FAMILIES.keys()


@pytest.mark.parametrize(
    "case",
    [*((name, "bf16") for name in MODELS), *later([(name, "fp8") for name in MODELS], [("glm", "fp8")], HERE)],
    ids="-".join,
)
def test_every_division_serves_the_same_bits(case: tuple[str, str], tmp_path: Path) -> None:
    model = made(case[0], FORMATS[case[1]], tmp_path)
    s, found = service(model.sources[0]), divisions(model.streams[0], model.fused)
    assert 1 in map(len, found) and max(map(len, found)) > 15 and len(found) > 20
    for k, (lengths, size) in enumerate(found.items()):
        new = (k + 1) % 2
        s.begin_update()
        parts = list(cut(model.streams[new], size, model.fused))
        assert tuple(map(len, parts)) == lengths
        for part in parts:
            s.update(part, flush_cache=True, version=str(k))
        s.end_update()
        assert s.store.checksums() == model.sums[new], (size, lengths)
        if k % 8 == 0 or k + 1 == len(found):
            assert answer(s) == model.answers[new], (size, lengths)


@pytest.mark.parametrize("name", MODELS)
def test_a_publisher_of_any_bucket_size_serves_them_too(name: str, tmp_path: Path) -> None:
    """From the trainer's weights, over HTTP, in requests of one byte and in a few."""
    model = made(name, None, tmp_path)
    s = service(model.sources[0])
    with served(s) as url:
        for version, size in enumerate((1, 1 << 12, 1 << 14), 1):
            new = version % 2
            config = PublishConfig(bucket_bytes=size)
            target = PublishTarget(urls=(url,), kind="embedded", spec=None, config=config, fused=model.fused)
            weights = HFCheckpoint(model.sources[new]).stream()
            TensorPublisher(target, send=True).publish(weights, version=version)
            servers = ServerSet([url], 60)
            assert servers.checksums()[0].ranks[0].checksums == model.sums[new]
            servers.close()
    assert s.engine.version == "3" and answer(s) == model.answers[1]
