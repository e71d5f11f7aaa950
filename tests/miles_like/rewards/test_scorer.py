"""Functions that are slow, stuck, wrong or have nothing to say.

A sample without a score is requested again and then given up; a function that is wrong ends the run; a function cannot
stop the loop or the end of the process. No clock decides: a stuck function waits for an event that is never set, or
that the test sets.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles_like.config.sections.reward import RewardConfig
from miles_like.limits import threads as threads_module
from miles_like.limits.threads import DaemonThreads
from miles_like.rewards.load import make_reward, scored_by
from miles_like.rewards.scorer import Scorer
from miles_like.types import Prompt, Sample, Score, Unit, Unscored
from tests.support.fakes import make_prompt
from tests.support.made_samples import sample
from tests.support.refusals import Facts, refuses

ROOT = Path(__file__).parents[3]


def asked(reward: Any, n: int = 2, prompts: tuple[str, ...] = ("p",)) -> list[Score | Unscored]:
    """Of `n` samples of each prompt."""

    async def run() -> list[Score | Unscored]:
        pairs = [(make_prompt(p), sample(p, i, text=f"{p}{i}")) for p in prompts for i in range(n)]
        try:
            return list(await reward([p for p, _ in pairs], [s for _, s in pairs]))
        finally:
            await reward.close()

    return asyncio.run(run())


def patient(function: Callable[..., Any], **more: Any) -> Scorer:
    return scored_by(function, RewardConfig(name="m:f", **({"retry_wait_s": 0.0} | more)))


def test_each_kind_of_function_sees_what_it_asks_for() -> None:
    """By the names of its parameters; sync, async and objects."""

    def one(prompt, sample):
        return float(sample.index)

    async def group(prompt, samples):
        assert {s.prompt_id for s in samples} == {prompt.id}
        return [len(samples) + s.index for s in samples]

    def batch(prompts, samples):
        assert [p.id for p in prompts] == [s.prompt_id for s in samples]
        return [{"size": len(samples)} for _ in samples]

    class Object:
        async def __call__(self, prompt, sample):
            return 0.5

    seen = {f.__name__: asked(patient(f), prompts=("p", "q")) for f in (one, group, batch)}
    assert [o.value for o in seen["one"]] == [0, 1, 0, 1]
    assert [o.value for o in seen["group"]] == [2, 3, 2, 3]
    assert seen["batch"] == [Score(value=4.0, parts={"size": 4.0})] * 4
    assert asked(patient(Object())) == [Score(value=0.5)] * 2
    assert [patient(f).unit for f in (one, group, batch)] == list(Unit)
    assert [patient(f).slow for f in (one, group, batch, Object())] == [False, True, False, True]


def test_a_function_whose_parameters_say_nothing_needs_a_unit() -> None:
    def odd(a, b):
        return [float(len(b))] * len(b)

    with refuses(ValueError, "reward.style"):
        patient(odd)
    assert asked(patient(odd, unit="group")) == [Score(value=2.0)] * 2
    with refuses(ValueError, "batch", "group"):
        patient(lambda prompt, samples: 0, unit="batch")
    with refuses(ValueError, "reward.unit", "batch", "verl"):
        patient(odd, style="verl", unit="batch")


def test_none_is_asked_again_and_then_given_up() -> None:
    """Never a 0. What was scored is not scored again where the function sees samples one by one."""
    calls: Counter[int] = Counter()

    def sometimes(prompt, sample):
        calls[sample.index] += 1
        return None if calls[sample.index] <= 2 * sample.index else 1.0

    assert asked(patient(sometimes, retries=2), n=3) == [
        Score(value=1.0),
        Score(value=1.0),
        Unscored(reason="the reward function returned None"),
    ]
    assert calls == {0: 1, 1: 3, 2: 3}


def test_a_group_is_asked_again_whole_and_keeps_what_it_had() -> None:
    """A function that compares samples needs all of them; a second answer does not replace a first."""
    attempts: list[int] = []

    def compare(prompt, samples):
        attempts.append(len(samples))
        return [float(len(attempts)), None if len(attempts) < 2 else 9.0, None]

    assert asked(patient(compare, retries=1), n=3) == [
        Score(value=1.0),
        Score(value=9.0),
        Unscored(reason="the reward function returned None"),
    ]
    assert attempts == [3, 3]


@pytest.mark.parametrize("how", ["sync", "async", "scores what it was interrupted in", "raises where it was"])
def test_what_is_stuck_is_given_up(how: str) -> None:
    """Also the second time, and whatever the function makes of the interruption."""
    never = threading.Event()

    def stuck(prompt, sample):
        return never.wait(60)

    async def waits(prompt, sample):
        return await asyncio.Event().wait()

    async def scores(prompt, sample):
        try:
            return await asyncio.Event().wait()
        except:  # noqa: E722  as people write it
            return 0.0

    async def raises(prompt, sample):
        try:
            return await asyncio.Event().wait()
        finally:
            raise KeyError("answer")

    functions = {"sync": stuck, "async": waits, "scores what it was interrupted in": scores}
    found = asked(patient(functions.get(how, raises), timeout_s=0.1, retries=1), n=1)
    assert found == [Unscored(reason="no reward within 0.1 s")]
    never.set()


@pytest.mark.parametrize("unit", [Unit.SAMPLE, Unit.GROUP, Unit.BATCH])
@pytest.mark.parametrize("how", ["sync", "async", "gives something to await", "takes no end"])
def test_what_never_returns_costs_its_samples_and_nothing_else(
    how: str, unit: Unit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every kind of function. What was asked apart from it keeps its score, and nothing of it is waited for."""
    monkeypatch.setattr("miles_like.rewards.function.PATIENCE_S", 0.01)
    never, left = threading.Event(), 0

    def given(prompts: Any, samples: Any) -> Any:
        """1 each, or None where the second sample of the first prompt is among them."""
        ids = [(samples.prompt_id, samples.index)] if unit is Unit.SAMPLE else [(s.prompt_id, s.index) for s in samples]
        return None if ("p", 1) in ids else 1.0 if unit is Unit.SAMPLE else [1.0] * len(ids)

    def sync(a, b):
        found = given(a, b)
        return never.wait(60) if found is None else found

    async def waits(a, b):
        found = given(a, b)
        return await asyncio.Event().wait() if found is None else found

    async def stubborn(a, b):
        nonlocal left
        while (found := given(a, b)) is None:
            left += 1
            try:
                await asyncio.sleep(0.001)
            except:  # noqa: E722  as people write it
                continue
        return found

    functions = {"sync": sync, "async": waits, "takes no end": stubborn}
    function = functions.get(how, lambda a, b: waits(a, b))
    reward = patient(function, unit=unit.value, style="own", timeout_s=0.3, retries=0)
    gone, score = Unscored(reason="no reward within 0.3 s"), Score(value=1.0)
    lost = {Unit.SAMPLE: [score, gone, score, score], Unit.GROUP: [gone, gone, score, score], Unit.BATCH: [gone] * 4}
    assert asked(reward, prompts=("p", "q")) == lost[unit]
    assert (left > 0) == (how == "takes no end")
    never.set()


def test_the_end_of_a_run_is_not_taken_for_a_sample_that_cannot_be_scored() -> None:
    """A function that swallows its cancellation would be asked again, once for every further attempt."""
    calls = 0

    async def nothing(prompt, sample):
        nonlocal calls
        calls += 1
        try:
            await asyncio.Event().wait()
        except:  # noqa: E722  as people write it
            return

    async def run() -> None:
        call = asyncio.ensure_future(patient(nothing, retries=3)([make_prompt("p")], [sample("p", 0)]))
        while not calls:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(run())
    assert calls == 1


def test_a_sync_function_does_not_stop_the_loop() -> None:
    """Two calls are under way at once, and the loop is free to let them go."""
    both = threading.Barrier(3)

    def blocks(prompt, sample):
        both.wait(20)
        return 1.0

    async def run() -> list[Score | Unscored]:
        reward = patient(blocks, timeout_s=20)
        call = asyncio.ensure_future(reward([make_prompt("p")] * 2, [sample("p", i) for i in range(2)]))
        await asyncio.to_thread(both.wait, 20)
        return list(await call)

    assert asyncio.run(run()) == [Score(value=1.0)] * 2


def test_no_more_calls_at_once_than_allowed_and_waiting_is_not_timed() -> None:
    """The third call waits twice as long as its limit for its turn, and is then scored."""
    running, most = 0, 0

    async def counts(prompt, sample):
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            return 1.0 if sample.index == 2 else await asyncio.Event().wait()
        finally:
            running -= 1

    gone = Unscored(reason="no reward within 0.1 s")
    assert asked(patient(counts, concurrency=1, timeout_s=0.1, retries=0), n=3) == [gone, gone, Score(value=1.0)]
    assert most == 1


@pytest.mark.parametrize(
    ("raised", "facts"),
    [
        (KeyError("grade"), ("KeyError", "grade")),
        (TimeoutError("their own"), ("TimeoutError",)),
        (StopIteration(3), ("RuntimeError",)),
        (SystemExit(2), ("SystemExit", 2)),
    ],
)
@pytest.mark.parametrize("sync", [True, False])
def test_an_exception_ends_the_run_in_a_sentence(raised: BaseException, facts: Facts, sync: bool) -> None:
    """A time limit of the function's own is its bug too: it says None where it means to be asked again."""

    def wrong(prompt, sample):
        raise raised

    async def wrong_async(prompt, sample):
        raise raised

    with refuses(RuntimeError, "p", 0, 1, *facts):
        asked(patient(wrong if sync else wrong_async), n=1)


def test_long_words_of_an_exception_and_a_long_result_are_cut() -> None:
    """They would stand in the console, the log of the driver and every report."""
    long = "x\n" * 5_000_000

    def wrong(prompt, sample):
        raise RuntimeError(long)

    for function in (wrong, lambda prompt, samples: {"text": long}, lambda prompt, sample: 10**5000):
        with refuses(RuntimeError, "p", 0) as caught:
            asked(patient(function), n=1)
        assert len(str(caught.value)) < 1000 and "\n" not in str(caught.value)


def test_a_wrong_result_ends_the_run_naming_who_gave_it() -> None:
    with refuses(RuntimeError, "p", 0, 1, "ValueError", 1, 2):
        asked(patient(lambda prompt, samples: [1.0]))
    with refuses(RuntimeError, 4, "p", "q"):
        asked(patient(lambda prompts, samples: [float("nan")] * 4), prompts=("p", "q"))


def test_a_thread_is_used_again_and_a_lost_one_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that loses one call after the other is stopped before the threads fill the machine."""
    monkeypatch.setattr(threads_module, "MOST_LOST", 1)
    release = threading.Event()

    async def run() -> None:
        pool = DaemonThreads()
        names = [await pool.run(lambda: threading.current_thread().ident) for _ in range(3)]
        assert len(set(names)) == 1
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await pool.run(release.wait)
        with refuses(RuntimeError, 1):
            await pool.run(lambda: 1)
        release.set()
        while pool._lost:
            await asyncio.sleep(0.01)
        assert await pool.run(lambda: 1) == 1
        pool.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_call_that_never_returns_does_not_keep_the_process() -> None:
    """The loop ends while the call is under way, and so does the interpreter."""
    code = """
import asyncio, threading
from miles_like.rewards import function
from miles_like.limits.threads import DaemonThreads

async def stubborn():
    while True:
        try:
            await asyncio.sleep(0.001)
        except:
            pass

async def run():
    function.PATIENCE_S = 0.01
    for call in (DaemonThreads().run(threading.Event().wait), function.await_or_abandon(stubborn())):
        try:
            async with asyncio.timeout(0.1):
                await call
        except TimeoutError:
            print("given up")

asyncio.run(run())
print("ended")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "given up\ngiven up\nended\n"), done.stderr


def test_a_close_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Open:
        closing = False

        def __call__(self, prompt, sample):
            return 1.0

        async def close(self):
            self.closing = True
            await asyncio.sleep(60)

    monkeypatch.setattr("miles_like.rewards.load.CLOSE_S", 0.01)
    function = Open()
    asyncio.run(asyncio.wait_for(scored_by(function).close(), 5))
    assert function.closing


def test_reasons_are_bounded() -> None:
    """Each different one stays in ledger, metrics and log to the end of the run."""

    def unscored(prompt: Prompt, sample: Sample) -> Unscored | dict[str, object]:
        reason = f"no {sample.index}\n" + "x" * 10_000
        return Unscored(reason=reason) if sample.index % 2 else {"score": None, "reason": reason}

    async def run() -> list[str]:
        reward = scored_by(unscored, RewardConfig(name="m:f", retries=0))
        prompt = make_prompt("p", answer="7")
        try:
            return [
                o.reason
                for i in range(1000)
                for o in await reward([prompt], [sample(index=i)])
                if isinstance(o, Unscored)
            ]
        finally:
            await reward.close()

    found = asyncio.run(run())
    assert len(found) == 1000 and len(set(found)) == 65 and found[-1] == "other reasons"
    assert all(len(reason) <= 120 and "\n" not in reason for reason in found)


def test_what_a_function_raises_names_file_line_and_function(tmp_path: Path) -> None:
    file = tmp_path / "boom.py"
    file.write_text("def f(prompt, sample):\n    return 1/0\n")

    async def run() -> None:
        reward = make_reward(RewardConfig(name=f"{file}:f", retries=0))
        try:
            await reward([make_prompt("p", answer="7")], [sample()])
        finally:
            await reward.close()

    with refuses(RuntimeError, "ZeroDivisionError", "boom.py:2", "1/0"):
        asyncio.run(run())


def test_a_syntax_error_in_a_file_is_not_a_question_of_imports(tmp_path: Path) -> None:
    file = tmp_path / "syntax.py"
    file.write_text("def f(prompt, sample)\n    return 1\n")
    with refuses(ValueError, "syntax.py:f", ":", "syntax.py", 1):
        make_reward(RewardConfig(name=f"{file}:f"))
