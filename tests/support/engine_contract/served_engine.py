"""One served model as the contract asks it: with the product's client and publishers, and over HTTP where a claim is
about the surface itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
import torch
from torch import Tensor

from megatron_bridge.families.registry import family_of
from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.types import Prompt, PublishReport, Sample, SamplingParams
from rollout.config import PublishConfig
from rollout.publish.directory.disk_publisher import DiskPublisher, SharedDirectory
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from rollout.sglang.client import SGLangClient
from rollout.sglang.samples import RoutingShape
from tests.support.tiny_models import felt_tensors, tiny, tiny_qwen, write_checkpoint

T = TypeVar("T")
A = Prompt(id="a", token_ids=(5, 9, 33, 2, 71), answer="")
B = Prompt(id="b", token_ids=tuple(range(10, 47)), answer="")
LONG = 900  # tokens of an answer that is under way while a test does something else
WAITS_S = 0.2  # for what must not happen
_HTTP = httpx.Client(timeout=300, trust_env=False, verify=False, limits=httpx.Limits(keepalive_expiry=2.0))
STEP_S = 0.002  # least time of a step of the embedded engine, which is otherwise too fast for that
SHAPES = {"deepseek": tiny(eos_token_id=None), "qwen": tiny_qwen(eos_token_id=None)}  # answers end at their limit


def write_models(hf: dict[str, Any], where: Path) -> tuple[Path, Path]:
    """Two checkpoints of one architecture: other values of every weight."""
    g = torch.Generator().manual_seed(1)
    first = felt_tensors(hf)
    other = {n: (t + 0.5 * t.float().std() * torch.randn(t.shape, generator=g)).to(t.dtype) for n, t in first.items()}
    return write_checkpoint(where / "first", hf, first), write_checkpoint(where / "other", hf, other)


@dataclass(frozen=True, kw_only=True)
class ServedEngine:
    """Before each test it serves `first` as version 0, idle.

    seeded: `sampling_seed` determines the tokens. rounding: mean difference, in nats, between the log-probs of tokens
    when they were sampled and when they are scored. keeps_rows: a retracted sample keeps the routes that gave its
    log-probs. running: samples that it decodes at once. directory: for what is published on disk.
    """

    url: str
    kind: Literal["embedded", "sglang"]
    hf: dict[str, Any]  # config.json
    first: Path
    other: Path
    directory: Path
    seeded: bool
    rounding: float
    keeps_rows: bool
    running: int = 16

    @property
    def vocab(self) -> int:
        return int(self.hf["vocab_size"])

    @property
    def routing(self) -> RoutingShape | None:
        """None: a model without experts."""
        hf, family = self.hf, family_of(self.hf)
        if not family.moe_layers(hf):
            return None
        experts = int(hf.get("n_routed_experts") or hf["num_experts"])
        return RoutingShape(
            num_layers=family.num_layers(hf),
            moe_layers=tuple(family.moe_layers(hf)),
            top_k=int(hf["num_experts_per_tok"]),
            num_experts=experts,
        )

    def client(self, **options: Any) -> SGLangClient:
        samples_from: Any = "server" if self.kind == "embedded" else "client"
        default = {"routing": self.routing, "vocabulary": self.vocab, "samples_from": samples_from}
        return SGLangClient(self.url, **({"request_timeout_s": 300.0} | default | options))

    def ask(self, call: Callable[[SGLangClient], Awaitable[T]], **options: Any) -> T:
        """What `call` gives for a client of it, in a separate event loop."""

        async def alone() -> T:
            client = self.client(**options)
            try:
                return await call(client)
            finally:
                await client.close()

        return asyncio.run(alone())

    def post(self, endpoint: str, body: Any = None) -> httpx.Response:
        return _HTTP.post(self.url + endpoint, json={} if body is None else body)

    def generate(self, tokens: int, ids: tuple[int, ...] = A.token_ids, **more: Any) -> Any:
        """The reply to one greedy prompt. more: keys of the request, and sampling parameters in `sampling`."""
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True} | more.pop("sampling", {})
        reply = self.post("/generate", {"input_ids": list(ids), "sampling_params": sampling} | more)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def publish(
        self, source: Path, version: int, *, path: str = "tensor", mode: str = "retract", bucket_bytes: int = 1 << 16
    ) -> PublishReport:
        """The weights of `source` by a publisher of the product, which compares checksums."""
        hf = self.hf
        config = PublishConfig.model_validate({"path": path, "pause_mode": mode, "bucket_bytes": bucket_bytes})
        target = PublishTarget(
            urls=(self.url,), kind=self.kind, spec=None, config=config, fused=family_of(hf).bind(hf).fused()
        )
        weights = HFCheckpoint(source).stream()
        if path == "disk":
            shared = SharedDirectory(path=self.directory, hf_config=hf, copy_from=self.first)
            return DiskPublisher(target, shared).publish(weights, version=version)
        return TensorPublisher(target, send=True).publish(weights, version=version)

    def restore(self) -> None:
        """What it serves before each test. Nothing else is on it."""
        self.post("/end_weight_update")  # refused where none was left
        for endpoint, body in (("/continue_generation", {}), ("/abort_request", {"rid": "", "abort_all": True})):
            assert self.post(endpoint, body).status_code == 200
        assert self.post("/flush_cache?timeout=30").status_code == 200
        body = {"model_path": str(self.first), "weight_version": "0"}
        assert self.post("/update_weights_from_disk", body).status_code == 200

    def is_busy(self) -> bool:
        return self.post("/flush_cache").status_code == 400

    async def some_tokens_later(self) -> None:
        """When a request beside those under way has been answered, each of them has about as many tokens more."""
        await asyncio.to_thread(self.generate, 8, (40, 41, 42))

    @asynccontextmanager
    async def under_way(self, asked: Awaitable[T]) -> AsyncGenerator[asyncio.Future[T], None]:
        """A request of LONG tokens, of which some are there."""
        task = asyncio.ensure_future(asked)
        try:
            async with asyncio.timeout(60):
                while not await asyncio.to_thread(self.is_busy):
                    await asyncio.sleep(0.01)
            await self.some_tokens_later()
            assert not task.done(), f"{LONG} tokens are too few: they have ended"
            yield task
        finally:
            task.cancel()

    def scores_of(self, samples: list[Sample]) -> list[tuple[Tensor, Any]]:
        return self.ask(lambda client: client.score([s.token_ids for s in samples]))


def params(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": tokens, "temperature": 1.0, "sampling_seed": 3} | more))
