"""Tokens a second of the embedded engine, by itself and through HTTP, beside transformers' `generate`.

All three have the same random weights (configs/tiny/model.json), prompts, 8 samples a prompt and number of threads, and
are timed in turn, round by round, so that a busy machine slows all alike; each figure is the median over the rounds.
The engine's two ways are timed three times a round, since a difference of 15 % drowns sooner than a factor.

(a) every sample has the same length. (b) lengths are log-normal, one request a sample: `generate` runs every row to the
longest, and its useful tokens are counted. Only tokens that were asked for count; log-probs and expert ids are returned
by the engine and not by `generate`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from figures import add_write, finish
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.utils import logging as transformers_logging

from miles_like.types import SamplingParams
from rollout.embedded.engine.engine import EngineLimits
from rollout.embedded.engine.requests import Completed, PromptSpec
from rollout.embedded.server.service import Service
from rollout.wire.generate import GenerateRequest

ROOT = Path(__file__).resolve().parent.parent
SAMPLES = 8
PROMPTS_PER_REQUEST = 16
TURNS = 3
GOALS = {"engine_over_generate_equal": 1.8, "engine_over_generate_long_tail": 3.0, "http_cost": 0.15}


@dataclass(frozen=True, slots=True)
class Work:
    """One prompt and the lengths of its samples."""

    prompts: list[tuple[int, ...]]
    lengths: list[list[int]]  # [prompt][SAMPLES]

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.lengths))

    @property
    def longest(self) -> int:
        return max(map(max, self.lengths))

    def specs(self) -> list[PromptSpec]:
        """One request a prompt where its samples are of one length, else one a sample."""
        out = []
        for i, (ids, lengths) in enumerate(zip(self.prompts, self.lengths, strict=True)):
            equal = len(set(lengths)) == 1
            for j, length in enumerate(lengths[:1] if equal else lengths):
                out.append(
                    PromptSpec(
                        rid=f"{i}-{j}",
                        token_ids=ids,
                        sampling=SamplingParams(max_new_tokens=length, sampling_seed=i * SAMPLES + j),
                        n=SAMPLES if equal else 1,
                        ignore_eos=True,
                        routing_start=0,
                    )
                )
        return out


def equal_work(prompts: int, length: int) -> Work:
    return Work(_prompts(prompts), [[length] * SAMPLES] * prompts)


def long_tailed_work(prompts: int, median: int, longest: int) -> Work:
    """Log-normal lengths with sigma 1, cut at `longest`, which one sample has."""
    g = torch.Generator().manual_seed(1)
    drawn = (math.log(median) + torch.randn(prompts, SAMPLES, generator=g)).exp().round().clamp(1, longest).int()
    drawn[0, 0] = longest
    return Work(_prompts(prompts), drawn.tolist())


def _prompts(n: int) -> list[tuple[int, ...]]:
    g = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(2, 128, (8,), generator=g).tolist()) for _ in range(n)]


def make_model(path: Path) -> Any:
    torch.manual_seed(0)
    config = json.loads((ROOT / "configs/tiny/model.json").read_text())
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**config)).float().eval()
    model.save_pretrained(path)
    model.generation_config.eos_token_id = None  # lengths are forced
    return model


def time_generate(model: Any, work: Work) -> float:
    """Seconds for all rows in one batch, run to the longest."""
    ids = torch.tensor(work.prompts)
    began = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        num_return_sequences=SAMPLES,
        max_new_tokens=work.longest,
    )
    assert out.shape == (len(work.prompts) * SAMPLES, ids.shape[1] + work.longest)
    return time.perf_counter() - began


def time_engine(service: Service, work: Work) -> float:
    done: list[Completed] = []
    began = time.perf_counter()
    for spec in work.specs():
        service.engine.submit(spec, done.extend)
    while service.engine.step():
        pass
    seconds = time.perf_counter() - began
    assert sum(len(c.reply.output_ids) for c in done) == work.tokens
    return seconds


def time_http(url: str, work: Work) -> float:
    """Until every reply is parsed."""
    specs = work.specs()
    step = PROMPTS_PER_REQUEST * (SAMPLES // specs[0].n)

    def body(part: Sequence[PromptSpec]) -> bytes:
        request = GenerateRequest(
            input_ids=tuple(s.token_ids for s in part),
            sampling=tuple(s.sampling for s in part),
            n=part[0].n,
            ignore_eos=True,
            return_logprob=True,
            return_routed_experts=True,
        )
        return json.dumps(request.to_json()).encode()

    async def send() -> tuple[float, int]:
        async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
            await http.get("/health")  # a client lives as long as its run: connecting is no part of a request
            began = time.perf_counter()
            parts = [body(specs[i : i + step]) for i in range(0, len(specs), step)]
            replies = await asyncio.gather(*(http.post("/generate", content=p) for p in parts))
            tokens = sum(len(one["output_ids"]) for r in replies for one in r.raise_for_status().json())
            return time.perf_counter() - began, tokens

    seconds, tokens = asyncio.run(send())
    assert tokens == work.tokens, f"{tokens} tokens came back, {work.tokens} were asked for"
    return seconds


class Server:
    """The engine's server process, while the benchmark lasts."""

    def __init__(self, path: Path, threads: int, *more: str) -> None:
        """more: flags of the server."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = ["-m", "rollout.embedded.server", "--model-path", str(path), "--port", str(port)]
        command += ["--enable-return-routed-experts", "--threads", str(threads), *more]
        self.process = subprocess.Popen([sys.executable, *command], cwd=ROOT)

    def __enter__(self) -> Server:
        until = time.monotonic() + 120
        while time.monotonic() < until and self.process.poll() is None:
            try:
                if httpx.get(self.url + "/health", trust_env=False).status_code == 200:
                    return self
            except httpx.TransportError:
                time.sleep(0.1)
        self.__exit__()
        raise RuntimeError("the server did not come up within 120 s")

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(20)


def measure(works: dict[str, Work], rounds: int, threads: int, path: Path) -> dict[str, dict[str, list[float]]]:
    """work -> way -> seconds of each turn; `generate` has a third of the turns, each listed three times."""
    model = make_model(path)
    service = Service(path, EngineLimits())
    out: dict[str, dict[str, list[float]]] = {}
    with torch.inference_mode(), Server(path, threads) as server:
        warm = equal_work(8, 4)
        for work in (warm, *works.values()):
            time_engine(service, work)
            time_http(server.url, work)
        time_generate(model, warm)
        for name, work in works.items():
            out[name] = {"generate": [], "engine": [], "http": []}
            for _ in range(rounds):
                out[name]["generate"] += [time_generate(model, work)] * TURNS
                for _ in range(TURNS):
                    out[name]["engine"].append(time_engine(service, work))
                    out[name]["http"].append(time_http(server.url, work))
    return out


def report(works: dict[str, Work], seconds: dict[str, dict[str, list[float]]], threads: int) -> bool:
    """The table, then the line of JSON."""
    figures: dict[str, float] = {"threads": threads}
    print(f"{'':12}{'samples':>9}{'tokens':>9}{'generate':>11}{'engine':>11}{'http':>11}   tokens/s, median")
    for name, ways in seconds.items():
        work = works[name]
        rate = {way: work.tokens / statistics.median(s) for way, s in ways.items()}
        figures |= {f"{way}_tokens_per_s_{name}": round(r, 1) for way, r in rate.items()}
        ratio = statistics.median(g / e for g, e in zip(ways["generate"], ways["engine"], strict=True))
        through = statistics.median(g / h for g, h in zip(ways["generate"], ways["http"], strict=True))
        cost = statistics.median(1 - e / h for e, h in zip(ways["engine"], ways["http"], strict=True))
        figures[f"engine_over_generate_{name}"] = round(ratio, 3)
        figures[f"http_over_generate_{name}"] = round(through, 3)
        figures[f"http_cost_{name}"] = round(cost, 3)
        columns = "".join(f"{r:11.0f}" for r in rate.values())
        print(f"{name:12}{len(work.prompts) * SAMPLES:9}{work.tokens:9}{columns}")
        print(f"{'':12}engine / generate {ratio:.2f}, http / generate {through:.2f}, http costs {cost:.1%}")
    figures["http_cost"] = max(v for k, v in figures.items() if k.startswith("http_cost_"))
    holds = figures["http_cost"] <= GOALS["http_cost"] and all(
        figures[k] >= v for k, v in GOALS.items() if k != "http_cost"
    )
    finish("rollout_throughput", figures, GOALS, holds)
    return holds


def main() -> int:
    """0 when the goals hold."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(p)
    p.add_argument("--quick", action="store_true", help="within a minute")
    p.add_argument("--threads", type=int, default=1, help="of each way")
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    works = {
        "equal": equal_work(64, 16 if args.quick else 32),
        "long_tail": long_tailed_work(32, 12, 64) if args.quick else long_tailed_work(64, 16, 128),
    }
    with tempfile.TemporaryDirectory() as path:
        seconds = measure(works, 3, args.threads, Path(path))
    return 0 if report(works, seconds, args.threads) else 1


if __name__ == "__main__":
    sys.exit(main())
