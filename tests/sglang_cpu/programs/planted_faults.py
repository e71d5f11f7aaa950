"""Compares one trainer with stock servers of its checkpoint, healthy and with faults:

    python tests/sglang_cpu/programs/planted_faults.py FIRST SECOND OF_TWO_RANKS LONG_TEXTS OUT verify CONFIG_WORDS...

FIRST, SECOND, OF_TWO_RANKS: URLs. OUT: a file that gets {case: what `verify --json` writes}. Each comparison is that of
`miles-like verify`; the ranks of the trainer are started once.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from megatron_bridge.families.registry import family_of
from miles_like.cluster.trainer_ranks import RayTrainer
from miles_like.config.load import load_config
from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.protocols import LossFn
from miles_like.run import assemble
from miles_like.run.setup.launcher import Launcher
from miles_like.run.setup.model_plan import ModelPlan, model_plan
from miles_like.run.setup.rollout_side import RolloutSide
from miles_like.run.setup.run_cluster import RunCluster
from miles_like.run.verify import VerifyOptions, VerifyRun
from miles_like.stopping import run_to_end
from miles_like.types import NamedTensor
from rollout.config import PublishConfig
from rollout.publish import publisher
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from tests.sglang_cpu.gateway import gateway
from tests.sglang_cpu.test_stock_sglang import routes_of_the_row_before

Found = dict[str, Any]


class OneTrainer(Launcher):
    """Starts the ranks once, for all comparisons."""

    kept: RayTrainer | None = None

    def trainer(self, plan: ModelPlan, loss: LossFn) -> RayTrainer:
        if self.kept is None:
            self.kept = super().trainer(plan, loss)

            async def stays() -> None: ...

            vars(self.kept)["close"] = stays
        return self.kept


class Bench:
    def __init__(self, urls: Sequence[str], texts: Path, words: Sequence[str]) -> None:
        self.first, self.second, self.of_two = urls
        self.config = Path(words[1])
        self.run_dir = Path(words[words.index("--run-dir") + 1])
        self.sets = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        self.long = f"data.train={texts}"
        loaded = load_config(self.config, self.sets)
        self.root = assemble.staged(loaded, self.run_dir, Console(quiet=True), None)
        self.launcher = OneTrainer(RunCluster(loaded, self.run_dir, Console(quiet=True), None))
        self.checkpoint = HFCheckpoint(self.root / "hf")
        self.fused = family_of(self.checkpoint.config).bind(self.checkpoint.config).fused()
        self.found: dict[str, Found] = {}

    def look(self, case: str, *urls: str, sets: Sequence[str] = (), prompts: int = 8) -> None:
        config = load_config(self.config, [*self.sets, *sets])
        plan = model_plan(config, self.run_dir, self.root / "hf", self.root / "megatron")
        options = VerifyOptions(attached=urls, prompts=prompts, layers=True)
        run = VerifyRun(RolloutSide(plan=plan), options, launcher=self.launcher)
        run_to_end(run.meet())
        report = run.report().to_json()
        first = {url: report[f"verify/layers/first/{url}"] for url in urls}
        self.found[case] = json.loads(json.dumps(report | {"first": list(first.values())}, default=str))

    def send(self, url: str, tensors: Sequence[NamedTensor], version: int = 0) -> None:
        """As a run publishes: tensors that SGLang fuses in one request."""
        ranks = 2 if url == self.of_two else 1
        config = PublishConfig()
        target = PublishTarget(urls=(url,), kind="sglang", spec=None, config=config, fused=self.fused, tp_size=ranks)
        TensorPublisher(target, send=True).publish(tensors, version=version)

    def own(self, *names: str) -> list[NamedTensor]:
        return [NamedTensor(name, self.checkpoint.read(name)) for name in names]

    @contextlib.contextmanager
    def near(self, url: str, name: str, *beside: str) -> Iterator[None]:
        """The server has other values of this tensor, by a third of their standard deviation. beside: sent with it."""
        x = self.checkpoint.read(name)
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
        self.send(url, [NamedTensor(name, (x.float() + 0.3 * x.float().std() * noise).to(x.dtype)), *self.own(*beside)])
        yield
        self.send(url, self.own(name, *beside))


def stale_server(b: Bench) -> None:
    b.look("two servers", b.first, b.second)
    with b.near(b.second, "model.layers.1.self_attn.o_proj.weight"):
        b.look("stale second server", b.first, b.second)


def stale_half(b: Bench) -> None:
    """Of the two projections of latent attention that SGLang keeps in one parameter, or of Qwen's three."""
    layer = "model.layers.2.self_attn."
    latent = f"{layer}q_a_proj.weight" in b.checkpoint
    names = ("kv_a_proj_with_mqa", "q_a_proj") if latent else ("v_proj", "q_proj", "k_proj")
    half, *others = (f"{layer}{name}.weight" for name in names)
    with b.near(b.first, half, *others):
        b.look("stale half", b.first)


def two_ranks(b: Bench) -> None:
    tp = ["rollout.sglang.tp_size=2"]
    b.look("two ranks", b.of_two, sets=tp)
    with gateway(b.of_two, reply=routes_of_the_row_before) as url:
        b.look("routes of other rows, two ranks", url, sets=tp)
    with b.near(b.of_two, "model.layers.1.self_attn.o_proj.weight"):
        b.look("stale tensor, two ranks", b.of_two, sets=tp)


def long_context(b: Bench) -> None:
    """The first comparison fills the server's cache with the prompts of the second."""
    for case in ("long", "prefix hits"):
        b.look(case, b.first, sets=[b.long])
    with gateway(b.first, reply=routes_of_the_row_before) as url:
        b.look("routes of other rows, long", url, sets=[b.long])


def old_prefixes(b: Bench) -> None:
    """Prompts whose keys and values other weights have computed: the cache is not flushed with the right ones."""
    names = [n for n in b.checkpoint.names() if re.search(r"\.self_attn\.\w*proj\w*\.weight$", n)]
    b.send(b.first, [NamedTensor(n, x * 2) for n, x in b.own(*names)], version=1)
    b.look("filling the cache", b.first, sets=[b.long])
    flush: Callable[..., None] = publisher.flush_cache
    vars(publisher)["flush_cache"] = lambda *_: None
    b.send(b.first, b.own(*names), version=1)
    vars(publisher)["flush_cache"] = flush
    b.look("old prefixes", b.first, sets=[b.long])


if __name__ == "__main__":
    *urls, texts, out = sys.argv[1:6]
    bench = Bench(urls, Path(texts), sys.argv[6:])
    try:
        for plant in (stale_server, stale_half, two_ranks, long_context, old_prefixes):
            plant(bench)
            Path(out).write_text(json.dumps(bench.found))
    finally:
        assemble.shut_down()
