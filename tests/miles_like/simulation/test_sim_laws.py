"""Laws of the simulated loop: what must hold whatever is assumed, and closed forms where there are some.

Not covered: whether a machine has the assumed times (tests/miles_like/simulation/test_measured.py).
"""

from __future__ import annotations

import itertools
import json
import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.simulation.figures import figures_of
from miles_like.simulation.inputs.assumptions import Assumptions
from miles_like.simulation.inputs.lengths import DrawnAnswers, Purpose, stream
from miles_like.simulation.inputs.settings import LoopSettings
from miles_like.simulation.simulate import Outcome, simulate
from tests.support.chosen import checked
from tests.support.refusals import refuses

BASE = LoopSettings(
    seed=0,
    steps=8,
    groups=4,
    samples=3,
    max_staleness=0,
    lockstep=False,
    over_sampling=None,
    mask_old_tokens=False,
    in_flight_at_publication=False,
    max_rounds=20,
    servers=2,
    slots=None,
    kv_tokens=None,
    reserves_limit=False,
    prompts_per_request=16,
    limit=10**6,
    slow_reward=False,
    pause_mode="retract",
    ranks=2,
    shards=2,
    micro_batch_tokens=10**6,
    eval_every=0,
    save_every=0,
    save_asynchronous=False,
    takes_turns=False,
)


def loop(**changed: Any) -> LoopSettings:
    """BASE with changes; with staleness, groups are sampled freely unless in lockstep."""
    out = replace(BASE, **changed)
    return replace(out, in_flight_at_publication=(out.max_staleness + out.mask_old_tokens > 0) and not out.lockstep)


def assumed(**changed: Any) -> Assumptions:
    tree: dict[str, Any] = {
        "engine": {"step_s": 0.01, "token_s": 0.001, "prefill_s": 0.0005, "context_s": 1e-6},
        "train": {"fixed_s": 0.5, "token_s": 0.002},
        "publish": {"seconds": 0.2, "pause_s": 0.1},
        "lengths": {"kind": "exponential", "mean": 40, "prompt_tokens": 12},
    }
    for key, value in changed.items():
        tree[key] = tree.get(key, {}) | value if isinstance(value, dict) else value
    return Assumptions.model_validate(tree)


def run(settings_: LoopSettings, assumptions: Assumptions) -> Outcome:
    return simulate(settings_, assumptions, DrawnAnswers(lengths=assumptions.lengths, limit=settings_.limit))


LOOPS = st.fixed_dictionaries(
    {
        "max_staleness": st.integers(0, 3),
        "lockstep": st.booleans(),
        "over_sampling": st.sampled_from([None, None, 0.5, 1.0]),
        "pause_mode": st.sampled_from(["retract", "in_place", "abort"]),
        "servers": st.integers(1, 3),
        "slots": st.sampled_from([None, 2, 7]),
        "kv_tokens": st.sampled_from([None, 400]),
        "save_every": st.sampled_from([0, 1, 3]),
        "save_asynchronous": st.booleans(),
        "eval_every": st.sampled_from([0, 2]),
        "takes_turns": st.booleans(),
        "seed": st.integers(0, 1000),
    }
)
WORLDS = st.fixed_dictionaries(
    {
        "cores": st.sampled_from([None, 2.0]),
        "discarded": st.sampled_from([0.0, 0.3]),
        "spare_samples": st.sampled_from([0, 2]),
        "save_s": st.just(0.7),
        "save_copy_s": st.just(0.1),
        "evaluated": st.sampled_from([0, 5]),
        "reward": st.sampled_from([{}, {"mean_s": 0.3, "kind": "exponential"}]),
        "faults": st.sampled_from(
            [{}, {}, {"trainer_s": 12.0, "resume_s": 2.0}, {"server_s": 20.0, "server_restart_s": 1.5}]
        ),
    }
)


def fits(changed: dict[str, Any]) -> bool:
    """The combinations that a configuration may have (BufferConfig.check)."""
    k, share = changed["max_staleness"], changed["over_sampling"]
    return share is None or k == 0 or (not changed["lockstep"] and share <= k)


@settings(max_examples=30, deadline=None)
@given(changed=LOOPS.filter(fits), world=WORLDS)
def test_every_group_is_trained_once_or_discarded_once_and_no_token_is_too_old(
    changed: dict[str, Any], world: dict[str, Any]
) -> None:
    """The ledger raises for a group that ends twice."""
    limit = BASE.limit if changed["kv_tokens"] is None else changed["kv_tokens"] - 12  # with its prompt in the cache
    settings_ = loop(**changed, limit=limit, slow_reward="mean_s" in world["reward"])
    out = run(settings_, assumed(**world))
    ledger, rows = out.state.ledger, out.state.rows
    assert [r.step for r in rows] == list(range(1, settings_.steps + 1))
    assert len(ledger.trained) == settings_.steps * settings_.groups
    assert sorted(ledger.trained.values()) == [s for s in range(settings_.steps) for _ in range(settings_.groups)]
    assert ledger.outstanding == len(out.state.entries)
    assert all(r.samples == settings_.groups * settings_.samples for r in rows)
    assert all(0 <= k <= settings_.max_staleness for r in rows for k in r.staleness)
    assert sum(r.tokens for r in rows) == sum(sum(r.staleness.values()) for r in rows) <= out.generated
    if settings_.lockstep:
        assert all(set(r.staleness) == {min(r.step - 1, settings_.max_staleness)} for r in rows)
    for before, after in itertools.pairwise(rows):
        assert before.published <= after.began <= after.taken <= after.trained <= after.published
        assert sum(after.waits.values()) == pytest.approx(after.taken - after.began)
    intervals = out.trainer
    assert intervals[0].begin == 0 and intervals[-1].end == pytest.approx(out.wall_s)
    assert all(a.end == b.begin for a, b in itertools.pairwise(intervals))


@settings(max_examples=25, deadline=None)
@given(
    k=st.integers(0, 2),
    mask=st.booleans(),
    share=st.sampled_from([0.5, 1.0, 1.5, 2.5]),
    seed=st.integers(0, 1000),
)
def test_masked_tokens_are_not_trained_and_the_bound_holds(k: int, mask: bool, share: float, seed: int) -> None:
    if not (k < share <= k + 1 if mask else share <= k):
        return
    out = run(loop(max_staleness=k, mask_old_tokens=mask, over_sampling=share, seed=seed, steps=12), assumed())
    assert max(k_ for r in out.state.rows for k_ in r.staleness) <= k
    if not mask:
        assert out.generated == sum(r.tokens for r in out.state.rows)


@pytest.mark.parametrize("changed", [{}, {"max_staleness": 2}, {"over_sampling": 0.5}, {"takes_turns": True}])
def test_a_seed_gives_equal_results_and_another_seed_others(changed: dict[str, Any]) -> None:
    world = assumed(faults={"trainer_s": 10.0, "resume_s": 1.0}, cores=2.0, discarded=0.2)
    first, again, other = (
        json.dumps(figures_of(run(loop(**changed, seed=seed, save_every=2), world))) for seed in (3, 3, 4)
    )
    assert first == again != other


# ---- closed forms


def work(settings_: LoopSettings, a: Assumptions, first: int) -> list[float]:
    """Seconds of each server for the step whose first group is `first`: groups go round the servers, and each server
    takes one step a token of its longest answer, of the samples that are longer than the tokens so far."""
    source = DrawnAnswers(lengths=a.lengths, limit=settings_.limit)
    lengths: list[list[int]] = [[] for _ in range(settings_.servers)]
    for i in range(settings_.groups):
        answers = source.draw(stream(settings_.seed, Purpose.LENGTHS, first + i), settings_.samples)
        lengths[i % settings_.servers] += answers.lengths
    out, prompt = [], a.lengths.prompt_tokens or 0
    for own in lengths:
        seconds = a.engine.prefill_s * prompt * len(own) / settings_.samples
        for token in range(max(own, default=0)):
            contexts = [prompt + token for n in own if n > token] if token else []
            seconds += a.engine.step_s + a.engine.token_s * len(contexts) + a.engine.context_s * sum(contexts)
        out.append(seconds)
    return out


@settings(max_examples=25, deadline=None)
@given(servers=st.integers(1, 4), groups=st.integers(4, 9), seed=st.integers(0, 10**6))
def test_a_synchronous_step_is_the_slowest_server_s_work_then_training_then_publication(
    servers: int, groups: int, seed: int
) -> None:
    settings_, a = loop(servers=servers, groups=groups, seed=seed, steps=5, shards=1), assumed()
    rows = run(settings_, a).state.rows
    for i, row in enumerate(rows):
        tokens = sum(
            12 + n - 1
            for g in range(groups)
            for n in DrawnAnswers(lengths=a.lengths, limit=10**6)
            .draw(stream(seed, Purpose.LENGTHS, i * groups + g), 3)
            .lengths
        )
        wanted = max(work(settings_, a, i * groups)) + 0.5 + 0.002 * tokens + 0.2
        assert row.published - row.began == pytest.approx(wanted, rel=1e-6)
        assert row.began == pytest.approx(rows[i - 1].published if i else 0.0)


@pytest.mark.parametrize(("groups", "samples"), [(1, 8), pytest.param(4, 4, marks=pytest.mark.slow)])
def test_the_longest_of_n_exponential_answers_gates_a_step(groups: int, samples: int) -> None:
    """E[max of n] = mean (1 + 1/2 + ... + 1/n), variance mean^2 (1 + 1/4 + ... + 1/n^2) (Renyi 1953)."""
    n, steps, mean = groups * samples, 400, 5000
    a = assumed(
        engine={"step_s": 1.0, "token_s": 0, "prefill_s": 0, "context_s": 0},
        lengths={"mean": mean},
        train={"fixed_s": 0, "token_s": 0},
        publish={"seconds": 0, "pause_s": 0},
    )
    rows = run(loop(groups=groups, samples=samples, steps=steps), a).state.rows
    found = statistics.fmean(r.published - r.began for r in rows)
    error = mean * sum(1 / i**2 for i in range(1, n + 1)) ** 0.5 / steps**0.5
    assert abs(found - mean * sum(1 / i for i in range(1, n + 1))) < 4 * error


# ---- what cannot get slower


def wall(settings_: LoopSettings, a: Assumptions) -> float:
    return run(settings_, a).state.rows[-1].published


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(servers=st.integers(1, 3), groups=st.integers(1, 8), seed=st.integers(0, 10**6), slots=st.integers(1, 6))
def test_twice_as_many_servers_are_never_slower(servers: int, groups: int, seed: int, slots: int) -> None:
    """Each of twice as many servers has a part of what one had. With one server more the parts are others, and two long
    answers may meet that did not; see the next test. With places for some samples only, a step's time must not depend
    on its batch: a sample that starts earlier would slow down others."""
    for own, engine in (({"slots": None}, {}), ({"slots": slots}, {"token_s": 0, "context_s": 0, "prefill_s": 0})):
        fewer, more = (loop(servers=n, groups=groups, seed=seed, steps=4, **own) for n in (servers, 2 * servers))
        a = assumed(engine=engine)
        assert wall(more, a) <= wall(fewer, a) * (1 + 1e-9)


@pytest.mark.parametrize(
    "changed", [{}, {"max_staleness": 1}, {"over_sampling": 0.5}, {"max_staleness": 2, "lockstep": True}]
)
def test_more_servers_are_no_slower_in_the_mean(changed: dict[str, Any]) -> None:
    means = [
        statistics.fmean(wall(loop(servers=n, groups=6, seed=seed, **changed), assumed()) for seed in range(6))
        for n in (1, 2, 3)
    ]
    assert all(b <= a * 1.005 for a, b in itertools.pairwise(means)), means


@pytest.mark.parametrize("changed", checked([{}, {"max_staleness": 2}], [{}]))
def test_faults_lower_goodput_and_cost_no_group(changed: dict[str, Any]) -> None:
    settings_ = loop(**changed, steps=30, save_every=3)
    found = []
    for trainer_s in (None, 60.0, 15.0):
        faults = {} if trainer_s is None else {"trainer_s": trainer_s, "resume_s": 5.0}
        outcomes = [run(replace(settings_, seed=seed), assumed(faults=faults)) for seed in range(3)]
        found.append(statistics.fmean(figures_of(o)["goodput"]["samples_per_s"] for o in outcomes))
        assert all(len(o.state.ledger.trained) == 30 * 4 for o in outcomes)
        assert (trainer_s is None) == (not any(o.faults for o in outcomes))
    assert found[0] > 1.02 * found[1] and found[1] > 1.05 * found[2], found


def test_a_run_resumes_from_its_last_checkpoint() -> None:
    """Steps after it are trained again, from its groups; every fault costs at least the time to resume."""
    out = run(loop(steps=30, save_every=5, max_staleness=1), assumed(faults={"trainer_s": 12.0, "resume_s": 3.0}))
    assert out.faults > 3 and 0 < out.lost_steps <= 5 * out.faults
    trained = sum(i.end - i.begin for i in out.trainer if i.state == "train")
    kept = sum(r.trained - r.taken for r in out.state.rows)
    assert trained > kept
    assert sum(i.end - i.begin for i in out.trainer if i.state == "restart") == pytest.approx(3 * out.faults)


def test_staleness_hides_the_shorter_of_sampling_and_training() -> None:
    """With k = 1 a step takes no less than the longer half and no more than both; here the trainer's is longer."""
    a = assumed(train={"fixed_s": 3.0, "token_s": 0.0}, lengths={"kind": "fixed", "mean": 60})
    synchronous, ahead = (figures_of(run(loop(max_staleness=k), a)) for k in (0, 1))
    assert synchronous["step_s"]["mean"] == pytest.approx(3.2 + max(work(loop(), a, 0)), rel=1e-6)
    assert ahead["step_s"]["mean"] == pytest.approx(3.2, rel=1e-6)
    assert ahead["trainer_idle"] == pytest.approx(0, abs=1e-6)
    assert synchronous["trainer_idle"] == pytest.approx(1 - 3.2 / synchronous["step_s"]["mean"], rel=1e-6)
    assert synchronous["servers_idle_while"].keys() >= {"train", "publish"}


def test_turns_add_their_changes_and_a_saved_step_is_published_twice() -> None:
    """docs/turns.md: a publication is part of each turn of the servers."""
    turns = {"release_s": 1.0, "wake_s": 2.0, "sleep_s": 4.0, "resume_s": 8.0}
    a = assumed(lengths={"kind": "fixed", "mean": 60})
    apart, together = (
        run(loop(takes_turns=t, steps=6), assumed(lengths={"kind": "fixed", "mean": 60}, turns=turns))
        for t in (False, True)
    )
    step = lambda o: o.state.rows[3].published - o.state.rows[2].published  # noqa: E731
    assert step(together) == pytest.approx(step(apart) + 15)
    saved = run(
        loop(takes_turns=True, steps=6, save_every=3), assumed(lengths={"kind": "fixed", "mean": 60}, turns=turns)
    )
    assert step(saved) == pytest.approx(step(together) + 15 + a.publish.seconds)


# ---- refusals


def test_a_run_that_cannot_fill_a_step_ends() -> None:
    with refuses(RuntimeError, "rollout.max_rounds", 2, "simulation.discarded", 4):
        run(loop(max_rounds=2, groups=4), assumed(discarded=0.95))


def test_faults_that_come_before_every_checkpoint_end_the_simulation() -> None:
    with refuses(RuntimeError, "simulation.faults.trainer_s", 0.01, "checkpoint.every", 8):
        run(loop(), assumed(faults={"trainer_s": 0.01}))


def test_a_run_of_one_step_has_no_step_time() -> None:
    with refuses(ValueError, "train.steps", 1, 2):
        figures_of(run(loop(steps=1), assumed()))
    nothing = assumed(
        engine={"step_s": 0, "token_s": 0, "prefill_s": 0, "context_s": 0},
        train={"fixed_s": 0, "token_s": 0},
        publish={"seconds": 0, "pause_s": 0},
    )
    with refuses(ValueError, 0, "simulation.engine.step_s"):
        figures_of(run(loop(), nothing))
