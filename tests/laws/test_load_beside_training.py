"""Law: a run whose servers get weights while the next step trains is, bit for bit, the run that waits for them.

Why it must hold: in lockstep the groups of the next step are in the buffer when a version is written, and nothing that
trains asks a server. The servers get each version only after the optimizer has made the next step: what they sample
with, text by text, is the version that was written. The runs are small and on plain processes
(tests/support/local_run.py). Servers that are replaced meanwhile: test_replaced_servers.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chosen import later
from tests.support.forked import tail
from tests.support.local_run import Runs, tensors, untimed

STEPS = 4
HERE = "tests/laws/test_load_beside_training.py"
SETTINGS = ("buffer.max_staleness=1", "checkpoint.every=3", "eval.every=0", f"train.steps={STEPS}")
PATHS = ("disk", "tensor", "delta", "distributed")
LOOP = """
import asyncio
from miles_like.loop import overlapped

class Watched(overlapped.OverlappedController):
    moved = dict()

    def tell(self, event):
        with open({path!r}, "a") as f:
            print(event, file=f)

    async def step(self, record, groups):
        self.tell(f"train {{record.step}}")
        await super().step(record, groups)
        self.tell(f"trained {{record.step}}")

    async def publish(self, record):
        self.moved.setdefault(record.step, asyncio.Event()).set()
        self.tell(f"moved {{record.step}}")
        await super().publish(record)

    async def _load(self, record, *, beside_training):
        if beside_training:
            await self.moved.setdefault(record.step + 1, asyncio.Event()).wait()
        await super()._load(record, beside_training=beside_training)
        self.tell(f"loaded {{record.step + 1}}")
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with Runs(tmp_path_factory.mktemp("beside")) as started:
        yield started


@pytest.mark.parametrize("path", later(PATHS, ["disk", "tensor"], beside=HERE))
def test_it_is_the_run_that_waits(runs: Runs, path: str) -> None:
    waits, beside, events = runs.home / f"{path}, waits", runs.home / path, runs.home / f"{path}.txt"
    loop, settings = runs.home / f"{path}.py", [*SETTINGS, f"publish.path={path}"]
    loop.write_text(LOOP.format(path=str(events)))
    assert runs.run(waits, settings) == 0, tail(waits / "driver.log")
    watched = runs.run(beside, [*settings, "publish.during_training=true"], loop=str(loop))
    assert watched == 0, tail(beside / "driver.log")
    for step in range(1, STEPS + 1):
        kept = [(where / "rollouts" / f"step_{step}.jsonl").read_bytes() for where in (waits, beside)]
        assert kept[0] == kept[1], f"samples of step {step}"
    for step in (3, 4):
        found, want = (tensors(where / "checkpoints" / f"step_{step}" / "trainer") for where in (beside, waits))
        assert found.keys() == want.keys() and all(found[name].equal(want[name]) for name in want)
    assert (waits / "ledger.jsonl").read_bytes() == (beside / "ledger.jsonl").read_bytes()
    assert untimed(waits / "metrics.jsonl") == untimed(beside / "metrics.jsonl")
    seen = events.read_text().split("\n")
    assert seen.index("moved 1") < seen.index("loaded 1") < seen.index("trained 1"), seen
    assert seen.index("loaded 3") < seen.index("train 3"), "a checkpoint holds the state between two steps"


def test_a_loop_that_publishes_by_itself_is_refused(runs: Runs, tmp_path: Path) -> None:
    loop = Path(__file__).parents[2] / "docs" / "examples" / "two_passes.py"
    where = tmp_path / "refused"
    assert runs.run(where, [*SETTINGS, "publish.path=disk", "publish.during_training=true"], loop=str(loop)) == 2
    text = tail(where / "driver.log")
    assert "publish.during_training" in text and "TwoPasses" in text and not (where / "metrics.jsonl").exists()
