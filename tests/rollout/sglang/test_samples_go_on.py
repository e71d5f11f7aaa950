"""A sample that is made in pieces is the sample made in one go: tokens, log-probs, versions and routes.

Why it must hold: turns, partial rollouts and aborts cut a sample anywhere, and each cut asks only for the rows that are
new. A row asked twice, left out, or computed under other weights than the token after it was sampled under, trains
other experts than inference took. Not covered: a stock server's prefix cache (test_recorded_sglang.py reads
its answers), bit equality of log-probs (a prefill sums in another order than a decode: 1e-5 here).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file

from miles_like.types import Finish, NamedTensor, Prompt, Sample, SamplingParams, Span, VersionSpan
from rollout.embedded.engine.engine import Engine
from rollout.embedded.engine.requests import Completed
from rollout.embedded.server.service import Service
from rollout.sglang.client import SGLangClient
from rollout.sglang.http_replies import RolloutError
from rollout.sglang.samples import RoutingShape, SampleReader, empty_sample, row_versions
from rollout.wire.control import PauseMode
from rollout.wire.generate import GenerateReply, WireSpan
from tests.support.embedded_fixtures import oracle, save, served, service, spec, submit
from tests.support.fakes import FakeServer
from tests.support.made_samples import packed
from tests.support.refusals import refuses

T = TypeVar("T")
SHAPE = RoutingShape(num_layers=3, moe_layers=(1, 2), top_k=4, num_experts=16)
A = Prompt(id="a", token_ids=(5, 9, 33, 2, 71), answer="")
B = Prompt(id="b", token_ids=tuple(range(10, 47)), answer="")
ENVIRONMENT = (17, 18, 19)
SPANS = (Span(who="policy", start=5, end=11, reward=0.5),)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(oracle(), tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def url(path: Path) -> Iterator[str]:
    s = service(path)
    s.engine.set_version("0")
    with served(s) as address:
        yield address


def ask(url: str, call: Callable[[SGLangClient], Awaitable[T]], **options: Any) -> T:
    async def run() -> T:
        client = SGLangClient(url, **({"routing": SHAPE, "request_timeout_s": 30.0} | options))
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(run())


def params(new: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, sampling_seed=3, **more)


def same(got: Sample, want: Sample) -> None:
    assert got.token_ids.tolist() == want.token_ids.tolist()
    assert got.loss_mask.tolist() == want.loss_mask.tolist()
    torch.testing.assert_close(got.logprobs, want.logprobs, atol=1e-5, rtol=0)
    assert got.routing is not None and want.routing is not None
    assert torch.equal(got.routing.experts, want.routing.experts)
    assert got.routing.checksums is not None and want.routing.checksums is not None
    assert torch.equal(got.routing.checksums, want.routing.checksums)
    assert (got.versions, got.routing.versions) == (want.versions, want.routing.versions)
    got.routing.check_tokens(got.token_ids, sample="a/0")


@pytest.mark.parametrize("more", [{}, {"temperature": 0.0}])
@pytest.mark.parametrize("samples_from", ["server", "client"])
def test_two_and_three_pieces_are_one_go(url: str, more: dict[str, Any], samples_from: str) -> None:
    """All samples of a prompt, which share its prefill: each draws from its own stream again when it goes on."""

    async def run(c: SGLangClient) -> tuple[Sequence[Sample], list[list[Sample]]]:
        (whole,) = await c.generate([B], n=3, params=params(12, **more))
        out = []
        for cuts in ((5, 7), (1, 6, 5)):
            (group,) = await c.generate([B], n=3, params=params(cuts[0], **more))
            samples = list(group.samples)
            for new in cuts[1:]:
                samples = [
                    await c.continue_sample(s, params=params(new, **more)) if s.finish is Finish.LENGTH else s
                    for s in samples
                ]
            out.append(samples)
        return whole.samples, out

    whole, pieces = ask(url, run, samples_from=samples_from)
    assert more or len({tuple(s.token_ids.tolist()) for s in whole}) == 3
    for samples in pieces:
        for got, want in zip(samples, whole, strict=True):
            assert (got.index, got.finish) == (want.index, want.finish)
            same(got, want)
            assert got.routing is not None and got.routing.versions == (VersionSpan(0, 0, len(got.token_ids) - 1),)


def test_turns_with_an_environment_between(url: str) -> None:
    """The oracle: all routes of all its tokens, asked for at once."""

    async def run(c: SGLangClient) -> tuple[Sample, Sample]:
        (group,) = await c.generate([A], n=2, params=params(6))
        first = replace(group.samples[1], spans=SPANS)
        continued = await c.continue_sample(first, ENVIRONMENT, params=params(4))
        continued = await c.continue_sample(continued, ENVIRONMENT[:1], params=params(4))
        prompt = Prompt(id="a", token_ids=tuple(continued.token_ids.tolist()[:-4]), answer="")
        await c.flush_cache()
        return continued, await c.continue_sample(empty_sample(prompt, 1), params=params(4))

    continued, whole = ask(url, run, decode=lambda ids: " ".join(map(str, ids)))
    turns = [False] * 5 + [True] * 6 + [False] * 3 + [True] * 4 + [False] + [True] * 4
    assert continued.loss_mask.tolist() == turns and continued.spans == SPANS
    assert continued.token_ids[11:14].tolist() == list(ENVIRONMENT) and not continued.logprobs[11:14].any()
    assert continued.versions == (VersionSpan(0, 0, 6), VersionSpan(0, 9, 13), VersionSpan(0, 14, 18))
    assert continued.text.split() == [str(t) for t in continued.token_ids[5:].tolist()]
    assert bool((continued.logprobs[continued.loss_mask] < 0).all())
    assert continued.routing is not None and whole.routing is not None
    assert torch.equal(continued.routing.experts, whole.routing.experts)
    assert continued.token_ids.tolist() == whole.token_ids.tolist()
    torch.testing.assert_close(continued.logprobs[-4:], whole.logprobs[-4:], atol=1e-5, rtol=0)


def test_a_further_turn_is_fed_its_new_tokens_only(path: Path) -> None:
    """And those that do not fill a page of 16; all its rows of routes are there, as they are without a cache."""

    async def run(c: SGLangClient) -> list[Sample]:
        (group,) = await c.generate([B], n=2, params=params(14))
        first = [await c.continue_sample(s, ENVIRONMENT, params=params(10)) for s in group.samples]
        return [await c.continue_sample(s, ENVIRONMENT, params=params(3)) for s in first]

    def turns(**how: Any) -> tuple[list[Sample], list[int]]:
        s, fed = service(path, **how), []
        s.engine.set_version("0")
        forward = s.engine.model.forward
        s.engine.model.forward = lambda b, cache, states: (fed.append(len(b.tokens)), forward(b, cache))[1]  # type: ignore
        with served(s) as address:
            return ask(address, run), [n for n in fed if n > 2]  # the rest decodes

    (got, fed), (want, all_fed) = turns(), turns(prefixes=False)
    for a, b in zip(got, want, strict=True):
        same(a, b)
    # 37 tokens, then 51 and 3 more, of which 48 were fed, then 64 and 3 more, of which 48 were fed: the 64th was not
    assert (fed, all_fed) == ([37, 6, 6, 19, 19], [37, 54, 54, 67, 67])


def test_an_aborted_sample_goes_on(url: str) -> None:
    async def run(c: SGLangClient) -> tuple[Sample, Sample, Sample]:
        (whole,) = await c.generate([A], n=1, params=params(200))
        under_way = asyncio.create_task(c.generate([A], n=1, params=params(200)))
        for _ in range(1000):
            await asyncio.sleep(0.002)
            if (await c.server_info())["internal_states"][0]["running"]:
                break
        await c.abort_all()
        cut = (await under_way)[0].samples[0]
        left = 200 - cut.response_len
        return whole.samples[0], cut, await c.continue_sample(cut, params=params(left))

    whole, cut, resumed = ask(url, run)
    assert cut.finish is Finish.ABORT and 0 < cut.response_len < 200
    same(resumed, whole)


# ---- new weights in the middle: the engine stepped by hand, its replies through JSON


def changed(s: Service, path: Path, version: str, seed: int) -> None:
    torch.manual_seed(seed)
    tensors = load_file(path / "model.safetensors")
    s.begin_update()
    new = [NamedTensor(n, t + 0.1 * torch.randn_like(t)) for n, t in tensors.items()]
    s.update(new, flush_cache=False, version=version)
    s.end_update()


def read(prompt: Prompt, done: Completed, **edit: Any) -> Sample:
    reply = GenerateReply.from_json(json.loads(json.dumps(done.reply.to_json())), want_logprobs=True)
    (sample,) = SampleReader(routing=SHAPE).extend([empty_sample(prompt, 0)], [()], [replace(reply, **edit)])
    return sample


def finished(engine: Engine) -> None:
    while engine.step():
        pass


def paused(path: Path, mode: PauseMode, at: tuple[int, ...] = (8,), **changes: Any) -> list[Completed]:
    """Steps until each of `at`, which is a token each, pauses, changes the weights to version 1, 2, ..., goes on."""
    s = service(path)
    s.engine.set_version("0")
    out = submit(s.engine, spec(list(A.token_ids), max_new_tokens=20, **changes))
    before = 0
    for i, step in enumerate(at):
        for _ in range(step - before):
            s.engine.step()
        before = step
        s.engine.pause(mode)
        changed(s, path, str(i + 1), i)
        s.engine.resume()
    finished(s.engine)
    return out[0]


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
def test_rows_stay_those_that_gave_the_log_probs(path: Path, mode: PauseMode) -> None:
    """Tokens sampled before the weights changed keep the routes that gave their log-probs, also when the engine has to
    feed them again under the new ones, twice; each row has the version of its weights."""
    engine = service(path).engine
    engine.set_version("0")
    old = submit(engine, spec(list(A.token_ids), max_new_tokens=20))[0]
    finished(engine)
    untouched = read(A, old[0])
    (done,) = paused(path, mode, (8, 13))
    sample = read(A, done)
    assert done.reply.num_retractions == (2 if mode is PauseMode.RETRACT else 0)
    assert sample.versions == (VersionSpan(0, 0, 8), VersionSpan(1, 8, 13), VersionSpan(2, 13, 20))
    assert sample.routing is not None and untouched.routing is not None
    assert sample.routing.versions == (VersionSpan(0, 0, 12), VersionSpan(1, 12, 17), VersionSpan(2, 17, 24))
    assert torch.equal(sample.routing.experts[:12], untouched.routing.experts[:12])
    assert torch.equal(sample.logprobs[:13], untouched.logprobs[:13])


def test_recomputed_rows_would_be_others_and_are_refused(path: Path) -> None:
    """What the engine sent before it kept rows, and what a stock server sends: a retracted request's rows are all of
    the weights that went on. The law above is worth something only if those differ."""
    (kept,) = paused(path, PauseMode.RETRACT)
    tokens = [*A.token_ids, *kept.reply.output_ids.tolist()]
    s = service(path)
    changed(s, path, "1", 0)
    again = submit(s.engine, spec(tokens[:-1], max_new_tokens=1))[0]
    finished(s.engine)
    assert again[0].reply.routed_experts != kept.reply.routed_experts
    spans = (WireSpan("1", 0, len(tokens) - 1),)
    late = read(A, kept, routed_experts=again[0].reply.routed_experts, row_versions=spans)
    with refuses(ValueError, "a/0", 4, 1, 0):
        packed(late)
    with refuses(ValueError, "a/0", 4):
        packed(read(A, kept, row_versions=None))
    packed(late, replayed=False)  # what is only compared with ends no run
    packed(read(A, kept, row_versions=None, num_retractions=0))  # a stock server that was paused in place


def test_what_a_stock_reply_tells_of_its_rows(path: Path) -> None:
    reply = paused(path, PauseMode.IN_PLACE)[0].reply
    stock = replace(reply, row_versions=None, cached_tokens=3)
    assert row_versions(stock, 0, 24) == [VersionSpan(0, 3, 12), VersionSpan(1, 12, 24)]
    assert row_versions(replace(stock, num_retractions=1), 0, 24) == [VersionSpan(1, 12, 24)]
    assert row_versions(replace(stock, num_retractions=1, weight_version="2"), 0, 24) == []
    one = replace(stock, weight_versions=(WireSpan("1", 0, 20),), num_retractions=2)
    assert row_versions(one, 0, 24) == [VersionSpan(1, 4, 24)]


def test_samples_that_start_late_start_under_the_new_weights(path: Path) -> None:
    """With rows for three of eight samples, five wait with a prefill of the old weights when the weights change in
    place: neither its logits nor its routes are theirs."""
    s = service(path, max_running=3)
    s.engine.set_version("0")
    out = submit(s.engine, spec(list(A.token_ids), n=8, max_new_tokens=6))
    s.engine.step()
    s.engine.pause(PauseMode.IN_PLACE)
    changed(s, path, "1", 0)
    s.engine.resume()
    finished(s.engine)
    samples = [read(A, done) for done in out[0]]
    assert [len(sample.versions) for sample in samples] == [2] * 3 + [1] * 5
    new = service(path)
    changed(new, path, "1", 0)
    fresh = submit(new.engine, spec(list(A.token_ids), n=8, max_new_tokens=6))
    finished(new.engine)
    for got, want in zip(out[0][3:], fresh[0][3:], strict=True):
        assert got.reply.output_ids.tolist() == want.reply.output_ids.tolist()
        assert got.reply.routed_experts == want.reply.routed_experts


def test_aborted_while_it_waits_after_a_retraction(path: Path) -> None:
    """It keeps its sampled tokens, with the rows that belong to them."""
    engine = service(path).engine
    engine.set_version("0")
    out = submit(engine, spec(list(A.token_ids), max_new_tokens=20))
    for _ in range(5):
        engine.step()
    engine.pause(PauseMode.RETRACT)
    engine.abort(everything=True)
    sample = read(A, out[0][0])
    assert (sample.finish, sample.response_len) == (Finish.ABORT, 5)
    assert sample.routing is not None and len(sample.routing) == 9
    never = submit(engine, spec(list(A.token_ids), max_new_tokens=20))
    engine.abort(everything=True)
    assert read(A, never[0][0]).routing is None


def test_an_abort_before_the_first_token_leaves_the_sample_as_it_was(path: Path) -> None:
    """A stock server may have fed a part of the prompt and send rows for all of it: they are not taken."""
    (done,) = paused(path, PauseMode.IN_PLACE)
    sample = read(
        A,
        done,
        finish=Finish.ABORT,
        output_ids=done.reply.output_ids[:0],
        logprobs=None if done.reply.logprobs is None else done.reply.logprobs[:0],
        weight_versions=(),
    )
    assert (sample.finish, sample.routing, sample.versions) == (Finish.ABORT, None, ())
    assert sample.token_ids.tolist() == list(A.token_ids)


# ---- gate weights, a diagnostic


@torch.no_grad()
def _gates_of_transformers(tokens: torch.Tensor) -> list[torch.Tensor]:
    """[rows, experts] of each layer with experts, zero where one is not chosen."""
    model, found = oracle(), []

    def keep(_module: object, _inputs: object, out: tuple[torch.Tensor, ...]) -> None:
        found.append(torch.zeros(len(tokens), 16).scatter(1, out[2], out[1]))

    for layer in model.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(keep)
    model(tokens[None])
    return found


def test_gate_weights_come_with_the_routes_they_belong_to(path: Path, url: str) -> None:
    """What the engine weighted each expert's output by, as transformers' router gives it for the same tokens; a
    retraction keeps them with their ids. Routes without gates are refused, naming the missing key."""
    s = service(path, gates=True)
    s.engine.set_version("0")
    out = submit(s.engine, spec(list(A.token_ids), gates=True, n=2), spec(list(A.token_ids)))
    for _ in range(3):
        s.engine.step()
    s.engine.pause(PauseMode.RETRACT)
    changed(s, path, "1", 0)
    s.engine.resume()
    finished(s.engine)
    with_gates = GenerateReply.from_json(out[0][0].reply.to_json(), want_logprobs=True)
    reader = SampleReader(routing=replace(SHAPE, gates=True))
    (sample,) = reader.extend([empty_sample(A, 0)], [()], [with_gates])
    assert sample.routing is not None and sample.routing.weights is not None
    assert sample.routing.weights.shape == sample.routing.experts.shape
    before = len(A.token_ids) + sample.versions[0].end - 1  # rows of the first weights, which are transformers' too
    for layer, theirs in enumerate(_gates_of_transformers(sample.token_ids[:before])):
        ours = torch.zeros(before, 16).scatter(
            1, sample.routing.experts[:before, layer].long(), sample.routing.weights[:before, layer]
        )
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    torch.testing.assert_close(sample.routing.weights.sum(-1), torch.full((len(sample.routing), 2), 2.5))
    (other,) = reader.extend([empty_sample(A, 1)], [()], [out[0][1].reply])  # of the same prefill
    assert other.routing is not None and other.routing.weights is not None
    assert torch.equal(other.routing.weights[:5], sample.routing.weights[:5])
    plain = GenerateReply.from_json(out[1][0].reply.to_json(), want_logprobs=True)
    assert plain.routed_weights is None
    with refuses(ValueError, "routed_experts_weights", "--enable-return-routed-weights"):
        reader.extend([empty_sample(A, 0)], [()], [plain])
    with refuses(RolloutError, "return_routed_weights"):
        ask(url, lambda c: c.generate([A], n=1, params=params(2)), routing=replace(SHAPE, gates=True))
    with FakeServer() as stock, refuses(RolloutError, "routed_experts_weights", "--enable-return-routed-weights"):
        shape = RoutingShape(num_layers=3, moe_layers=(1, 2), top_k=2, num_experts=16, gates=True)
        ask(stock.url, lambda c: c.generate([A], n=1, params=params(2)), routing=shape)


def test_a_sample_that_is_scored_has_the_log_probs_and_routes_it_was_sampled_with(url: str) -> None:
    """Fed as a prompt: the same weights, another order of the same sums."""

    async def both(client: SGLangClient) -> tuple[Any, Any]:
        (group,) = await client.generate([A], n=2, params=params(6))
        return group, await client.score([s.token_ids for s in group.samples])

    group, scores = ask(url, both)
    for sample, (logprobs, routes) in zip(group.samples, scores, strict=True):
        of_response = sample.loss_mask[1:]
        torch.testing.assert_close(logprobs[of_response], sample.logprobs[1:][of_response], atol=1e-5, rtol=0)
        assert routes is not None and torch.equal(routes.experts, sample.routing.experts)
    without = ask(url, lambda client: client.score([group.samples[0].token_ids]), routing=None)
    assert without[0][1] is None
    torch.testing.assert_close(without[0][0], scores[0][0], atol=1e-5, rtol=0)
