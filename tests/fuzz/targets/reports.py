"""Inputs of `miles-like report`: damaged and forged metrics, ledgers, rollouts and configurations, links and devices.

No file outside the run directory may be changed, and no text of one may be in the report.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

from miles_like.page.write import plotly_script
from tests.fuzz.commands import command
from tests.fuzz.mutate import changed, spoiled, value
from tests.fuzz.pool import Case, Outcome, long_tier
from tests.fuzz.targets.run_dirs import base, contents

CASES = 500
FILES = (
    *("metrics.jsonl", "ledger.jsonl", "rollouts/step_1.jsonl", "rollouts/step_3.jsonl", "config.toml"),
    *("incidents/1.md", "evals/step_3.jsonl"),
)
OUTPUTS = ("report.html",)
SCRIPTS = 4  # elements of a page
SECRET = "a secret of this machine"
KEYS = (
    *("rollout/reward/mean", "eval/accuracy", "eval/loss", "train/entropy", "mismatch/kl", "routing/agreement"),
    *("train/kl_ref", "rollout/zero_std_group_frac", "rollout/len/mean", "eval/m/avg@1", "eval/m/regression"),
    *("perf/reward/p99_s", "async/staleness/mean", "rollout/reward/std", "rollback/to", "rollout/filtered_frac"),
    *("perf/rollout_s", "perf/step_s", "ledger/trained", "ledger/discarded", "wall_s", "tokens_total", "step"),
    *("eval/$x_{", "eval/<script>", "eval/\ud800", "eval/" + "a" * 9000),
)


def draw(rng: random.Random) -> Case:
    kind = rng.choice(("spoil", "rows", "rows", "rows", "forge", "link", "fifo", "output"))
    case: Case = {"kind": kind, "file": rng.choice(FILES), "seed": rng.randrange(2**32)}
    if kind == "link":
        case["to"] = rng.choice(("outside", "/dev/zero", "/dev/null", "/etc", "itself", "config.toml"))
    elif kind == "output":
        case |= {"file": rng.choice(OUTPUTS), "to": rng.choice(("outside", "folder", "directory", "fifo", "itself"))}
    return case


def figure(rng: random.Random) -> Any:
    """A value of a metric, mostly a number."""
    numbers = (0, 1, 0.5, -1, 1e-300, 1e99, 1e308, 10**23, 10**400, None, True, float("nan"), float("inf"), 2**53)
    return rng.choice(numbers) if rng.random() < 0.9 else value(rng)


def forged_rows(rng: random.Random) -> str:
    rows: list[Any] = []
    hostile = rng.choice((0.0, 0.01, 0.3))
    for step in range(rng.choice((1, 2, 3, 30))):
        row = {k: figure(rng) if rng.random() < hostile else rng.random() for k in KEYS if rng.random() < 0.4}
        row["step"] = figure(rng) if rng.random() < hostile else step
        rows.append(row if rng.random() >= hostile / 10 else value(rng))
    return "".join(json.dumps(r) + "\n" for r in rows)


def watched(run: Path) -> None:
    """Adds what a run with evaluations and an incident writes."""
    answer = {"set": "m", "mode": "greedy", "prompt_id": "p", "index": 0, "reward": 1.0}
    for name, text in {
        "incidents/1.md": "# 1",
        "evals/step_3.jsonl": "".join(json.dumps(answer | {"prompt_id": p}) + "\n" for p in "ab"),
    }.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(text)


def change(run: Path, case: Case) -> None:
    path, rng, kind = run / case["file"], random.Random(case["seed"]), case["kind"]
    if kind == "spoil":
        path.write_bytes(spoiled(rng, path.read_bytes()))
    elif kind == "rows":
        (run / "metrics.jsonl").write_text(forged_rows(rng))
    elif kind == "forge":
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.suffix == ".jsonl" else [{}]
        lines[rng.randrange(len(lines))] = changed(rng, rng.choice(lines))
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    else:
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        to = "directory" if kind == "output" and case["to"] == "directory" else case.get("to", "fifo")
        if to == "directory":
            path.mkdir()
        elif to == "fifo":
            os.mkfifo(path)
        else:
            known = {"outside": run.parent / "outside", "folder": run.parent / "folder", "itself": path}
            path.symlink_to(known.get(to, to))


def play(case: Case, folder: Path) -> Outcome:
    run, outside = folder / "run", folder / "outside"
    shutil.copytree(base(), run)
    watched(run)
    outside.write_text(SECRET)
    (folder / "folder").mkdir()
    change(run, case)
    before = contents(run)
    found = command("report", str(run))
    if outside.read_text() != SECRET or list((folder / "folder").iterdir()) or len(list(folder.iterdir())) != 3:
        return Outcome(kind="unsound", words="a file outside the run directory was changed")
    after = contents(run)
    if any(after.get(name) != data for name, data in before.items() if not name.startswith("report")):
        return Outcome(kind="unsound", words="a file of the run was changed")
    if found.kind == "accepted":
        page = (run / "report.html").read_bytes()
        own = page.replace(plotly_script().encode(), b"").lower()
        if SECRET.encode() in page or own.count(b"<script") != SCRIPTS or b"</html>" not in own:
            return Outcome(kind="unsound", words="the report shows another file, runs a script or is not whole")
    elif (run / "report.html").is_file() and not (run / "report.html").is_symlink():
        return Outcome(kind="unsound", words="refused, and a report was written")
    return found


def run(cases: int, seed: int) -> dict[str, float | int | str]:
    return long_tier("reports", cases, seed)
