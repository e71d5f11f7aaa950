"""Random layouts whose ranks are executed and held to the plan: python -m tests.support.random_layouts FILE

The models are those of shipped configurations at true width, shortened so that a rank takes seconds: a layout divides
widths, experts and data, and each kind of layer is there. Layouts that the configuration classes or the model refuse
are drawn again.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_bridge.fake.stages import distinct_stages
from miles_like.commands.execute import Ranks
from tests.support.plans import path_of, trainer_ranks

SEED = 22
COUNT = 40
MODELS = (
    "deepseek_v3_fp8",
    "glm45_air",
    "kimi_k2_int4_qat",
    "moonlight_16b_a3b",
    "qwen3_0_6b",
    "qwen3_4b",
    "qwen3_30b_a3b",
    "qwen3_30b_a3b_fp8",
    "qwen3_30b_a3b_int4_qat",
    "qwen3_235b_a22b",
)
DIVIDED = ("deepseek_v3_fp8", "kimi_k2_int4_qat", "qwen3_235b_a22b")  # their first and last stages have other sizes
DENSE = ("qwen3_0_6b", "qwen3_4b")
LAYERS = (2, 4, 6, 8)  # of the shortened models
IMBALANCES = (1.0, 1.25, 1.5)  # in turn; the second is the default of plans


def main(out: Path) -> None:
    layouts = list(drawn(SEED, COUNT))
    out.write_text("[\n" + ",\n".join(map(json.dumps, layouts)) + "\n]\n", encoding="utf-8")


def drawn(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """{config, overrides, stage, imbalance} of each layout."""
    rng = random.Random(seed)
    for number, name in enumerate(itertools.islice(itertools.cycle(MODELS), count)):
        found = None
        while found is None:
            found = _accepted(name, _draw(name, rng), rng)
        shared = name not in DENSE and "parallel.ep=1" not in found["overrides"]
        yield {**found, "imbalance": IMBALANCES[number % len(IMBALANCES)] if shared else 1.0}


def _draw(name: str, rng: random.Random) -> list[str]:
    world = rng.choice((8, 16, 32, 64))
    tp, cp = rng.choice((1, 2, 4, 8)), rng.choice((1, 1, 2, 4))
    pp = rng.choice((2, 4)) if name in DIVIDED else rng.choice((1, 1, 2, 4))
    overlap = rng.choice(("false", "false", "true"))
    dp = max(1, world // (tp * cp * pp))
    keys: dict[str, object] = {
        "model.first_layers": rng.choice(LAYERS),
        "cluster.nodes": world // 8,
        "cluster.gpus_per_node": 8,
        "parallel.tp": tp,
        "parallel.cp": cp,
        "parallel.pp": pp,
        "parallel.dp": dp,
        "parallel.vpp": rng.choice((1, 1, 1, 2)) if pp > 1 else 1,
        "rollout.servers": world // 8,
        "rollout.sglang.tp_size": 8,
        "train.recompute": rng.choice(("none", "selective", "full")),
        "train.max_tokens_per_rank": rng.choice((4096, 8192, 16384)),
        "kernels.offload_optimizer": rng.choice((0.0, 0.0, 0.25, 0.5, 1.0)),
        "kernels.overlap_grad_reduce": overlap,
        "kernels.overlap_param_gather": overlap,
        "rollout.max_new_tokens": 2048,
        "data.max_prompt_tokens": 1024,
    }
    if name not in DENSE:
        keys["parallel.ep"] = rng.choice((1, 2, 4, 8, 16))
        keys["parallel.etp"] = rng.choice((1, 1, 2))
    if name in ("deepseek_v3_fp8", "kimi_k2_int4_qat", "qwen3_30b_a3b_fp8"):
        keys |= {"rollout.servers": 1, "rollout.sglang.tp_size": world, "rollout.sglang.ep_size": world}
        keys |= {"rollout.sglang.dp_size": world} if name != "qwen3_30b_a3b_fp8" else {}
    if name in DIVIDED or (pp > 2 and rng.random() < 0.3):
        end = int(str(keys["model.first_layers"])) // pp
        keys |= {"parallel.first_stage_layers": end, "parallel.last_stage_layers": end}
    return [f"{key}={value}" for key, value in keys.items()]


def _accepted(name: str, overrides: list[str], rng: random.Random) -> dict[str, Any] | None:
    try:
        trainer_ranks(name, *overrides)
        with tempfile.TemporaryDirectory() as where:
            ranks = Ranks(path_of(name), Path(where), overrides)
            stages = distinct_stages(ranks.config, ranks.hf)
    except ValueError as e:
        print(name, e, file=sys.stderr)
        return None
    return {"config": name, "overrides": overrides, "stage": rng.choice(stages).number}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
