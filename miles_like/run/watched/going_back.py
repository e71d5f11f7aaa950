"""A run goes back to an earlier step: a checkpoint of the next step number is made on disk, with the weights, optimizer
and random states of the ranks at that step, and a loop that begins there again.

    step_40    the best checkpoint
    ...        rows of metrics.jsonl and entries of the ledger stay; the samples count as discarded
    47         the last step before the run goes back
    step_48    files of step_40's models (links), prompts from step_40's position on, further numbers of everything else

So a step and a weight version never get their number twice. The prompts that were sampled since then are sampled again
under other seeds, because a seed is made of the number of the round too (rollout.seeds). `latest` then names the
checkpoint, and a run that is killed here resumes from the step before or from this one.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from miles_like.alerts.rows import ROLLBACK
from miles_like.checkpoint import run_state
from miles_like.checkpoint.ledger import Ledger
from miles_like.checkpoint.ledger_audit import ROLLED_BACK
from miles_like.checkpoint.run_state import RunState
from miles_like.checkpoint.writer import CONFIG, FILES, KEPT
from miles_like.hf.checkpoint import sync_path
from miles_like.loop.rollout_stats import RolloutStats
from miles_like.report.rows import json_row, read_metrics
from miles_like.run.setup.trainer_side import LEDGER, METRICS, RunFiles
from miles_like.run.watched.orders import GoingBack
from miles_like.storage.appended_file import AppendedFile, positions
from miles_like.types import Json


def times_back(run_dir: Path) -> int:
    """How often the run went back so far."""
    return sum(ROLLBACK in row for row in read_metrics(run_dir / METRICS))


def go_back(files: RunFiles, going: GoingBack) -> int:
    """Makes the checkpoint; returns its step. Blocks. Raises RuntimeError as `Fencing.check`, ValueError where the best
    checkpoint is damaged, and OSError."""
    plan, new = files.plan, going.step + 1
    if plan.fence is not None:
        plan.fence.check()
    folder = run_state.step_folder(plan.checkpoints, going.to)
    with run_state.suggesting_earlier_checkpoint(folder):
        best = run_state.load(folder, groups=False)
    parts = going.snapshot.parts
    ledger = Ledger(plan.run_dir / LEDGER, plan.fence)
    ledger.restore(parts["ledger"])
    ledger.go_back(going.to)
    ledger.flush(new)
    row = {"weight_version": float(new), **_wall(plan.run_dir), ROLLBACK: float(going.to), **ledger.metrics()}
    rows = AppendedFile(plan.run_dir / METRICS, plan.fence)
    rows.write(json_row(new, row) + "\n")
    assert ledger.file is not None, "it has a path"
    appended = positions({METRICS: rows, LEDGER: ledger.file})
    rows.close()
    own = {KEPT: files.best.state(), CONFIG: plan.config.model_dump(mode="json"), FILES: appended}
    _link_models(folder, run_state.empty_folder(plan.checkpoints, new))
    run_state.save(
        plan.checkpoints,
        RunState(
            step=new,
            weight_version=new,
            tokens_total=going.snapshot.tokens_total,
            parts={**parts, **own, **_loop(parts, best.parts, new), "ledger": ledger.state()},
            epoch=None if plan.fence is None else plan.fence.epoch,
        ),
        keep=plan.config.checkpoint.keep,
        every=plan.config.checkpoint.keep_every,
        best=files.best.step,
    )
    ledger.close()
    return new


def _loop(now: Mapping[str, Json], then: Mapping[str, Json], step: int) -> dict[str, Json]:
    """The parts of the loop: nothing is in flight, and the prompts begin where they stood `then`; those of groups that
    were outstanding then come first."""
    buffer, before = cast("Any", now["buffer"]), cast("Any", then["buffer"])
    dropped = Counter(buffer["dropped"]) + Counter({ROLLED_BACK: len(buffer["tickets"])})
    producer: dict[str, Any] = {
        "step": step,
        "kept": 0,
        "tried": 0,
        "left_out": {},
        "number": cast("Any", now["producer"])["number"],
        "held": [group["prompt"] for group in before["tickets"]] + cast("Any", then["producer"])["held"],
        "tally": RolloutStats().state(),
        "waves": [],
    }
    return {
        "prompts": then["prompts"],
        "buffer": {"next_ticket": buffer["next_ticket"], "tickets": [], "dropped": dict(dropped)},
        "producer": producer,
    }


def _link_models(of: Path, to: Path) -> None:
    """The folders of the trained models, whose files no process changes: as links, or as copies where the disk has
    none."""
    for folder in sorted(path for path in of.iterdir() if path.is_dir() and path.name != run_state.GROUPS_FOLDER):
        shutil.copytree(folder, to / folder.name, copy_function=_link)
        for path in (*(to / folder.name).rglob("*"), to / folder.name):
            if path.is_dir():
                sync_path(path)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _wall(run_dir: Path) -> dict[str, float]:
    """The wall time of the last row that has one, so that a resumed run continues from it."""
    found = [row["wall_s"] for row in read_metrics(run_dir / METRICS) if "wall_s" in row]
    return {"wall_s": found[-1]} if found else {}
