"""Law: an episode of several turns is one sample: its log-probs and routes are those of its tokens as a whole, the
trainer replays every row of it, and trains on the policy's tokens alone.

Why it must hold: each turn is another request, whose prompt is all earlier text. A row that is requested twice, left
out or taken from another token, or an environment token that counts in the loss, would train on unsampled tokens.

The embedded engine over HTTP, environment, generate function, advantage and loss of docs/examples by the keys of a
configuration, a trainer of one rank. Not covered: stock SGLang (test_recorded_sglang.py reads its answers), aborted
turns (tests/rollout/episodes/test_environment.py), turns of several weight versions (test_partial_rollouts.py).
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_like.algorithms.registry import make_algorithm
from miles_like.batch.packing import pack
from miles_like.config.sections.algorithm import AlgorithmConfig
from miles_like.config.sections.correction import CorrectionConfig
from miles_like.hf.tokenizer import load_tokenizer
from miles_like.rewards.load import scored_by
from miles_like.types import Prompt, Sample, SampleGroup, SamplingParams, TrainBatch
from rollout.config import RolloutConfig
from rollout.episodes.groups import run_groups
from rollout.episodes.runner import make_episode_runner
from rollout.sglang.client import SGLangClient
from rollout.sglang.samples import RoutingShape
from routing_replay.trace import RoutingTrace
from tests.support import toy
from tests.support.embedded_fixtures import served, service
from tests.support.spawn import run_ranks
from tests.support.tiny_models import felt_tensors, tiny, write_checkpoint

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"
TOKENIZER = load_tokenizer(ROOT / "configs" / "tiny")
HF = tiny(torch_dtype="float32")
SHAPE = RoutingShape(num_layers=3, moe_layers=toy.LAYERS, top_k=toy.TOP_K, num_experts=toy.EXPERTS)
HINTS = RolloutConfig(
    environment=f"{EXAMPLES}/environment.py:Hints", max_turns=3, max_new_tokens=6, max_episode_tokens=40
)
TWICE = RolloutConfig(generate=f"{EXAMPLES}/generate.py:twice", max_new_tokens=6, max_episode_tokens=16)
# half the vocabulary are stop tokens, so that most turns of random weights end
PARAMS = SamplingParams(max_new_tokens=6, sampling_seed=5, stop_token_ids=tuple(range(1, 128, 2)))
G = 4


@dataclass
class Found:
    episodes: dict[str, list[SampleGroup]] = field(default_factory=dict)
    again: list[SampleGroup] = field(default_factory=list)  # the environment's, asked a second time
    whole: dict[str, tuple[torch.Tensor, RoutingTrace]] = field(default_factory=dict)  # every sample, scored at once
    batch: TrainBatch | None = None
    replayed: dict[str, float] = field(default_factory=dict)
    trained: dict[str, float] = field(default_factory=dict)


def _prompts(kind: str) -> list[Prompt]:
    texts = {"50-19=": "31", "13+3=": "16"}
    return [
        Prompt(id=f"{kind}{i}", token_ids=tuple(TOKENIZER.encode(t)), answer=a, text=t)
        for i, (t, a) in enumerate(texts.items())
    ]


async def _reward(prompt: Prompt, sample: Sample) -> float:
    return sample.index / G


async def _play(client: SGLangClient, found: Found, trainer: Any) -> None:
    for kind, config in (("hints", HINTS), ("twice", TWICE), ("again", HINTS)):
        engine = make_episode_runner(config, TOKENIZER).wrap(client)
        prompts = _prompts("hints" if kind == "again" else kind)
        found.episodes[kind] = await run_groups(engine, prompts, scored_by(_reward), n=G, params=PARAMS)
        await client.flush_cache()
    found.again = found.episodes.pop("again")
    samples = _samples(found)
    scores = await client.score([s.token_ids for s in samples])
    found.whole = {s.name: (p, t) for s, (p, t) in zip(samples, scores, strict=True) if t is not None}
    groups = [g for kind in found.episodes.values() for g in kind]
    algorithm = make_algorithm(ALGORITHM, CorrectionConfig())
    found.batch = pack(groups, algorithm.advantages(groups), dp_size=1, max_tokens=512)
    rows, tokens = [found.batch.grid[0]], [found.batch.loss_tokens]
    found.replayed = dict(trainer.evaluate(rows[0], tokens[0]))
    found.trained = dict(trainer.train(rows, tokens, 1).metrics)


ALGORITHM = AlgorithmConfig(advantage=f"{EXAMPLES}/advantage.py:rank", loss=f"{EXAMPLES}/loss.py:Truncated")


def _one_rank(rank: int, world: int, port: int, where: Path) -> Found:
    from megatron_bridge.convert.to_megatron import to_megatron

    write_checkpoint(where / "hf", HF, felt_tensors(HF))
    to_megatron(where / "hf", where / "shards")
    loss, found = make_algorithm(ALGORITHM, CorrectionConfig()).loss, Found()
    s = service(where / "hf")
    s.engine.set_version("0")
    with served(s) as url, toy.trainer(toy.config(str(where / "hf")), rank, world, port, loss) as t:
        t.load_weights(where / "shards")

        async def run() -> None:
            client = SGLangClient(url, routing=SHAPE, decode=lambda ids: str(TOKENIZER.decode(ids)))
            try:
                await _play(client, found, t)
            finally:
                await client.close()

        asyncio.run(run())
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run_ranks(_one_rank, 1, tmp_path_factory.mktemp("episodes"), keep=True)[0]  # type: ignore[no-any-return]


def _samples(found: Found) -> list[Sample]:
    return [s for kind in found.episodes.values() for g in kind for s in g.samples]


def _turns(sample: Sample) -> int:
    mask = sample.loss_mask.int()
    return int((mask.diff() > 0).sum())


def test_the_episodes_have_turns(found: Found) -> None:
    """Otherwise the law would hold vacuously: some have three turns, with the environment's text among their tokens."""
    hints, twice = (_samples(replace(found, episodes={k: v})) for k, v in found.episodes.items())
    assert max(_turns(s) for s in hints) == 3 and max(_turns(s) for s in twice) == 2
    hints_text = [TOKENIZER.decode(s.token_ids[~s.loss_mask].tolist()) for s in hints if _turns(s) > 1]
    assert hints_text and all(("?" in t) or ("number: " in t) or ("er: " in t) for t in hints_text)
    assert all(len(s.token_ids) - len(_prompts("x")[0].token_ids) <= 41 for s in hints)


def test_an_episode_is_scored_as_a_whole_is(found: Found) -> None:
    """The oracle: all its tokens as one prompt. Tokens of the environment have no log-prob of the policy's."""
    for s in _samples(found):
        logprobs, routes = found.whole[s.name]
        torch.testing.assert_close(s.logprobs[1:][s.loss_mask[1:]], logprobs[s.loss_mask[1:]], atol=1e-5, rtol=0)
        assert not s.logprobs[~s.loss_mask].any()
        assert s.routing is not None and torch.equal(s.routing.experts, routes.experts)


def test_the_same_seed_is_the_same_episode(found: Found) -> None:
    """Also what the environment draws: an environment built for each episode draws from that episode's seed."""
    for a, b in zip(found.again, found.episodes["hints"], strict=True):
        assert [s.token_ids.tolist() for s in a.samples] == [s.token_ids.tolist() for s in b.samples]
        assert [s.reward for s in a.samples] == [s.reward for s in b.samples]


def test_the_trainer_replays_every_row_and_trains_on_the_policy_s_tokens_alone(found: Found) -> None:
    assert found.replayed["routing/replay_coverage"] == found.replayed["routing/agreement"] == 1.0
    assert found.batch is not None
    rows = [m for row in found.batch.grid for m in row]
    under_loss = sorted(t for m in rows for t in m.labels[m.loss_mask].tolist())
    assert under_loss == sorted(t for s in _samples(found) for t in s.token_ids[s.loss_mask].tolist())
    assert found.batch.loss_tokens == len(under_loss) < sum(len(m.labels) for m in rows) - 8 * 4
    assert math.isfinite(found.trained["train/loss"]) and found.trained["train/grad_norm"] > 0
    assert found.trained["train/is_weight/trunc_frac"] == 0 and abs(found.trained["train/is_weight/max"] - 1) < 1e-3
