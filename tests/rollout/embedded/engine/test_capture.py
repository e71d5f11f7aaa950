"""What replies tell of routes is what the cache's slots hold, with the weights that computed each row.

Letters: K experts a token.
"""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest

from rollout.embedded.cache.kv_cache import KVCache
from rollout.embedded.engine.capture import RouteCapture
from rollout.embedded.engine.requests import Completed
from rollout.wire.control import PauseMode
from rollout.wire.generate import WireSpan
from tests.support.embedded_fixtures import oracle, run, save, service, spec, submit
from tests.support.refusals import refuses

A = [5, 9, 33, 2, 71]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(oracle(), tmp_path_factory.mktemp("hf"))


def sent(payload: str | None) -> np.ndarray:
    return np.frombuffer(base64.b64decode(payload or ""), "<i4").reshape(-1, 3, 4)


def test_rows_are_those_of_the_slots_whatever_their_order(path: Path) -> None:
    """Against numpy's own index, two samples at once; the second's rows are of two versions, the first's of one, which
    a batch of several does not hide."""
    engine = service(path).engine
    cache = KVCache(engine.model.arch, slots=64)
    assert cache.routing is not None
    cache.routing.copy_(cache.routing.new_tensor(np.random.default_rng(0).integers(0, 16, cache.routing.shape)))
    slots = [np.array([7, 3, 9]), np.array([20, 3, 21, 22])]
    cache.epochs[[20, 21, 22]] = cache.epochs.new_tensor([0, 1, 1])
    capture = RouteCapture(cache, "a")
    capture.next_epoch("b")
    first, second = capture.read(slots)
    encoded = [capture.encode(first, 2, gates=False), capture.encode(second, 0, gates=False)]
    for one, at in zip(encoded, slots, strict=True):
        assert np.array_equal(sent(one.experts), cache.routing.numpy()[at]) and one.gates is None
    assert encoded[0].versions in ("a", (WireSpan("a", 2, 5),))
    assert encoded[1].versions == (WireSpan("a", 0, 2), WireSpan("b", 2, 4))
    assert capture.encode(capture.read(slots[:1])[0], 2, gates=False).versions == "a"
    both = first.append(capture.read([slots[1][2:]])[0])  # a retraction lies between them
    assert capture.encode(both, 0, gates=False).versions == (WireSpan("a", 0, 3), WireSpan("b", 3, 5))


@pytest.mark.parametrize("start", [0, 3, 5])
def test_kept_rows_begin_where_they_were_asked_for(path: Path, start: int) -> None:
    """A retracted request, its routes wanted from `start` on: the rows are those of one that was left alone."""
    alone = run(service(path).engine, spec(A, routing_start=start))[0][0].reply
    engine = service(path).engine
    out: list[list[Completed]] = submit(engine, spec(A, routing_start=start), spec(A[::-1], routing_start=None))
    for _ in range(5):
        engine.step()
    engine.pause(PauseMode.RETRACT)
    engine.resume()
    while engine.step():
        pass
    reply = out[0][0].reply
    assert reply.num_retractions == 1 and reply.output_ids.tolist() == alone.output_ids.tolist()
    assert len(sent(reply.routed_experts)) == 5 + 12 - 1 - start
    assert np.array_equal(np.sort(sent(reply.routed_experts)), np.sort(sent(alone.routed_experts)))
    assert out[1][0].reply.routed_experts is None


def test_a_server_that_keeps_no_ids_refuses_to_return_them(path: Path) -> None:
    """And draws the same tokens: keeping is not computing."""
    keeps, keeps_not = service(path).engine, service(path, routes=False).engine
    with refuses(ValueError, "--enable-return-routed-experts"):
        keeps_not.submit(spec(A), lambda _: None)
    for n in (1, 3):
        asked = spec(A, n=n, routing_start=None)
        both = [run(engine, asked)[0] for engine in (keeps, keeps_not)]
        for got, want in zip(*both, strict=True):
            assert got.reply.output_ids.tolist() == want.reply.output_ids.tolist()
            assert got.reply.routed_experts is want.reply.routed_experts is None
    with refuses(ValueError, "--enable-return-routed-experts"):
        service(path, routes=False, gates=True)
