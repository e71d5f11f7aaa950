"""The command line of a run that takes turns, whose driver lists its calls to trainer ranks and servers in their order:

    python tests/sglang_cpu/programs/recorded_turns.py CALLS train CONFIG ...

Each call is two lines of the file CALLS, "> CALL" and "< CALL". Between them, where the call leaves memory released or
requests in flight, every order that would end a stock server is tried with the same client: "refused SENTENCE", or
"accepted ORDER".
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch

from miles_like.cluster.trainer_ranks import RayTrainer
from rollout.sglang.client import SGLangClient
from rollout.wire import endpoints
from rollout.wire.bodies import MemoryTag

NAMES = {endpoints.RELEASE_MEMORY: "release", endpoints.RESUME_MEMORY: "resume", endpoints.GENERATE: "generate"}
ALL = tuple(MemoryTag)
Order = Callable[[SGLangClient], Awaitable[Any]]


async def _generate(client: SGLangClient) -> None:
    await SGLangClient.score(client, [torch.tensor([5, 6, 7])])


async def _release(client: SGLangClient) -> None:
    await client.release_memory(ALL)


async def _resume(client: SGLangClient) -> None:
    await client.resume_memory([MemoryTag.WEIGHTS])


AFTER: dict[str, tuple[Order, ...]] = {  # after a call of this name
    "release kv_cache+weights+cuda_graph": (_generate, _release),
    "resume weights": (_generate, _resume),
    "resume kv_cache+cuda_graph": (_resume,),
}


def record(calls: Path) -> None:
    def write(line: str) -> None:
        with calls.open("a") as out:
            print(line, file=out)

    async def try_order(order: Order, client: SGLangClient) -> None:
        try:
            await order(client)
        except RuntimeError as e:
            write(f"refused {e}")
        else:
            write(f"accepted {order.__name__}")

    call_ranks, send = RayTrainer._all, SGLangClient._send

    async def called(self: Any, method: str, arguments: Any) -> Any:
        name = " ".join([method, *map(str, arguments[0] if method == "publish" else ())])
        write(f"> {name}")
        out = await call_ranks(self, method, arguments)
        write(f"< {name}")
        return out

    async def sent(self: Any, method: str, endpoint: str, body: Any = None, *limit: Any) -> Any:
        if endpoint not in NAMES:
            return await send(self, method, endpoint, body, *limit)
        name = " ".join([NAMES[endpoint], *(["+".join(body["tags"])] if "tags" in body else [])])
        write(f"> {name}")
        if name == "generate":
            await try_order(_release, self)
        out = await send(self, method, endpoint, body, *limit)
        for order in AFTER.get(name, ()):
            await try_order(order, self)
        write(f"< {name}")
        return out

    RayTrainer._all = called  # type: ignore[method-assign]
    SGLangClient._send = sent  # type: ignore[method-assign]


if __name__ == "__main__":
    from miles_like.cli import app

    record(Path(sys.argv[1]))
    app(sys.argv[2:])
