"""Another training loop is a `step` of the same objects: docs/examples/two_passes.py runs, saves and resumes.

Why it must hold: the loop is what users of a new data flow change. Whatever the example needs beyond the objects of
`Controller` would have to be rebuilt by them. The example's class drives a real run here (tests/support/local_run.py);
its main function, which joins Ray, runs in tests/e2e/test_pipeline.py.
"""

import json
from pathlib import Path

import pytest

from miles_like.checkpoint.ledger_audit import audit
from tests.support.kill_points import Kill, witnesses
from tests.support.local_run import ROOT, Runs, untimed

EXAMPLE = ROOT / "docs" / "examples" / "two_passes.py"
SETTINGS = ("train.steps=2", "eval.max_prompts=4", "eval.every=0")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    with Runs(tmp_path_factory.mktemp("loops")) as started:
        yield started


def rows(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def whole(runs: Runs, run_dir: Path, loop: str | None) -> Path:
    run_dir.mkdir()
    assert runs.run(run_dir, SETTINGS, loop=loop) == 0, (run_dir / "driver.log").read_text()
    assert audit(run_dir / "ledger.jsonl").wrong is None
    return run_dir


def test_a_loop_of_two_passes_trains_twice_on_each_batch(runs: Runs, tmp_path: Path) -> None:
    once, twice = whole(runs, tmp_path / "once", None), whole(runs, tmp_path / "twice", str(EXAMPLE))
    first, second = rows(once)[1], rows(twice)[1]
    assert second["first_pass/train/loss"] == first["train/loss"] and second["train/loss"] != first["train/loss"]
    assert [row["weight_version"] for row in rows(twice)] == [0, 1, 2], "one publication a step"


@pytest.mark.long(beside="tests/laws/test_kills.py")
def test_a_loop_of_two_passes_resumes(runs: Runs, tmp_path: Path) -> None:
    """To the same bits, as the product's loop."""
    twice, cut = whole(runs, tmp_path / "twice", str(EXAMPLE)), tmp_path / "cut"
    cut.mkdir()
    assert runs.run(cut, SETTINGS, kill=Kill(victim="driver", point="save", step=2, where="latest"), loop=str(EXAMPLE))
    assert len(witnesses(cut)) == 1 and len(rows(cut)) == 3, "killed after step 2, before its checkpoint had a name"
    assert runs.run(cut, SETTINGS, loop=str(EXAMPLE)) == 0, (cut / "driver.log").read_text()
    assert untimed(cut / "metrics.jsonl") == untimed(twice / "metrics.jsonl")
    assert (cut / "ledger.jsonl").read_bytes() == (twice / "ledger.jsonl").read_bytes()
