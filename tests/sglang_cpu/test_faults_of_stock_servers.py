"""Law: `verify` names what is wrong with stock servers where it is hard to see: in one server of two, in one part of a
fused tensor, at two tensor-parallel ranks, behind cached prefixes, at 4096 tokens of context. Healthy servers pass each
of these comparisons.

SGLang 0.5.23 as it is released, on CPU, in BF16 (`make sglang-all`), with both shapes of attention: two servers of one
rank and one of two, for all cases, which programs/planted_faults.py plants over the wire or by a gateway.
test_stock_sglang.py has the faults of a single server of short texts. Not covered: quantized weights, GPUs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sglang_cpu.conftest import Run
from tests.sglang_cpu.served import CONFIGS, MODELS, PROGRAMS, ROOT, SETTINGS, START_S, given, serve

pytestmark = [pytest.mark.slow, pytest.mark.sglang_all]
CONTEXT, PROMPTS = 4096, 8
FLAGS = (
    *("--context-length", "8192", "--max-total-tokens", "70000", "--chunked-prefill-size", "2048"),
    *("--max-running-requests", "8"),
)
Found = dict[str, dict[str, Any]]


def long_texts(path: Path, tokens: int) -> Path:
    """Prompts of additions of `tokens` characters, which are as many tokens; each begins differently."""
    rows = []
    for i in range(PROMPTS):
        numbers = torch.randint(10, 100, (tokens // 3 + 1,), generator=torch.Generator().manual_seed(i)).tolist()
        rows.append({"id": f"p{i}", "prompt": "+".join(map(str, numbers))[: tokens - 1] + "=", "answer": "0"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def long_model(shape: str, home: Path) -> Path:
    """The shape with as much context, without Qwen's dense layer, which SGLang 0.5.23 does not know."""
    model = json.loads((ROOT / "configs" / "tiny" / MODELS[shape]).read_text()) | {"max_position_embeddings": 16384}
    if model.get("rope_scaling"):
        model["rope_scaling"] |= {"factor": 64.0}
    path = home / "model.json"
    path.write_text(json.dumps(model | ({"mlp_only_layers": []} if "mlp_only_layers" in model else {})))
    return path


@pytest.fixture(scope="module", params=CONFIGS)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, miles_like: Run) -> Iterator[Found]:
    home, config = tmp_path_factory.mktemp(request.param), ROOT / "configs" / CONFIGS[request.param]
    settings = (f"model.make.config={long_model(request.param, home)}", f"data.max_prompt_tokens={CONTEXT}")
    words = given((*SETTINGS, *settings, "train.max_tokens_per_rank=4608"))
    made = miles_like("train", config, "--run-dir", home / "run", "--stages", "fetch,dequantize,convert,stage", *words)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-3000:]
    (served,) = home.glob("cache/stage-*/data/hf")
    out, texts = home / "found.json", long_texts(home / "long.jsonl", CONTEXT - 24)
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(serve(served, home / f"{i}.log", *FLAGS, tp=tp, states=home / f"states{i}"))
            for i, tp in enumerate((1, 1, 2))
        ]
        for server in servers:
            server.await_ready(START_S)
        urls = [server.url for server in servers]
        words = ["verify", config, "--run-dir", home / "run", *words]
        done = miles_like(*urls, texts, out, *words, script=PROGRAMS / "planted_faults.py")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    yield json.loads(out.read_text())


def causes(case: dict[str, Any]) -> set[tuple[str, str]]:
    return {(v["step"], v["cause"]) for v in case["verdicts"]}


HEALTHY = ("two servers", "two ranks", "long", "prefix hits")


def test_healthy_servers_have_no_cause(found: Found) -> None:
    """Also those whose prompts are in their caches, and at two ranks, whose weights are not compared."""
    assert not {case: found[case]["verdicts"] for case in HEALTHY if not found[case]["ok"]}
    assert all(found[case]["mismatch/kl"] < 1e-3 for case in HEALTHY)
    assert found["two ranks"]["verify/weights/verdict"] == "not compared"
    assert found["prefix hits"]["verify/rescored/kl"] < 1e-3


def test_one_stale_server_of_two_is_named(found: Found) -> None:
    """Its tensor, with nothing sent, and its layer as the first that differs; the other server has none."""
    case = found["stale second server"]
    assert case["differing_tensors"] == ["model.layers.1.self_attn.o_proj.weight"]
    assert case["first"] == [None, "the attention of layer 1"]
    assert {step for step, _ in causes(case)} >= {"weights", "layers"}


def test_one_stale_part_of_a_fused_tensor_is_named(found: Found) -> None:
    case = found["stale half"]
    (name,) = case["differing_tensors"]
    assert name.removeprefix("model.layers.2.self_attn.") in ("fused_qkv_a_proj_with_mqa.weight", "qkv_proj.weight")
    assert case["first"] == ["the attention of layer 2"]


def test_routes_of_other_tokens_and_a_stale_tensor_are_named_at_two_ranks(found: Found) -> None:
    """Where no hash is compared, the layer is what names the tensor."""
    assert ("routing", "routes shifted") in causes(found["routes of other rows, two ranks"])
    case = found["stale tensor, two ranks"]
    assert case["first"] == ["the attention of layer 1"] and not case["ok"]


def test_routes_of_other_tokens_are_named_at_4096_tokens(found: Found) -> None:
    assert ("routing", "routes shifted") in causes(found["routes of other rows, long"])


def test_keys_and_values_of_older_weights_are_named(found: Found) -> None:
    """Every hash is right, and so are the layers of a text that is fed whole; what the server itself scores afterwards
    is not what it sampled with."""
    case = found["old prefixes"]
    assert case["verify/weights/verdict"] == "agrees" and case["first"] == [None]
    assert not case["ok"] and case["verify/rescored/kl"] > 1e-3, case["conclusion"]
