"""A sample does not depend on other requests being served, how its prompt was prefilled, or whether it was interrupted.

Why it must hold: samples are compared within a group and reproduced by seed after a crash; a token that depends on the
batch makes both meaningless. The oracle of tokens and expert ids is transformers; of batching, the engine alone with
one request. Not covered: bit equality of log-probs over batches (1e-5 here), bfloat16.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles_like.types import Finish
from rollout.embedded.engine.engine import Engine
from rollout.embedded.engine.requests import Completed
from rollout.wire.control import PauseMode
from tests.support.embedded_fixtures import oracle, run, save, service, spec, submit
from tests.support.refusals import Facts, refuses

A, B, C = [5, 9, 33, 2, 71], list(range(10, 47)), [8] * 16


@pytest.fixture(scope="module")
def reference() -> Any:
    return oracle()


@pytest.fixture(scope="module")
def path(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference, tmp_path_factory.mktemp("hf"))


@pytest.fixture
def engine(path: Path) -> Engine:
    return service(path).engine


def same(a: Completed, b: Completed) -> None:
    assert a.reply.output_ids.tolist() == b.reply.output_ids.tolist()
    assert a.reply.logprobs is not None and b.reply.logprobs is not None
    np.testing.assert_allclose(a.reply.logprobs, b.reply.logprobs, atol=1e-5)
    assert a.reply.routed_experts == b.reply.routed_experts


def test_alone_in_a_batch_and_in_a_small_engine_are_the_same(engine: Engine, path: Path) -> None:
    """Other prompts, other lengths and settings beside it; then rows for 3 and pages for few samples."""
    specs = [
        spec(A, n=3, sampling_seed=1),
        spec(B, n=2, sampling_seed=2, temperature=0.7, top_k=5, max_new_tokens=30),
        spec(C, n=4, sampling_seed=3, top_p=0.6, max_new_tokens=5),
        spec(A, n=1, temperature=0.0),
    ]
    alone = [run(engine, s)[0] for s in specs]
    together = run(engine, *specs)
    crowded = run(service(path, max_running=3, max_total_tokens=144).engine, *specs)
    for got in (together, crowded):
        for group, want in zip(got, alone, strict=True):
            for a, b in zip(group, want, strict=True):
                same(a, b)
    assert len({tuple(c.reply.output_ids) for c in alone[0]}) == 3, "samples of one seed must differ by index"


def test_requests_join_while_others_decode(engine: Engine) -> None:
    alone = [run(engine, s)[0][0] for s in (spec(A, max_new_tokens=20), spec(B, sampling_seed=5))]
    first = submit(engine, spec(A, max_new_tokens=20))
    for _ in range(6):
        engine.step()
    second = run(engine, spec(B, sampling_seed=5))
    same(first[0][0], alone[0])
    same(second[0][0], alone[1])


def test_shared_prefill_is_separate_prefills(engine: Engine) -> None:
    """Sample i of n draws from (seed, i): the n samples equal n engines' i-th, and only one prompt was fed."""
    fed = feeds(engine)
    shared = run(engine, spec(B, n=4))[0]
    assert fed[0] == len(B)
    assert [c.reply.cached_tokens for c in shared] == [0, len(B), len(B), len(B)]
    for n in (1, 2, 3):
        same(run(engine, spec(B, n=n))[0][n - 1], shared[n - 1])


def feeds(engine: Engine) -> list[int]:
    """Fills with the number of tokens of each forward pass."""
    fed: list[int] = []
    forward = engine.model.forward
    engine.model.forward = lambda b, cache, states: (fed.append(len(b.tokens)), forward(b, cache))[1]  # type: ignore
    return fed


def test_a_beginning_that_was_fed_is_not_fed_again(engine: Engine) -> None:
    """Whole pages of 16, never the last token: a repeated prompt, what was answered, a prompt that is scored."""
    fed = feeds(engine)
    first = run(engine, spec(B, max_new_tokens=12))[0][0]
    whole = [*B, *first.reply.output_ids.tolist()]  # 49 tokens, of which 48 were fed: 3 pages
    for ids, want in ((B, 32), (whole, 48), (whole[:48], 32), (whole[:33], 32), (whole[:32], 16), (B[1:], 0), (A, 0)):
        fed.clear()
        (got,) = run(engine, spec(ids, max_new_tokens=1))[0]
        assert (got.reply.cached_tokens, fed[0]) == (want, len(ids) - want)
    fed.clear()
    (scored,) = run(engine, spec(whole, max_new_tokens=0, routing_start=20))[0]
    assert fed == [1]
    routes, rows = (base64.b64decode(c.reply.routed_experts or "") for c in (first, scored))
    assert rows == routes[20 * 3 * 4 * 4 :], "those that were computed when its tokens were fed"
    shared = run(engine, spec(B, n=3))[0]
    assert [c.reply.cached_tokens for c in shared] == [32, 37, 37]
    same(shared[0], first)


def test_no_token_whose_log_prob_is_wanted_is_taken_from_the_cache(engine: Engine) -> None:
    """SGLang's rule for logprob_start_len."""
    want = run(engine, spec(B, max_new_tokens=0, logprob_start=0))[0][0].prompt_logprobs
    for start, cached in ((0, 0), (15, 0), (16, 16), (31, 16), (32, 32), (36, 32), (37, 32)):
        (got,) = run(engine, spec(B, max_new_tokens=2, logprob_start=start))[0]
        assert got.reply.cached_tokens == cached
        np.testing.assert_allclose(got.prompt_logprobs, want[start:], atol=1e-5)


def test_prefixes_are_forgotten_when_told_and_with_new_weights(engine: Engine, path: Path) -> None:
    def cached() -> int:
        return run(engine, spec(B))[0][0].reply.cached_tokens

    assert [cached(), cached()] == [0, 32]
    assert engine.flush() and [cached(), cached()] == [0, 32]
    engine.set_version("2")
    assert [cached(), cached()] == [0, 32]
    engine.weights_changed()
    assert [cached(), cached()] == [0, 32]
    out = submit(engine, spec(B, n=2))
    engine.step()
    engine.pause(PauseMode.IN_PLACE)
    assert not engine.flush()
    engine.weights_changed()
    engine.resume()
    while engine.step():
        pass
    assert len(out[0]) == 2 and [cached(), cached()] == [0, 32], "what ended since then is of older weights"
    without = service(path, prefixes=False).engine
    assert [run(without, spec(B))[0][0].reply.cached_tokens for _ in range(2)] == [0, 0]


def test_an_aborted_sample_that_goes_on_is_not_fed_again(engine: Engine) -> None:
    fed = feeds(engine)
    (want,) = run(engine, spec(B, max_new_tokens=20))[0]
    engine.flush()
    out = submit(engine, spec(B, max_new_tokens=20))
    for _ in range(13):
        engine.step()
    engine.pause(PauseMode.ABORT)
    engine.resume()
    begun = out[0][0].reply.output_ids.tolist()
    fed.clear()
    (rest,) = run(engine, spec([*B, *begun], max_new_tokens=20 - len(begun), routing_start=0))[0]
    assert (len(begun), rest.reply.cached_tokens, fed[0]) == (13, 48, 2)
    assert [*begun, *rest.reply.output_ids.tolist()] == want.reply.output_ids.tolist()
    assert rest.reply.routed_experts == want.reply.routed_experts


@torch.no_grad()
def test_greedy_log_probs_and_experts_are_transformers(engine: Engine, reference: Any) -> None:
    got = run(engine, spec(A, temperature=0.0, max_new_tokens=9, logprob_start=0))[0][0]
    ids = torch.tensor(A)
    for _ in range(9):
        ids = torch.cat([ids, reference(ids[None]).logits[0, -1].argmax()[None]])
    assert got.reply.output_ids.tolist() == ids[5:].tolist()
    chosen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _i, o: chosen.append(o[2]))
        for layer in reference.model.layers[1:]
    ]
    logprobs = reference(ids[None, :-1]).logits[0].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    for h in hooks:
        h.remove()
    np.testing.assert_allclose(got.prompt_logprobs, logprobs[:4], atol=1e-4)
    np.testing.assert_allclose(got.reply.logprobs, logprobs[4:], atol=1e-4)
    routed = np.frombuffer(base64.b64decode(got.reply.routed_experts or ""), "<i4").reshape(-1, 3, 4)
    assert len(routed) == len(ids) - 1
    assert not routed[:, 0].any()
    for layer in (1, 2):
        np.testing.assert_array_equal(np.sort(routed[:, layer]), np.sort(chosen[layer - 1].numpy()))


@torch.no_grad()
def test_candidates_of_a_scored_prompt_are_the_top_k_of_transformers(
    engine: Engine, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any start, whatever is cached, and fed in pieces; for every sample of a prompt the same."""
    values, ids = reference(torch.tensor(B)[None]).logits[0, :-1].log_softmax(-1).topk(5)
    for start, piece in ((0, 1024), (20, 1024), (0, 8), (36, 8)):
        monkeypatch.setattr("rollout.embedded.engine.engine._PIECE", piece)
        for got in run(engine, spec(B, max_new_tokens=0, logprob_start=start, top=5, n=2))[0]:
            assert got.prompt_top is not None and len(got.prompt_logprobs) == len(B) - 1 - start
            np.testing.assert_array_equal(got.prompt_top.ids, ids[start:])
            np.testing.assert_allclose(got.prompt_top.logprobs, values[start:], atol=1e-4)
    assert run(engine, spec(B, max_new_tokens=0, logprob_start=0))[0][0].prompt_top is None
    with refuses(ValueError, "top_logprobs_num", 97, 96):
        engine.check(spec(B, max_new_tokens=0, logprob_start=0, top=97))


def test_a_long_prompt_is_fed_in_pieces(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = spec(B, temperature=0.0, logprob_start=3)
    whole = run(engine, ask)[0][0]
    monkeypatch.setattr("rollout.embedded.engine.engine._PIECE", 8)
    pieces = run(engine, ask)[0][0]
    same(whole, pieces)
    np.testing.assert_allclose(whole.prompt_logprobs, pieces.prompt_logprobs, atol=1e-5)
    assert len(whole.prompt_logprobs) == len(B) - 4


def test_stop_tokens_end_a_sample_and_eos_can_be_ignored(engine: Engine) -> None:
    free = run(engine, spec(A, max_new_tokens=20))[0][0].reply
    third = int(free.output_ids[2])
    assert third not in free.output_ids[:2]
    stopped = run(engine, spec(A, max_new_tokens=20, stop_token_ids=(90, third), ignore_eos=False))[0][0].reply
    assert stopped.output_ids.tolist() == free.output_ids[:3].tolist()
    assert (stopped.finish, stopped.matched) == (Finish.STOP, third)
    assert (free.finish, free.matched) == (Finish.LENGTH, None)
    on = run(engine, spec(A, max_new_tokens=20, stop_token_ids=(90, third)))[0][
        0
    ].reply  # as SGLang: no stop token holds
    assert on.output_ids.tolist() == free.output_ids.tolist() and (on.finish, on.matched) == (Finish.LENGTH, None)
    many = [c.reply for c in run(engine, spec(A, n=64, max_new_tokens=60, ignore_eos=False))[0]]
    ended = [r for r in many if r.finish is Finish.STOP]
    assert ended and all(r.output_ids[-1] == 1 == r.matched and 1 not in r.output_ids[:-1] for r in ended)
    assert all(1 not in r.output_ids for r in many if r.finish is Finish.LENGTH)


def test_scoring_samples_nothing(engine: Engine) -> None:
    got = run(engine, spec(B, max_new_tokens=0, logprob_start=0, n=2))[0]
    assert [len(c.reply.output_ids) for c in got] == [0, 0]
    assert len(got[0].prompt_logprobs) == len(B) - 1
    assert len(base64.b64decode(got[1].reply.routed_experts or "")) == (len(B) - 1) * 3 * 4 * 4


def test_retracted_requests_go_on_with_the_same_tokens(engine: Engine) -> None:
    specs = [spec(A, n=3, max_new_tokens=20), spec(B, sampling_seed=4, max_new_tokens=9, logprob_start=0)]
    want = run(engine, *specs)
    out = submit(engine, *specs)
    for _ in range(7):
        engine.step()
    engine.pause(PauseMode.RETRACT)
    assert not engine.step() and engine.flush() and engine.cache.free_pages == engine.cache.pages
    late = submit(engine, spec(C))
    engine.resume()
    while engine.step():
        pass
    for got, expected in zip(out, want, strict=True):
        for a, b in zip(got, expected, strict=True):
            same(a, b)
            assert a.reply.num_retractions == 1
    assert out[1][0].prompt_logprobs == pytest.approx(want[1][0].prompt_logprobs, abs=1e-5)
    assert late[0][0].reply.num_retractions == 0
    assert engine.cache.free_pages == engine.cache.pages


def test_retracting_half_started_groups_leaks_nothing(path: Path) -> None:
    engine = service(path, max_running=3).engine
    want = run(engine, spec(B, n=8))[0]
    out = submit(engine, spec(B, n=8))
    engine.step()
    assert (engine.running, engine.waiting) == (3, 5)
    engine.pause(PauseMode.RETRACT)
    assert engine.cache.free_pages == engine.cache.pages
    engine.resume()
    while engine.step():
        pass
    for a, b in zip(out[0], want, strict=True):
        same(a, b)


def test_in_place_keeps_the_cache_and_versions_are_spans(engine: Engine) -> None:
    out = submit(engine, spec(A, max_new_tokens=10))
    for _ in range(5):
        engine.step()
    engine.pause(PauseMode.IN_PLACE)
    assert not engine.step() and not engine.flush() and engine.running == 1
    done = out[0]
    engine.set_version("7")
    engine.set_version("8")
    engine.resume()
    late = run(engine, spec(B))
    reply = done[0].reply
    assert reply.weight_version == "8"
    assert [tuple(s) for s in reply.weight_versions] == [("default", 0, 5), ("8", 5, 10)]
    assert [tuple(s) for s in late[0][0].reply.weight_versions] == [("8", 0, 12)]
    engine.set_version("default")
    same(done[0], run(engine, spec(A, max_new_tokens=10))[0][0])


def test_abort_gives_what_there_is(path: Path) -> None:
    engine = service(path, max_running=4).engine
    out = submit(engine, spec(A, rid="a1", n=3), spec(B, rid="a2", n=2), spec(C, rid="b"))
    for _ in range(4):
        engine.step()
    engine.abort("unknown")
    engine.abort("")
    engine.abort("a")
    assert [len(c.reply.output_ids) for c in out[0]] == [4, 4, 4]
    assert {c.reply.finish for group in out[:2] for c in group} == {Finish.ABORT}
    assert len(base64.b64decode(out[0][0].reply.routed_experts or "")) == (len(A) + 3) * 3 * 4 * 4
    assert not out[2]
    while engine.step():
        pass
    assert out[2][0].reply.finish is Finish.LENGTH
    late = submit(engine, spec(A), spec(B, n=9))
    engine.step()
    engine.pause(PauseMode.ABORT)
    assert all(c.reply.finish is Finish.ABORT for g in late for c in g) and [len(g) for g in late] == [1, 9]
    assert engine.idle and not engine.waiting and engine.cache.free_pages == engine.cache.pages


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"max_new_tokens": 300}, (305, 256)),
        ({"max_new_tokens": 200}, (208, 128)),
        ({"token_ids": (5, 96)}, (96, 96)),
        ({"logprob_start": 6}, ("logprob_start_len", 6, 5)),
        ({"routing_start": 6}, ("routed_experts_start_len", 6, 5)),
        ({"routing_start": -1}, ("routed_experts_start_len", -1, 5)),
    ],
)
def test_what_can_never_run_is_refused_with_both_numbers(path: Path, change: dict[str, Any], facts: Facts) -> None:
    engine = service(path, max_total_tokens=128).engine
    ids = list(change.pop("token_ids", A))
    with refuses(ValueError, *facts):
        engine.submit(spec(ids, **change), lambda _: None)
    assert not engine.waiting
