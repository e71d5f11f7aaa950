"""Random layouts of the shipped models' first layers, at true widths, for `make plan-all`:
`python -m tests.support.random_layouts` writes docs/plan/random_layouts.json.

Each is drawn among the divisions of a number of ranks that the model's sizes allow, with one way to recompute, share of
the optimizer on the host, size of a micro-batch and format of the rollout. What the run's configuration classes refuse
is drawn again, so all of them could be started.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from megatron_bridge.config import ParallelConfig
from miles_like.config.load import load_config
from miles_like.layout_search.space import RECOMPUTE, Divisions, Refusals
from miles_like.pipeline.first_layers import shortened
from miles_like.timing.shape import model_shape
from tests.support.plans import model_of, path_of

LAYOUTS = Path(__file__).parents[2] / "docs" / "plan" / "random_layouts.json"
NUMBER, SEED = 40, 22
NAMES = (
    "qwen3_0_6b",
    "qwen3_4b",
    "qwen3_30b_a3b",
    "moonlight_16b_a3b",
    "glm45_air",
    "qwen3_235b_a22b",
    "deepseek_v3_fp8",
    "kimi_k2_int4_qat",
)
FORMATS = ("bf16", "fp8", "int4")
RANKS, LAYERS, TOKENS, OFFLOAD = (1, 2, 4, 8, 16, 32, 64), (4, 5, 6, 8), (2048, 4096, 8192, 16384), (0.0, 0.5, 1.0)


class RandomLayout(TypedDict):
    config: str  # name of the configuration that it changes
    overrides: list[str]  # section.key=value
    stage: int  # of the pipeline, whose first rank is executed


def random_layouts(number: int = NUMBER, seed: int = SEED) -> Iterator[RandomLayout]:
    """The same for the same seed. Names take turns."""
    rng = random.Random(seed)
    for n in range(number):
        name, made = NAMES[n % len(NAMES)], None
        while made is None:
            made = _drawn(rng, name)
        yield made


def _drawn(rng: random.Random, name: str) -> RandomLayout | None:
    """None for one that is refused."""
    layers, ranks = rng.choice(LAYERS), rng.choice(RANKS)
    base = load_config(path_of(name))
    given, servers = base.model.config, base.servers
    assert given is not None and servers is not None
    hf = shortened(json.loads(Path(given).read_text()), layers)
    divisions = list(Divisions(hf, model_shape(hf), 8, Refusals()).of(ranks))
    if not divisions:
        return None
    parallel, recompute, format = rng.choice(divisions), rng.choice(RECOMPUTE), rng.choice(FORMATS)
    overrides = [
        f"model.first_layers={layers}",
        "data.max_prompt_tokens=512",
        "rollout.max_new_tokens=1024",
        *_divided(parallel, layers, base.parallel),
        *_placed(ranks, servers.sglang.tp_size),
        f"train.recompute={recompute}",
        f"train.max_tokens_per_rank={rng.choice(TOKENS)}",
        f"kernels.offload_optimizer={rng.choice(OFFLOAD)}",
        f"precision.format={format}",
        f"precision.qat={str(format != 'bf16').lower()}",
    ]
    try:
        model_of(load_config(path_of(name), overrides))
    except ValueError:
        return None
    return RandomLayout(config=name, overrides=overrides, stage=rng.randrange(parallel.pp))


def _divided(p: ParallelConfig, layers: int, base: ParallelConfig) -> list[str]:
    """Stages of equal numbers of layers have them written out if the configuration has other ends."""
    sizes = {name: getattr(p, name) for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")}
    if p.pp > 1 and (p.first_stage_layers or base.first_stage_layers):
        sizes["first_stage_layers"] = p.first_stage_layers or layers // p.pp
        sizes["last_stage_layers"] = p.last_stage_layers or layers // p.pp
    return [f"parallel.{name}={value}" for name, value in sizes.items()]


def _placed(ranks: int, engine: int) -> list[str]:
    """Engines of `engine` GPUs on the trainer's, where they fill them, else one on GPUs of nodes with no ranks."""
    width, shared = min(max(ranks, engine), 8), ranks % engine == 0
    nodes = -(-ranks // width) + (0 if shared else -(-engine // width))
    return [
        f"cluster.nodes={nodes}",
        f"cluster.gpus_per_node={width}",
        f"cluster.colocate={str(shared).lower()}",
        f"rollout.servers={ranks // engine if shared else 1}",
    ]


if __name__ == "__main__":
    found = list(random_layouts())
    LAYOUTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(Counter(one["config"] for one in found))
