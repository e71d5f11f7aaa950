"""What the tests share: the environment of stock vLLM, its servers, and how commands of this project are run."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import httpx
import pytest
from torch import Tensor

from rollout.sglang.startup import launch_server
from tests.support.command import Commands
from tests.support.own_ray import own_ray
from tests.vllm_cpu.served import PYTHON, Reference, checkpoint, launch

LIMIT_S = 1500.0

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@dataclass
class Served:
    """A running server, and two versions of its model's weights, of which it has begun with the first."""

    kind: str  # of SHAPES
    url: str
    home: Path
    log: Path
    first: dict[str, Tensor]
    second: dict[str, Tensor]

    async def sampled(self, tokens: int) -> None:
        """Return once the server has sampled so many tokens more, of whatever requests. Raises TimeoutError."""
        async with httpx.AsyncClient(base_url=self.url, trust_env=False) as http, asyncio.timeout(LIMIT_S):
            began = await _generated(http)
            while await _generated(http) < began + tokens:
                await asyncio.sleep(0.02)

    @cached_property
    def references(self) -> tuple[Reference, Reference]:
        return Reference(self.home / "first"), Reference(self.home / "second")


async def _generated(http: httpx.AsyncClient) -> float:
    """Tokens that the server has sampled since its start."""
    text = (await http.get("/metrics")).text
    return sum(float(n) for n in re.findall(r"^vllm:generation_tokens_total{.*} (\S+)$", text, re.MULTILINE))


@pytest.fixture(scope="session", autouse=True)
def installed() -> None:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is not there: make test-vllm")


def served(kind: str, home: Path) -> Iterator[Served]:
    first, second = (checkpoint(kind, home / name, seed) for seed, name in enumerate(("first", "second")))
    with launch_server(launch(home / "first", home / "logs")) as server:
        yield Served(kind, server.url, home, server.log, first, second)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from served("moe", tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from served("dense", tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="session")
def miles_like(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """`miles-like` with the arguments that are given."""
    with own_ray() as ray, Commands(tmp_path_factory.mktemp("commands")) as commands:

        def run(*arguments: object) -> subprocess.CompletedProcess[str]:
            variables = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200", **ray}
            return commands.run("", [str(word) for word in arguments], variables, LIMIT_S)

        yield run
