"""Held-out prompts: asked as they are to be, by the weights that they are to be asked of, scored, and forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from miles_like.config.load import dump_config, load_config
from miles_like.config.sections.eval import EvalSet
from miles_like.loop.evaluation import Answers, Evaluator, HeldOut, evaluate
from miles_like.report.progress import PhaseBar
from miles_like.rewards.load import scored_by
from miles_like.types import Prompt, Sample, SampleGroup, SamplingParams, ServerLost
from rollout.episodes.serving import Serving
from tests.support.fakes import FakeEngine, make_prompt
from tests.support.refusals import Facts, refuses

PARAMS = SamplingParams(max_new_tokens=4, temperature=0.7, top_p=0.9, top_k=5, sampling_seed=3)
HELD = EvalSet(
    name="held",
    path="held.jsonl",
    samples=1,
    greedy=True,
    temperature=None,
    max_prompts=None,
    max_new_tokens=None,
    reward=None,
)
TINY = Path(__file__).parents[3] / "configs" / "tiny.toml"


class Cached(FakeEngine):
    """Notes how it was asked, and whether prompts that it was given may still be in its cache."""

    cached = False

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.generated: list[tuple[int, SamplingParams]] = []

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> list[SampleGroup]:
        self.cached = True
        self.generated.append((n, params))
        return await super().generate(prompts, n=n, params=params)

    async def flush_cache(self) -> None:
        self.cached = False


def _right_if_first(prompt: Prompt, sample: Sample) -> float:
    return float(sample.index == 0)


def _evaluated(
    engines: Sequence[Cached], *configs: EvalSet, alone: bool = True, version: int = 0, serving: Serving | None = None
) -> dict[str, float]:
    prompts = [make_prompt(f"p{i}") for i in range(3)]
    sets = [HeldOut(config=c, prompts=prompts, reward=scored_by(_right_if_first)) for c in configs]
    return asyncio.run(evaluate(engines, sets, params=PARAMS, version=version, alone=alone, serving=serving))


@pytest.mark.parametrize(
    ("samples", "greedy", "asked", "found"),
    [
        (1, True, [(1, 0.0)], {"avg@1": 1.0}),
        (2, False, [(2, 0.7)], {"avg@2": 0.5, "pass@1": 0.5, "pass@2": 1.0}),
        (2, True, [(1, 0.0), (2, 0.7)], {"greedy": 1.0, "avg@2": 0.5, "pass@1": 0.5, "pass@2": 1.0}),
        (1, False, [(1, 0.7)], {"sampled": 1.0}),
    ],
)
def test_greedy_and_sampled_answers_are_told_apart(
    samples: int, greedy: bool, asked: list[tuple[int, float]], found: dict[str, float]
) -> None:
    """avg@1 is of one greedy answer, whatever else is asked for; of what is sampled nothing is cut off."""
    engine = Cached()
    got = _evaluated([engine], HELD.model_copy(update={"samples": samples, "greedy": greedy}))
    assert got == {f"eval/held/{k}": v for k, v in found.items()} | {"eval/held/unscored_frac": 0.0}
    assert [(n, p.temperature) for n, p in engine.generated] == asked
    assert all((p.top_p, p.top_k, p.sampling_seed, p.max_new_tokens) == (1.0, -1, 3, 4) for _, p in engine.generated)


def test_each_set_is_asked_in_its_own_way() -> None:
    engine, own = Cached(), {"name": "own", "samples": 4, "greedy": False, "temperature": 0.5, "max_new_tokens": 9}
    got = _evaluated([engine], HELD, HELD.model_copy(update=own))
    assert [k for k in got if k.endswith(("avg@1", "avg@4"))] == ["eval/held/avg@1", "eval/own/avg@4"]
    assert [(n, p.temperature, p.max_new_tokens) for n, p in engine.generated] == [(1, 0.0, 4), (4, 0.5, 9)]


def test_what_comes_next_does_not_find_the_prompts_in_a_cache() -> None:
    """Else a run that goes on from a checkpoint, which evaluates first, could sample other last bits."""
    engines = [Cached(), Cached()]
    _evaluated(engines, HELD)
    assert all(e.generated and not e.cached for e in engines)


def test_a_cache_is_left_alone_while_others_sample() -> None:
    engine = Cached()
    _evaluated([engine], HELD, alone=False)
    assert engine.cached


class Dead(Cached):
    url = "http://a"

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> list[SampleGroup]:
        raise ServerLost("server http://a cannot be reached")

    async def flush_cache(self) -> None:
        raise ServerLost("server http://a cannot be reached")


def test_another_server_is_asked_in_the_place_of_one_that_does_not_answer() -> None:
    dead, lost = Dead(), list[str]()

    def serving(limit_s: float) -> Serving:
        return Serving([dead.url, ""], lambda url, error: lost.append(url), limit_s=limit_s)

    found = {"eval/held/avg@1": 1.0, "eval/held/unscored_frac": 0.0}
    assert _evaluated([dead, Cached()], HELD, serving=serving(5)) == found and lost == [dead.url]
    with refuses(ServerLost, "http://a"):
        _evaluated([dead, Cached()], HELD)
    with refuses(ServerLost, "http://a"):
        _evaluated([dead], HELD, serving=serving(0.05))


@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [1, 2, 3]), (2, [2, 3]), (9, [3])])
def test_an_interval_of_zero_is_never(every: int, due: list[int]) -> None:
    """Neither at the beginning nor at the end; any other interval has both."""
    engine, progress = Cached(version=7), PhaseBar(3, Console(quiet=True))
    sets = [HeldOut(config=HELD, prompts=[make_prompt("p")], reward=scored_by(_right_if_first))]
    how: Any = {"engines": [engine], "sets": sets, "params": PARAMS, "seed": 0, "alone": True, "progress": progress}
    evaluator = Evaluator(**how, every=every)
    assert [s for s in (1, 2, 3) if evaluator.due(s, last=s == 3)] == due
    figures = asyncio.run(evaluator.figures(7))
    assert bool(figures) == bool(engine.generated) == bool(every)


def test_no_sets_are_no_metrics() -> None:
    assert _evaluated([Cached()]) == {}


def test_an_answer_of_other_weights_ends_the_evaluation() -> None:
    """Its figures would be a step's that it is not."""
    assert _evaluated([Cached(version=3)], HELD, version=3)
    with refuses(RuntimeError, "held", 4, "p0/0", 3):
        _evaluated([Cached(version=3)], HELD, version=4)


def test_answers_without_a_score_are_counted_apart() -> None:
    """Also those that a group came back without."""
    engine = FakeEngine()
    (group,) = asyncio.run(engine.generate([make_prompt("p")], n=4, params=PARAMS))
    right, wrong, lost, _ = group.samples
    scored = (replace(right, reward=1.0), replace(wrong, reward=0.0), lost)
    config = HELD.model_copy(update={"samples": 4, "greedy": False})
    got = Answers(config=config, greedy=(), sampled=[replace(group, samples=scored, discarded={"no score": 1})])
    assert got.figures() == {
        "eval/held/avg@4": 0.5,
        "eval/held/pass@1": 0.5,
        "eval/held/pass@2": 1.0,
        "eval/held/unscored_frac": 0.5,
    }


def test_sets_of_a_configuration(tmp_path: Path) -> None:
    """What a set does not say is data.eval's, then the rollout's; the resolved configuration gives the same sets."""
    own = ["eval.samples=8", "eval.temperature=0.6", "eval.sets.aime.path=aime.parquet", "eval.sets.aime.samples=64"]
    more = ["eval.sets.quick.path=org/quick:test", "eval.sets.quick.samples=1", "eval.sets.quick.reward=gsm8k"]
    config = load_config(TINY, [*own, *more, "eval.sets.quick.max_prompts=7"])
    first, aime, quick = config.eval_sets
    assert [s.name for s in config.eval_sets] == ["heldout", "aime", "quick"]
    assert [s.sampled for s in config.eval_sets] == [8, 64, 0] and first.path.endswith("heldout.jsonl")
    assert (aime.temperature, aime.greedy, aime.max_prompts, aime.reward) == (0.6, True, None, None)
    assert (quick.reward, quick.max_prompts) == ("gsm8k", 7)
    (tmp_path / "again.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.toml").eval_sets == config.eval_sets
    assert [s.sampled for s in load_config(TINY).eval_sets] == [0]


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        (["eval.sets.heldout.path=x.jsonl"], ("data.eval", "heldout.jsonl", "[eval.sets.heldout]")),
        (["eval.temperature=0.5"], ("eval.temperature", 1)),
        (["eval.sets.a.path=x", "eval.sets.a.temperature=0.5"], ("eval.sets.a.temperature",)),
        (['eval.sets."a/b".path=x'], ("sets.toml", "data.eval", "[eval.sets.NAME]")),
    ],
)
def test_sets_that_make_no_sense_are_refused(settings: list[str], facts: Facts, tmp_path: Path) -> None:
    keys = "\n".join(s if "path" not in s else s.replace("path=", 'path="') + '"' for s in settings)
    path = tmp_path / "sets.toml"
    path.write_text(f'extends = "{TINY}"\n{keys}\n')
    with refuses(ValueError, *facts):
        load_config(path)


def test_keys_without_a_set_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    path.write_text('model.path = "x"\ndata.train = "x"\neval.samples = 4\n')
    with refuses(ValueError, "eval.samples", 4, "data.eval"):
        load_config(path)
