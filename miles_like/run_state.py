"""Where the loop stood: what it takes, beside the trainer's own checkpoint, to go on as if never stopped.

    checkpoints/step_40/...              the trainer's
    checkpoints/step_40/run_state.json   this file's
    checkpoints/latest                   the text "step_40", written last, in one rename

A process killed at any moment leaves `latest` pointing at a whole checkpoint: the folder is filled first.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path

STATE_FILE = "run_state.json"
LATEST = "latest"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The loop's position after a step."""

    step: int  # optimizer steps done
    weight_version: int  # published last
    prompt_cursor: int  # prompts taken from the source and trained or discarded
    tokens_total: int  # response tokens trained

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if type(value) is not int or value < 0:
                raise ValueError(f"run state has {f.name} = {value!r}: want a whole number from 0")


def step_folder(checkpoints: Path, step: int) -> Path:
    """Where the trainer of `step` saves."""
    return checkpoints / f"step_{step}"


def empty_folder(checkpoints: Path, step: int) -> Path:
    """`step_folder`, for a trainer about to save, with nothing in it: what lies there is a leftover of a run that was
    resumed from an earlier step. Not created. Raises ValueError when it is the checkpoint to resume from."""
    folder = step_folder(checkpoints, step)
    if folder.name == _latest_name(checkpoints):
        raise ValueError(f"{folder} is the latest checkpoint and would be overwritten: use --resume or --fresh")
    if folder.exists():
        shutil.rmtree(folder)
    return folder


def clear_unfinished(checkpoints: Path) -> None:
    """Remove what a killed run left half-written. Only while no save is under way."""
    if not checkpoints.is_dir():
        return
    for n in _steps(checkpoints):
        folder = step_folder(checkpoints, n)
        if not (folder / STATE_FILE).exists() and folder.name != _latest_name(checkpoints):
            shutil.rmtree(folder)
    for temporary in checkpoints.glob("*.tmp"):
        temporary.unlink()


def save(checkpoints: Path, state: RunState, *, keep: int) -> Path:
    """Complete the checkpoint of `state.step`, point `latest` at it and remove all but the last `keep`.

    Call it after the trainer has saved into `step_folder`. Returns that folder. Raises ValueError for keep < 1.
    """
    if keep < 1:
        raise ValueError(f"checkpoint.keep {keep} must be at least 1")
    folder = step_folder(checkpoints, state.step)
    folder.mkdir(parents=True, exist_ok=True)
    _write_atomically(folder / STATE_FILE, json.dumps({"format": FORMAT, **asdict(state)}, indent=1) + "\n")
    _write_atomically(checkpoints / LATEST, folder.name + "\n")
    # Folders of later steps are leftovers of a run that was resumed from an earlier one.
    done = sorted(n for n in _steps(checkpoints) if n <= state.step)
    for n in done[:-keep]:
        shutil.rmtree(step_folder(checkpoints, n))
    return folder


def load_latest(checkpoints: Path) -> tuple[Path, RunState] | None:
    """The folder `latest` names and its state; None without `latest`. Raises ValueError naming a damaged file."""
    pointer, name = checkpoints / LATEST, _latest_name(checkpoints)
    if name is None:
        return None
    if not re.fullmatch(r"step_\d+", name):
        raise ValueError(f"{pointer} holds {name!r}, not step_N: write the name of a folder beside it, or use --fresh")
    return checkpoints / name, load(checkpoints / name)


def load(folder: Path) -> RunState:
    """The state in a checkpoint folder. Raises ValueError naming a missing or damaged file."""
    path = folder / STATE_FILE
    if not path.exists():
        raise ValueError(f"{path} is missing: the checkpoint is not whole; point {LATEST} at another, or use --fresh")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"{path} is damaged ({e}): point {LATEST} at another checkpoint, or use --fresh") from e
    want = {"format", *(f.name for f in fields(RunState))}
    if not isinstance(found, dict) or set(found) != want:
        keys = sorted(found) if isinstance(found, dict) else type(found).__name__
        raise ValueError(f"{path} is damaged: it holds {keys}, want {sorted(want)}")
    version = found.pop("format")
    if version != FORMAT:
        raise ValueError(
            f"{path} is of format {version}, this program reads {FORMAT}: resume with the one that wrote it"
        )
    try:
        state = RunState(**found)
    except ValueError as e:
        raise ValueError(f"{path} is damaged: {e}") from e
    if folder.name != f"step_{state.step}":
        raise ValueError(f"{path} says step {state.step}, but lies in {folder.name}: the checkpoint was moved or mixed")
    return state


def _latest_name(checkpoints: Path) -> str | None:
    pointer = checkpoints / LATEST
    return pointer.read_text(encoding="utf-8").strip() if pointer.exists() else None


def _steps(checkpoints: Path) -> list[int]:
    found = (re.fullmatch(r"step_(\d+)", p.name) for p in checkpoints.iterdir() if p.is_dir())
    return [int(m[1]) for m in found if m]


def _write_atomically(path: Path, text: str) -> None:
    """Under a temporary name, to disk, then renamed: a reader sees the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)  # the rename itself reaches the disk with its folder
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
