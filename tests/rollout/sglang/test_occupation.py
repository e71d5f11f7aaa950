"""Law: none of the requests of which a stock server dies leaves this process, after any sequence of requests.

Why it must hold: a dead server ends the run. Every sequence of five steps over two tags and weights is tried against a
model of the server that raises where stock SGLang 0.5.23 does (srt/managers/scheduler_components/weight_updater.py).
Not covered: requests of other processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest

from rollout.sglang.occupation import Occupation
from rollout.wire.bodies import MemoryTag
from tests.support.refusals import refuses

KV, WEIGHTS, GRAPH = MemoryTag
URL = "http://127.0.0.1:30000"


class Dead(AssertionError):
    """What ends a stock server, or computes over freed or undefined memory."""


class StockServer:
    """The rules of the stock server's scheduler."""

    def __init__(self) -> None:
        self.offloaded: set[MemoryTag] = set()
        self.running, self.undefined = 0, False

    def generate(self) -> None:
        if self.offloaded or self.undefined:
            raise Dead
        self.running += 1

    def release(self, tags: tuple[MemoryTag, ...]) -> None:
        if self.running or self.offloaded & set(tags):  # torch_memory_saver pauses a region once
            raise Dead
        self.offloaded |= set(tags)
        self.undefined |= WEIGHTS in tags

    def resume(self, tags: tuple[MemoryTag, ...]) -> None:
        if set(tags) - self.offloaded:
            raise Dead
        self.offloaded -= set(tags)

    def publish(self) -> None:
        if WEIGHTS in self.offloaded:
            raise Dead
        self.undefined = False


STEPS = ("begin", "end", "publish", *itertools.product(("release", "resume"), [(KV,), (WEIGHTS,), (KV, WEIGHTS)]))


@pytest.mark.slow
def test_what_would_end_a_stock_server_is_refused_and_nothing_else_is() -> None:
    refused = allowed = 0
    for sequence in itertools.product(STEPS, repeat=5):
        own, server = Occupation(URL), StockServer()
        running = list[ExitStack]()
        for step in sequence:
            before = own.released, own.complete, own.in_flight
            if step == "end":
                if running:
                    running.pop().close()
                    server.running -= 1
                continue
            call, sent = _calls(step, own, server, running)
            try:
                call()
            except RuntimeError:
                assert _ends(sent), f"{step} of {sequence} is refused, and the server would serve on"
                assert before == (own.released, own.complete, own.in_flight)
                refused += 1
            else:
                sent()
                allowed += 1
            assert own.released == server.offloaded and own.complete is not server.undefined
    assert refused > 10_000 and allowed > 10_000


def _ends(sent: Callable[[], None]) -> bool:
    """Whether the request ends the server; `pytest.raises` would take as long as all the rest."""
    try:
        sent()
    except Dead:
        return True
    return False


def _calls(
    step: object, own: Occupation, server: StockServer, running: list[ExitStack]
) -> tuple[Callable[[], None], Callable[[], None]]:
    def begin() -> None:
        with ExitStack() as stack:
            stack.enter_context(own.generating())
            running.append(stack.pop_all())

    def release(tags: tuple[MemoryTag, ...]) -> None:
        with own.releasing(tags):
            pass

    match step:
        case "begin":
            return begin, server.generate
        case "publish":
            return own.published, server.publish
        case ("release", tags):
            return lambda: release(tags), lambda: server.release(tags)
        case ("resume", tags):
            return lambda: own.resume(tags), lambda: server.resume(tags)
    raise AssertionError(step)


def test_a_release_that_did_not_happen_is_taken_back() -> None:
    own = Occupation(URL)
    with suppress(KeyError), own.releasing([WEIGHTS]):
        with refuses(RuntimeError, "weights"), own.generating():
            pass
        raise KeyError
    assert not own.released and own.complete
    with own.generating():
        assert own.in_flight == 1
    assert own.in_flight == 0


def test_the_sentences() -> None:
    own = Occupation(URL)
    with own.generating(), refuses(RuntimeError, URL, 1, "kv_cache"), own.releasing([KV]):
        pass
    with refuses(RuntimeError, URL, "weights"):
        own.resume([WEIGHTS])
    with refuses(RuntimeError, URL, 0), own.releasing([]):
        pass
    with own.releasing([WEIGHTS, GRAPH]):
        pass
    with refuses(RuntimeError, URL, "weights, cuda_graph"), own.generating():
        pass
    with refuses(RuntimeError, URL, "weights"):
        own.publishing()
    with refuses(RuntimeError, URL, "weights"), own.releasing([WEIGHTS]):
        pass
    own.resume([WEIGHTS, GRAPH])
    with refuses(RuntimeError, URL), own.generating():
        pass
