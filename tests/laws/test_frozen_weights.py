"""Law: of a run that freezes weights, the frozen ones are sent once, and the servers hold all weights of each version.

One rank trains with the configurations that freeze something, and publishes to a server of the embedded engine. What is
frozen is known here from the Hugging Face names. Not covered: servers that start later (tests/rollout/publish).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from miles_like.hf.checkpoint import write_hf
from rollout.config import PublishConfig
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from rollout.wire.checksum import tensor_checksum
from tests.support import toy
from tests.support.layouts import EXPERTS, ROUTED
from tests.support.spawn import run_ranks

CASES: dict[str, tuple[dict[str, Any], str]] = {  # settings, a pattern of the names that are trained
    "LoRA": ({"lora": {"rank": 2, "targets": ["attention"]}}, r"self_attn\.\w+_proj(_with_mqa)?\.weight"),
    "a frozen router": ({"frozen": ["*.router.*"]}, r"(?<!mlp\.gate\.weight)(?<!correction_bias)$"),
    "experts alone": (
        {
            "frozen": [
                "embedding.*",
                "output_layer.*",
                "*layernorm*",
                "*self_attention*",
                "*router*",
                "*shared_experts*",
                "decoder.layers.0.mlp.*",
            ]
        },
        r"\.mlp\.experts\.",
    ),
}


def _rank(rank: int, world: int, port: int, where: str, name: str) -> list[dict[str, Any]]:
    from tests.support.embedded_fixtures import served, service

    settings = dict(CASES[name][0])
    if frozen := settings.pop("frozen", None):
        settings["optimizer"] = {"lr": 1e-3, "eps": 1e-8, "frozen": frozen}
    found: list[dict[str, Any]] = []
    with toy.trainer(toy.config(where, mode="off", dtype="bfloat16", **settings), rank, world, port) as t:
        write_hf(Path(where) / "served", t.export(), t.hf)
        s = service(Path(where) / "served")
        row, tokens = toy.grid(toy.samples(4, layers=t.family.moe_layers(t.hf), experts=EXPERTS), dp=1, micros=1)
        with served(s) as url:
            taken: list[str] = []
            update = s.update
            s.update = lambda tensors, **more: update(  # type: ignore[method-assign]
                (taken.append(n) or (n, x) for n, x in tensors),
                **more,  # type: ignore[func-returns-value]
            )
            target = PublishTarget(urls=(url,), kind="embedded", spec=None, config=PublishConfig())
            publisher = TensorPublisher(target, send=True)
            for step in range(3):
                t.step(row[0], tokens, step + 1)
                publisher.publish(t.export(), version=step + 1)
                want = {n: tensor_checksum(n, x) for n, x in t.export()}
                found.append({"sent": sorted(taken), "same": s.store.checksums() == want, "names": sorted(want)})
                taken.clear()
    return found


@pytest.mark.parametrize("name", CASES)
def test_frozen_weights_are_sent_once(name: str, tmp_path: Path) -> None:
    toy.hf_dir(tmp_path, toy.hf_config() | ROUTED)
    (steps,) = run_ranks(_rank, 1, str(tmp_path), name, keep=True)
    trained = {n for n in steps[0]["names"] if re.search(CASES[name][1], n)}
    assert 0 < len(trained) < len(steps[0]["names"])
    assert steps[0]["sent"] == steps[0]["names"] and all(step["same"] for step in steps)
    for step in steps[1:]:
        assert set(step["sent"]) <= trained and len(step["sent"]) > 0.5 * len(trained)
