"""Processor time of a client for a sample, from the server's bytes to the sample that is trained on.

A process replays replies of stock SGLang 0.5.23 in the shape of DeepSeek-V3 (61 layers, 58 of them with experts, top 8
of 256): tokens, log-probs, and the routes of all rows as base64 of int32. A client (rollout/sglang/client.py) asks for
samples of 1k, 8k and 32k tokens, one after the other. Its processor time is measured beside that of plain parts in the
same round: httpx's own transport, orjson, the standard library's base64 and a narrowing copy, without a single check.
Each figure is the median over the rounds; the first round does not count.

With rollout workers (data_plane_workers.py): the processor time of the driver's thread for a sample, which must not
grow with its length where as many samples come in a second (a thread that was woken after a longer wait has colder
caches), that of Ray's threads beside it, that of a worker with its store, and memory. Samples of one and of two workers
in the same time: on two cores the servers work beside two workers, not beside one, and send what these read. So a
further figure is the processor time of a sample in each of two workers over that in one alone, which shows what they
share: 1.11 is 1.8 times the samples where each has a separate core.
Extrapolated, not measured: what a step of 16,384 samples of 32k tokens asks of workers and driver beside the 134 s that
DeepSeek-V3 takes to train it. scaling.py has rounds of up to 2,048 groups.

    python benchmarks/data_plane.py [--quick] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import math
import multiprocessing
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import orjson
import torch
from data_plane_workers import Measured, Replayed, with_workers
from figures import add_write, finish

from miles_like.nodes.session import start_ray, stop_ray
from miles_like.types import Prompt, SamplingParams
from rollout.sglang.client import SGLangClient
from rollout.sglang.samples import RoutingShape
from rollout.wire import endpoints

SHAPE = RoutingShape(num_layers=61, moe_layers=tuple(range(3, 61)), top_k=8, num_experts=256)
VOCABULARY, PROMPT = 129_280, 512
SIZES = {"1k": 1 << 10, "8k": 8 << 10, "32k": 32 << 10}
GOALS = {
    "client_32k_ms_max": 120.0,
    "worker_32k_ms_max": 120.0,
    "written_of_received_max": 2.0,
    "driver_32k_ms_max": 1.0,
    "driver_32k_of_1k_max": 1.2,
    "two_workers_of_one_min": 1.8,
    "worker_of_two_8k_of_one_max": 1.11,
}
GROUPS = 16  # of a round, for each worker
STEP_SAMPLES, STEP_S, SHARE = 16_384, 134.0, 0.05  # of the extrapolation; the share of a step that workers may take
RID = b"0" * 32


class Recorded(NamedTuple):
    """A reply around its id."""

    before: bytes
    after: bytes

    @property
    def nbytes(self) -> int:
        return len(self.before) + len(RID) + len(self.after)


def recorded(tokens: int, shape: RoutingShape = SHAPE, prompt: int = PROMPT) -> Recorded:
    """A reply of `tokens` tokens, those of the prompt included."""
    rng, r = np.random.default_rng(tokens), tokens - prompt
    routes = np.zeros((tokens - 1, shape.num_layers, shape.top_k), "<i4")
    first = rng.integers(0, shape.num_experts, (tokens - 1, len(shape.moe_layers)))
    for k in range(shape.top_k):  # eight different ones
        routes[:, list(shape.moe_layers), k] = (first + 31 * k) % shape.num_experts
    ids, logprobs = rng.integers(0, VOCABULARY, r).tolist(), (-rng.random(r)).astype(np.float32).tolist()
    meta = {
        "id": RID.decode(),
        "finish_reason": {"type": "length", "length": r},
        "prompt_tokens": prompt,
        "completion_tokens": r,
        "cached_tokens": 0,
        "num_retractions": 0,
        "weight_version": "3",
        "weight_versions": [{"version": "3", "start": 0, "end": r}],
        "input_token_logprobs": [],
        "output_token_logprobs": [[p, t, None] for p, t in zip(logprobs, ids, strict=True)],
        "output_token_logprobs_length": r,
        "routed_experts": base64.b64encode(routes.tobytes()).decode(),
    }
    before, after = orjson.dumps({"text": "text" * r, "output_ids": ids, "meta_info": meta}).split(RID)
    return Recorded(before, after)


def _answers(connection: socket.socket, reply: Recorded) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or each reply of several parts waits 40 ms
    with connection, connection.makefile("rb") as lines:
        while lines.readline():
            length = 0
            while (line := lines.readline().lower().strip()) != b"":
                if line.startswith(b"content-length"):
                    length = int(line.split(b":")[1])
            rid = orjson.loads(lines.read(length))["rid"][0].encode()
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % reply.nbytes)
            for part in (reply.before, rid, reply.after):
                connection.sendall(part)


def _serve(listening: socket.socket, reply: Recorded) -> None:
    while True:
        connection, _ = listening.accept()
        threading.Thread(target=_answers, args=(connection, reply), daemon=True).start()


@contextlib.contextmanager
def replayed(reply: Recorded) -> Iterator[str]:
    """The URL of a process that answers every request with `reply` under the request's id."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        process = multiprocessing.get_context("fork").Process(target=_serve, args=(listening, reply), daemon=True)
        process.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            process.kill()
            process.join()


async def by_client(url: str, tokens: int, count: int) -> float:
    """Seconds of this process for a sample."""
    client = SGLangClient(url, routing=SHAPE, vocabulary=VOCABULARY, request_timeout_s=600.0, samples_from="client")
    prompt, params = Prompt(id="p", token_ids=tuple(range(PROMPT)), answer=""), SamplingParams(max_new_tokens=tokens)
    try:
        await client.generate([prompt], n=1, params=params)  # connects
        began = time.process_time()
        for _ in range(count):
            (group,) = await client.generate([prompt], n=1, params=params)
            assert len(group.samples[0].token_ids) == tokens
        return (time.process_time() - began) / count
    finally:
        await client.close()


async def by_plain_parts(url: str, tokens: int, count: int) -> float:
    """Seconds of this process for a sample that is not checked."""
    async with httpx.AsyncClient(timeout=600.0, trust_env=False) as client:
        began = time.process_time()
        for _ in range(count):
            reply: Any = (await client.post(url + endpoints.GENERATE, json={"rid": [RID.decode()]})).content
            meta = orjson.loads(reply)["meta_info"]
            raw = base64.b64decode(meta["routed_experts"], validate=True)
            wire = np.frombuffer(raw, "<i4").reshape(-1, SHAPE.num_layers, SHAPE.top_k)
            routes = wire[:, list(SHAPE.moe_layers)].astype(np.uint8)
            logprobs = np.asarray([row[0] for row in meta["output_token_logprobs"]], np.float32)
            assert len(routes) == tokens - 1 and len(logprobs) == tokens - PROMPT
        return (time.process_time() - began) / count


def written(reply: Recorded, tokens: int) -> float:
    """Bytes that reading a reply writes, for each byte received: the body, what the JSON parser gets of it, decoded
    routes and narrow ones."""
    values = (tokens - 1) * SHAPE.top_k
    routes = values * SHAPE.num_layers * 4
    rest = reply.nbytes - routes // 3 * 4
    return (reply.nbytes + 2 * rest + routes + values * len(SHAPE.moe_layers)) / reply.nbytes


def rounds_of(tokens: int, workers: int, rounds: int, every_s: float = 0.0) -> list[Measured]:
    """Without the first round."""
    with contextlib.ExitStack() as servers, tempfile.TemporaryDirectory() as logs:
        urls = [servers.enter_context(replayed(recorded(tokens))) for _ in range(workers)]
        recipe = Replayed(SHAPE, VOCABULARY, tokens, every_s)
        groups = [GROUPS * workers] * rounds
        return with_workers(urls, recipe, range(PROMPT), groups=groups, logs=Path(logs))[1:]


def median_of(found: Sequence[Measured], figure: Callable[[Measured], float]) -> float:
    return statistics.median(map(figure, found))


def of_workers(*, quick: bool) -> dict[str, float]:
    """Medians over the rounds."""
    out, rounds, wall = dict[str, float](), 2 if quick else 9, dict[str, float]()
    start_ray(None)
    try:
        for name, tokens in SIZES.items():
            found = rounds_of(tokens, 1, rounds)
            wall[name] = median_of(found, lambda one: one.wall_s)
            out[f"worker_{name}_ms"] = median_of(found, lambda one: one.worker_s) * 1e3
            out[f"driver_{name}_ms"] = median_of(found, lambda one: one.driver_s) * 1e3
            out[f"worker_{name}_tokens_s"] = tokens / wall[name]
            out[f"memory_{name}_mib"] = median_of(found, lambda one: one.memory) / (1 << 20)
            out["ray_threads_of_core"] = median_of(found, lambda one: one.ray_s / one.wall_s)
        found = rounds_of(SIZES["8k"], 2, rounds)
        out["two_workers_of_one"] = wall["8k"] / median_of(found, lambda one: one.wall_s)
        out["worker_of_two_8k_of_one"] = median_of(found, lambda one: one.worker_s) * 1e3 / out["worker_8k_ms"]
        found = rounds_of(SIZES["1k"], 1, rounds, every_s=wall["32k"])
        out["driver_1k_at_rate_ms"] = median_of(found, lambda one: one.driver_s) * 1e3
    finally:
        stop_ray()
    out["driver_32k_of_1k"] = out["driver_32k_ms"] / out["driver_1k_at_rate_ms"]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    add_write(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rounds, figures = 2 if given.quick else 14, dict[str, float]()
    for name, tokens in SIZES.items():
        reply, count = recorded(tokens), max(2, (64 << 10) // tokens)
        with replayed(reply) as url:
            pairs = [
                (asyncio.run(by_client(url, tokens, count)), asyncio.run(by_plain_parts(url, tokens, count)))
                for _ in range(rounds)
            ][1:]
        own = statistics.median(a for a, _ in pairs)
        figures |= {
            f"client_{name}_ms": own * 1e3,
            f"plain_parts_{name}_of_client": statistics.median(b / a for a, b in pairs),
            f"client_{name}_mb_s": reply.nbytes / own / 1e6,
            f"client_{name}_tokens_s": tokens / own,
        }
    figures["written_of_received"] = written(reply, tokens)
    figures |= of_workers(quick=given.quick)
    work = STEP_SAMPLES * SIZES["32k"] / figures["worker_32k_tokens_s"]
    figures["extrapolated_workers"] = math.ceil(work / (SHARE * STEP_S))
    figures["extrapolated_driver_of_step"] = STEP_SAMPLES * figures["driver_32k_ms"] / 1e3 / STEP_S
    holds = all(
        figures[key[:-4]] <= goal if key.endswith("_max") else figures[key[:-4]] >= goal for key, goal in GOALS.items()
    )
    finish("data_plane", figures, GOALS, holds)


if __name__ == "__main__":
    main()
