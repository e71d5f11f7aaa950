"""What /generate answers: samples with log-probs, versions and routes, seeds, stops, scores."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from miles_like.types import Finish, Sample, VersionSpan
from rollout.sglang.client import SGLangClient
from rollout.sglang.http_replies import RolloutError
from tests.support.engine_contract.served_engine import A, B, ServedEngine, params
from tests.support.refusals import refuses

ENVIRONMENT = (17, 18, 19)


def check_rescored(engine: ServedEngine, samples: list[Sample]) -> None:
    """Log-probs and routes are those that the same tokens have when they are scored."""
    for sample, (logprobs, routes) in zip(samples, engine.scores_of(samples), strict=True):
        mine = sample.loss_mask[1:]
        apart = (sample.logprobs[1:][mine] - logprobs[mine]).abs()
        assert float(apart.mean()) < engine.rounding and bool((sample.logprobs[sample.loss_mask] < 0).all())
        assert sample.routing is not None and routes is not None
        assert sample.routing.experts.shape == routes.experts.shape == (len(sample.token_ids) - 1, *_shape(engine))
        rows = sample.routing.experts.sort(-1).values == routes.experts.sort(-1).values
        assert float(rows.all(-1).float().mean()) > (0.999 if engine.rounding < 1e-3 else 0.9)  # near ties


def _shape(engine: ServedEngine) -> tuple[int, int]:
    assert engine.routing is not None
    return len(engine.routing.moe_layers), engine.routing.top_k


class GenerationContract:
    def test_groups_come_in_order_with_log_probs_versions_and_routes(self, engine: ServedEngine) -> None:
        groups = engine.ask(lambda client: client.generate([B, A], n=3, params=params(8)))
        assert [g.prompt for g in groups] == [B, A]
        for group in groups:
            p = len(group.prompt.token_ids)
            assert [s.index for s in group.samples] == [0, 1, 2]
            assert len({tuple(s.token_ids.tolist()) for s in group.samples}) == 3, "samples of a prompt are clones"
            for s in group.samples:
                assert (s.finish, s.response_len, s.versions) == (Finish.LENGTH, 8, (VersionSpan(0, 0, 8),))
                assert s.token_ids[:p].tolist() == list(group.prompt.token_ids)
            check_rescored(engine, list(group.samples))

    def test_log_probs_are_of_the_logits_over_the_temperature_before_any_cut(self, engine: ServedEngine) -> None:
        """The logits are scored: all of the vocabulary's log-probs at each place."""
        cuts = {"temperature": 0.6, "top_k": 7, "top_p": 0.8}
        (group,) = engine.ask(lambda client: client.generate([A], n=2, params=params(12, **cuts)))
        texts, start = [s.token_ids for s in group.samples], len(A.token_ids) - 1
        scores = engine.ask(lambda client: client.score_after(texts, start, top=engine.vocab))
        for sample, scored in zip(group.samples, scores, strict=True):
            assert scored.top is not None
            logits = torch.empty(12, engine.vocab).scatter(
                1, torch.from_numpy(scored.top.ids), torch.from_numpy(scored.top.logprobs)
            )
            sampled = sample.token_ids[-12:, None]
            expected = (logits / 0.6).log_softmax(-1).gather(1, sampled)[:, 0]
            assert float((sample.logprobs[-12:] - expected).abs().mean()) < engine.rounding
            place = (logits > logits.gather(1, sampled)).sum(-1)
            assert int(place.max()) < 7 + (engine.rounding > 1e-3), "a token that top_k cuts"

    def test_a_seed_gives_its_tokens_where_it_is_read(self, engine: ServedEngine) -> None:
        """Stock SGLang reads it with deterministic inference only, which it has on GPUs."""

        def tokens(**more: Any) -> list[list[int]]:
            (group,) = engine.ask(lambda client: client.generate([A], n=2, params=params(24, **more)))
            return [s.token_ids.tolist() for s in group.samples]

        first = tokens()
        assert (tokens() == first) is engine.seeded
        assert tokens(sampling_seed=4) != first
        assert tokens(temperature=0.0) == tokens(temperature=0.0)

    def test_what_ends_an_answer_and_what_is_scored_of_its_prompt(self, engine: ServedEngine) -> None:
        """ignore_eos with stop_token_ids, max_new_tokens = 0, logprob_start_len to the prompt's length and beyond."""
        prompt, p = list(A.token_ids), len(A.token_ids)
        free = engine.generate(4)["output_ids"]
        for ignore, stops, tokens, start in itertools.product(
            (False, True), (False, True), (0, 4), (-1, 0, p - 1, p, p + 1)
        ):
            case = f"{ignore=} {stops=} {tokens=} {start=}"
            sampling: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": ignore}
            sampling |= {"stop_token_ids": [free[1]]} if stops else {}
            reply = engine.post(
                "/generate",
                {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": start},
            )
            assert reply.status_code == (400 if start > p else 200), (case, reply.text)
            if start > p:
                continue
            body, ended = reply.json(), stops and not ignore and tokens > 0
            answer = free[: free.index(free[1]) + 1] if ended else free[:tokens]
            assert body["output_ids"] == answer, case
            meta = body["meta_info"]
            assert (meta["prompt_tokens"], meta["completion_tokens"]) == (p, len(answer)), case
            reason = {"type": "stop", "matched": free[1]} if ended else {"type": "length", "length": tokens}
            assert {k: meta["finish_reason"][k] for k in reason} == reason, case
            assert [token for _, token, _ in meta["output_token_logprobs"]] == answer, case
            scored = [] if start < 0 else prompt[start:]
            assert [token for _, token, _ in meta["input_token_logprobs"]] == scored, case
            assert [value is None for value, *_ in meta["input_token_logprobs"]] == [True, *[False] * p][: len(scored)]

    def test_one_prompt_is_answered_by_an_object_and_a_batch_by_a_list(self, engine: ServedEngine) -> None:
        """The samples of a prompt in a row, each with the id of its prompt's sample."""
        sampling = {"max_new_tokens": 2, "ignore_eos": True}
        one = engine.post("/generate", {"input_ids": [5, 6], "sampling_params": sampling, "rid": "me"}).json()
        assert one["meta_info"]["id"] == "me" and "output_token_logprobs" not in one["meta_info"]
        assert isinstance(engine.post("/generate", {"input_ids": [[5, 6]], "sampling_params": sampling}).json(), list)
        body = {"input_ids": [[5, 6], [7, 8, 9]], "sampling_params": sampling | {"n": 2}, "return_logprob": True}
        many = engine.post("/generate", body).json()
        assert [m["meta_info"]["prompt_tokens"] for m in many] == [2, 2, 3, 3]
        assert len({m["meta_info"]["id"] for m in many}) == 4
        assert [m["meta_info"]["input_token_logprobs"] for m in many] == [[]] * 4

    def test_a_text_is_scored_from_some_token_on_with_the_likeliest_beside(self, engine: ServedEngine) -> None:
        """What a teacher is asked for."""
        text = torch.arange(5, 25)

        async def both(client: Any) -> Any:
            return (await client.score([text]))[0][0], (await client.score_after([text], 7, top=4))[0]

        whole, after = engine.ask(both, routing=None)
        np.testing.assert_allclose(after.logprobs, whole[7:], atol=max(1e-4, engine.rounding))
        assert after.top.ids.shape == after.top.logprobs.shape == (12, 4)
        best = after.top.logprobs
        assert (np.diff(best) <= 0).all() and (best[:, 0] >= after.logprobs - max(1e-4, engine.rounding)).all()
        found = after.top.ids == text[8:, None].numpy()
        np.testing.assert_allclose(best[found], after.logprobs[found.any(1)], atol=max(1e-4, engine.rounding))

    def test_a_sample_goes_on_after_its_limit_and_after_an_environment(self, engine: ServedEngine) -> None:
        """Each reply brings the rows that the sample lacks, and no other."""

        async def turns(client: Any) -> tuple[Sample, Sample]:
            (group,) = await client.generate([A], n=2, params=params(6))
            on = await client.continue_sample(group.samples[1], params=params(3))
            return group.samples[1], await client.continue_sample(on, ENVIRONMENT, params=params(4))

        first, last = engine.ask(turns)
        assert last.token_ids.tolist()[: 5 + 6] == first.token_ids.tolist()
        assert last.token_ids.tolist()[14:17] == list(ENVIRONMENT) and not last.logprobs[14:17].any()
        assert last.loss_mask.tolist() == [False] * 5 + [True] * 9 + [False] * 3 + [True] * 4
        assert last.versions == (VersionSpan(0, 0, 9), VersionSpan(0, 12, 16))
        assert first.routing is not None and last.routing is not None
        assert torch.equal(last.routing.experts[:10], first.routing.experts)
        check_rescored(engine, [last])

    @pytest.mark.parametrize(
        "body",
        [
            {"input_ids": [5, 6], "sampling_params": {"temprature": 1}},
            {"input_ids": [5, 6], "sampling_params": {"temperature": -1}},
            {"input_ids": [5, 6], "sampling_params": {"top_p": 0}},
            {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": -1}},
            {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1023}},
            {"input_ids": []},
            {"input_ids": [5, 6], "return_routed_experts": True, "routed_experts_start_len": 3},
            {"sampling_params": {}},
        ],
        ids=["key", "temperature", "top_p", "length", "context", "empty", "rows", "nothing"],
    )
    def test_a_request_that_cannot_be_served_is_refused_in_words(self, engine: ServedEngine, body: Any) -> None:
        reply = engine.post("/generate", body)
        assert reply.status_code == 400, reply.text
        error = reply.json()["error"]
        assert len(error if isinstance(error, str) else error["message"]) > 10
        assert len(engine.generate(2)["output_ids"]) == 2

    @pytest.mark.parametrize("token", [128, -1])
    def test_a_token_outside_the_vocabulary_does_not_leave_the_client(self, engine: ServedEngine, token: int) -> None:
        """A stock server ends by it; an environment may return one."""

        async def wrong(client: SGLangClient) -> None:
            (group,) = await client.generate([A], n=1, params=params(2))
            with refuses(RolloutError, token, 127, unrecorded="it names the port"):
                await client.continue_sample(group.samples[0], [5, token], params=params(2))
            with refuses(RolloutError, token, 127, unrecorded="it names the port"):
                await client.score([torch.tensor([5, token])])
            assert (await client.generate([A], n=1, params=params(2)))[0].samples[0].response_len == 2

        engine.ask(wrong)
