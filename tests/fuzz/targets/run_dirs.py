"""Run directories that are resumed: damaged anywhere, or forged with right checksums.

Everything that a resumed run's driver reads before the ranks load is read: checkpoints, run_state.json, the files that
are cut back, kept rollouts. An accepted directory must leave all files outside of it, and all of it but the two files
that are cut back, as they were; what is cut back begins as it did.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import random
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from miles_like.checkpoint import run_state
from miles_like.checkpoint.best import KeptBest
from miles_like.checkpoint.ledger import Ledger
from miles_like.checkpoint.random_state import RANDOM, random_state, set_random_state
from miles_like.checkpoint.run_state import RunState
from miles_like.config.load import dump_config, load_config
from miles_like.loop.buffer import DataBuffer
from miles_like.run.setup.trainer_side import LEDGER, METRICS, RunFiles
from miles_like.run.verify import read_rollouts
from miles_like.storage.appended_file import AppendedFile, positions
from miles_like.storage.checkpoint_files import json_sha256
from miles_like.types import Prompt
from tests.fuzz.commands import command, outcome_of, together
from tests.fuzz.mutate import changed, spoiled
from tests.fuzz.pool import Case, Outcome, long_tier
from tests.support.made_samples import group, sample

CASES = 500
TINY = Path(__file__).parents[3] / "configs" / "tiny.toml"
FILES = (
    "checkpoints/latest",
    "checkpoints/step_2/run_state.json",
    "checkpoints/step_2/groups.safetensors",
    "checkpoints/step_2/trainer/weights.bin",
    METRICS,
    LEDGER,
    "rollouts/step_2.jsonl",
    "config.toml",
)
DEVICES = ("/dev/zero", "/dev/null", "/dev/stdin", "/etc/passwd", "/", "outside", "../outside", "missing")
NO_TALLY = {"waves": 0, "sampled": 0, "samples": 0, "given_up": 0, "tokens": 0, "left_out": {}, "rewards": []}


@functools.cache
def base() -> Path:
    """A run directory with checkpoints of steps 1 and 2, of a run that was killed in step 3."""
    run = Path(tempfile.mkdtemp(prefix="fuzz-run-")) / "run"
    config, ledger = load_config(TINY), Ledger(run / LEDGER)
    metrics = AppendedFile(run / METRICS)
    assert ledger.file is not None
    for ticket in range(3):
        ledger.issue(ticket, f"p{ticket}", 1)
    ledger.discard(0, "stale")
    (run / "rollouts").mkdir()
    for step in (1, 2, 3):
        ledger.flush(step)
        metrics.write(json.dumps({"step": step, "eval/accuracy": 0.5}) + "\n")
        row = {"token_ids": [1, 2, 3], "loss_mask": [False, True, True], "logprobs": [-0.5, -1.0], "index": 0}
        row |= {"prompt_id": f"p{step}", "versions": [[step, 0, 2]], "finish": "stop", "response": "x"}
        row |= {"prompt": "1 + 1", "answer": "2", "reward": 1.0}
        (run / f"rollouts/step_{step}.jsonl").write_text(json.dumps(row) + "\n")
        if step == 3:
            break
        trainer = run / f"checkpoints/step_{step}/trainer"
        trainer.mkdir(parents=True)
        (trainer / "weights.bin").write_bytes(bytes(range(256)) * step)
        parts: dict[str, Any] = {
            "config": config.model_dump(mode="json"),
            "keep_best": KeptBest("eval/accuracy").state(),
            "files": positions({METRICS: metrics, LEDGER: ledger.file}),
            RANDOM: random_state(),
            "prompts": {"sources": {}, "rests": {}},
            "buffer": {
                "next_ticket": 3,
                "tickets": [
                    {"ticket": 1, "prompt": "p1", "version": step, "tally": NO_TALLY},
                    {"ticket": 2, "prompt": "p2", "version": step, "tally": NO_TALLY},
                ],
                "dropped": {"stale": 1},
            },
            "producer": {
                "step": step,
                "kept": 0,
                "tried": 1,
                "left_out": {},
                "number": 1,
                "held": ["p1"],
                "tally": NO_TALLY,
                "waves": [{"number": 0, "tickets": [1, 2]}],
            },
            "ledger": ledger.state(),
        }
        state = RunState(
            step=step, weight_version=step, tokens_total=9, parts=parts, groups={"ready/1": group([sample("p1")])}
        )
        run_state.save(run / "checkpoints", state, keep=3)
    metrics.close()
    ledger.file.close()
    (run / "config.toml").write_text(dump_config(config))
    return run


def draw(rng: random.Random) -> Case:
    kind = rng.choice(("spoil", "spoil", "forge", "forge", "forge", "link", "fifo", "remove", "directory", "swap"))
    case: Case = {"kind": kind, "file": rng.choice(FILES), "seed": rng.randrange(2**32)}
    if kind == "forge":
        case["file"] = "checkpoints/step_2/run_state.json"
        case["times"] = rng.choice((1, 1, 2, 5))
        case["files"] = rng.choice((None, None, {"../outside": None}, {"/": None}, {"@outside@": None}))
    if kind == "link":
        case["to"] = rng.choice(DEVICES)
    return case


def change(run: Path, case: Case) -> None:
    path, rng = run / case["file"], random.Random(case["seed"])
    kind = case["kind"]
    if kind == "spoil":
        path.write_bytes(spoiled(rng, path.read_bytes()))
        return
    if kind == "forge":
        state = json.loads(path.read_text())
        state.pop("sum")
        for _ in range(case["times"]):
            state = changed(rng, state)
        if case["files"] is not None and isinstance(state, dict) and isinstance(state.get("parts"), dict):
            outside = str(run.parent / "outside")
            nothing = {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
            state["parts"]["files"] = {name.replace("@outside@", outside): nothing for name in case["files"]}
        if isinstance(state, dict):
            with contextlib.suppress(ValueError, TypeError):
                state["sum"] = json_sha256(state)
        path.write_text(json.dumps(state))
        return
    path.unlink()
    if kind == "link":
        to = str(run.parent / "outside") if case["to"] == "outside" else case["to"]
        path.symlink_to(to)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "swap":
        shutil.copyfile(base() / rng.choice(FILES), path)


def play(case: Case, folder: Path) -> Outcome:
    run, outside = folder / "run", folder / "outside"
    shutil.copytree(base(), run)
    outside.write_text('{"step": 1}\n')
    change(run, case)
    before = contents(run)
    options = [str(TINY), "--run-dir", str(run), "--resume", "--dry-run"]
    outcomes = [command("train", *options), outcome_of(lambda: resume(run)), outcome_of(lambda: rollouts(run))]
    if outside.read_text() != '{"step": 1}\n' or sorted(p.name for p in folder.iterdir()) != ["outside", "run"]:
        return Outcome(kind="unsound", words="a file outside the run directory was changed")
    after = contents(run)
    for name in before.keys() | after.keys():
        was, now = before.get(name), after.get(name)
        if was != now and not (
            name in (METRICS, LEDGER) and was is not None and now is not None and was.startswith(now)
        ):
            return Outcome(kind="unsound", words=f"{name} was changed")
    return together(outcomes)


def contents(run: Path) -> dict[str, bytes]:
    """Of all regular files, links not followed."""
    found = (p for p in run.rglob("*") if p.is_file() and not p.is_symlink())
    return {p.relative_to(run).as_posix(): p.read_bytes() for p in found}


def resume(run: Path) -> None:
    """What the driver of a resumed run takes from the directory."""
    config = load_config(TINY)
    plan: Any = SimpleNamespace(config=config, run_dir=run, checkpoints=run / "checkpoints")
    files = RunFiles(plan, Console(file=io.StringIO()))
    files.best = KeptBest("eval/accuracy")
    resumed = files.resume()
    if resumed is None:
        return
    state = resumed.state
    for name in ("buffer", "producer", "ledger"):
        if name not in state.parts:
            raise ValueError(f"no {name}")
    set_random_state(state.parts[RANDOM])
    ledger = Ledger(run / LEDGER)
    ledger.restore(state.parts["ledger"])
    buffer = DataBuffer(max_staleness=1, ledger=ledger)
    ready = {k.removeprefix("ready/"): g for k, g in state.groups.items()}
    buffer.restore(state.parts["buffer"], ready, find)


def find(prompt: str) -> Prompt:
    if prompt not in ("p1", "p2"):
        raise ValueError(f"there is no prompt {prompt!r}")
    return Prompt(id=prompt, token_ids=(1, 2), answer="")


def rollouts(run: Path) -> None:
    read_rollouts(run / "rollouts" / "step_2.jsonl", 2)


def run(cases: int, seed: int) -> dict[str, float | int | str]:
    return long_tier("run_dirs", cases, seed)
