"""Where the loop stood: what it takes, beside the trainer's own checkpoint, to go on as if never stopped.

    checkpoints/step_40/trainer/, critic/    the ranks'
    checkpoints/step_40/groups.safetensors   samples that wait or are half done (saved_groups.py)
    checkpoints/step_40/run_state.json       this file's, and the manifest of the folder: written last
    checkpoints/latest                       the text "step_40", written after it

Everything is on disk before the name that makes it count, and every name before the next, so a process killed at any
moment leaves `latest` pointing at a whole checkpoint. What is read was checked: the manifest has a checksum of itself
and size and checksum of what is beside it (checkpoint_files.py).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_like.checkpoint_files import DamagedError, check_files, facts_of, sum_of, sync_tree, write_text
from miles_like.hf_checkpoint import sync_path
from miles_like.regular_files import MIB, read_json, read_regular
from miles_like.run_state_schema import check_state
from miles_like.saved_groups import read_groups, write_groups
from miles_like.types import Json, SampleGroup

STATE_FILE = "run_state.json"
GROUPS_FILE = "groups.safetensors"
LATEST = "latest"
FORMAT = 2
STATE_BYTES, LATEST_BYTES = 256 * MIB, 4096  # the most that is read
REMOVED = ".removed"  # of a folder that is being deleted: it has no step's name any more


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The loop's position at a step boundary: all that a step does is done, and nothing of the next has begun."""

    step: int  # optimizer steps done
    weight_version: int  # published last
    tokens_total: int  # response tokens trained
    parts: Mapping[str, Json] = field(default_factory=dict)  # where each part of the loop stood, by its name
    groups: Mapping[str, SampleGroup] = field(default_factory=dict)  # samples that are not trained yet, by a key

    def __post_init__(self) -> None:
        for name in ("step", "weight_version", "tokens_total"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"run state has {name} = {value!r}: want a whole number from 0")


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
        _remove(folder)
    return folder


def clear_unfinished(checkpoints: Path) -> None:
    """Remove what a killed run left half-written or half-deleted. Only while no save is under way."""
    if not checkpoints.is_dir():
        return
    for n in _steps(checkpoints):
        folder = step_folder(checkpoints, n)
        if not (folder / STATE_FILE).exists() and folder.name != _latest_name(checkpoints):
            shutil.rmtree(folder)
    for folder in checkpoints.glob(f"*{REMOVED}"):
        shutil.rmtree(folder)
    for temporary in checkpoints.glob("*.tmp"):
        temporary.unlink()


def save(checkpoints: Path, state: RunState, *, keep: int, every: int | None = None, best: int | None = None) -> Path:
    """Complete the checkpoint of `state.step`, point `latest` at it and remove all others but the last `keep`, those
    whose step `every` divides, and step `best`.

    Call it after the trainer has saved into `step_folder`. Returns that folder. Raises ValueError for keep < 1, or what
    cannot be stored.
    """
    if keep < 1:
        raise ValueError(f"checkpoint.keep {keep} must be at least 1")
    folder = step_folder(checkpoints, state.step)
    folder.mkdir(parents=True, exist_ok=True)
    write_groups(folder / GROUPS_FILE, state.groups)
    sync_tree(folder)
    content = {
        "format": FORMAT,
        "step": state.step,
        "weight_version": state.weight_version,
        "tokens_total": state.tokens_total,
        "parts": dict(state.parts),
        "files": facts_of(folder, but=STATE_FILE),
    }
    write_text(folder / STATE_FILE, json.dumps({**content, "sum": sum_of(content)}) + "\n")
    _point(checkpoints, folder)
    # Folders of later steps are leftovers of a run that was resumed from an earlier one.
    done = sorted(n for n in _steps(checkpoints) if n <= state.step)
    for n in done[:-keep]:
        if not (every and n % every == 0) and n != best:
            _remove(step_folder(checkpoints, n))
    return folder


def load_latest(checkpoints: Path) -> tuple[Path, RunState] | None:
    """The folder `latest` names and its state; None without any checkpoint. Raises ValueError naming a damaged file and
    the newest whole checkpoint before it."""
    folder = _latest(checkpoints, kept_steps(checkpoints))
    if folder is None:
        return None
    with or_an_earlier_one(folder):
        state = load(folder)
    return folder, state


def go_back(checkpoints: Path, step: int) -> None:
    """`latest` names the checkpoint of `step` from now on; those of later steps are leftovers. Raises ValueError for a
    step that is not there, and as `load_latest`; nothing is changed then."""
    check_kept(checkpoints, step)
    with or_an_earlier_one(step_folder(checkpoints, step)):
        load(step_folder(checkpoints, step))
    _point(checkpoints, step_folder(checkpoints, step))


def check_kept(checkpoints: Path, step: int) -> None:
    """Raises ValueError, listing those that are there, when there is no checkpoint of `step`."""
    there = kept_steps(checkpoints)
    if step not in there:
        told = f"there are {', '.join(map(str, there))}" if there else f"there is none in {checkpoints}"
        raise ValueError(f"--from-step {step}: no checkpoint of that step is kept, {told}")


def load(folder: Path) -> RunState:
    """The state in a checkpoint folder. Raises DamagedError, a ValueError, naming a missing or damaged file of it."""
    found = _manifest(folder)
    check_files(folder, found.pop("files"))
    try:
        return RunState(**found, groups=read_groups(folder / GROUPS_FILE))
    except ValueError as e:
        raise DamagedError(f"checkpoint {folder.name} is damaged: {e}") from e


def dealt(state: RunState) -> int:
    """Rows of data.train that were taken, where parts["prompts"] is that number."""
    rows = state.parts.get("prompts")
    if type(rows) is not int:
        raise DamagedError(f"the checkpoint of step {state.step} is damaged: it has no count of rows in parts.prompts")
    return rows


def require_parts(state: RunState, *names: str) -> None:
    """Raises DamagedError where the state has no part of one of these names."""
    if missing := [name for name in names if name not in state.parts]:
        raise DamagedError(f"the checkpoint of step {state.step} is damaged: it has no {', '.join(missing)}")


@contextmanager
def or_an_earlier_one(folder: Path) -> Iterator[None]:
    """Around the reading of a checkpoint: a damage is told with the option that resumes from the one before it."""
    try:
        yield
    except DamagedError as e:
        raise ValueError(f"{e}; {_offer(folder)}") from e


def kept_steps(checkpoints: Path) -> list[int]:
    """Of the checkpoints that have a manifest, ascending."""
    if not checkpoints.is_dir():
        return []
    return sorted(n for n in _steps(checkpoints) if (step_folder(checkpoints, n) / STATE_FILE).exists())


def _offer(folder: Path) -> str:
    step = int(folder.name.removeprefix("step_"))
    for n in reversed([n for n in kept_steps(folder.parent) if n < step]):
        try:
            load(step_folder(folder.parent, n))
        except DamagedError:
            continue
        return f"the newest whole one before it is step {n}: resume from it with --from-step {n}"
    return "no whole one is before it: start again with --fresh"


def _manifest(folder: Path) -> dict[str, Any]:
    """What run_state.json holds, checked, without format and sum."""
    path = folder / STATE_FILE
    broken = f"checkpoint {folder.name} is damaged: {path}"
    try:
        found = read_json(path, STATE_BYTES)
    except FileNotFoundError:
        raise DamagedError(f"{broken} is missing") from None
    except ValueError as e:
        raise DamagedError(f"{broken} cannot be read ({e})") from e
    if not isinstance(found, dict) or "format" not in found:
        raise DamagedError(f"{broken} holds {sorted(found) if isinstance(found, dict) else type(found).__name__}")
    stored = found.pop("sum", None)
    if (now := sum_of(found)) != stored and stored is not None:
        raise DamagedError(f"{broken} was changed: its SHA-256 is {now[:12]}, it says {str(stored)[:12]}")
    version = found.pop("format")
    if version != FORMAT or stored is None:
        raise ValueError(
            f"{path} is of format {version}, this program reads {FORMAT}: resume with the one that wrote it"
        )
    try:
        check_state(found)
    except ValueError as e:
        raise DamagedError(f"{broken} holds what no run writes: {e}") from None
    if folder.name != f"step_{found['step']}":
        raise DamagedError(f"{broken} says step {found['step']}: the checkpoint was moved or mixed")
    return found


def _latest(checkpoints: Path, there: list[int]) -> Path | None:
    pointer, name = checkpoints / LATEST, _latest_name(checkpoints)
    if name is None:
        if len(there) > 1:
            raise ValueError(
                f"{pointer} is missing, checkpoints of steps {', '.join(map(str, there))} are there: resume from one "
                f"with --from-step {there[-1]}"
            )
        # the run was killed after its first checkpoint was whole, before it was named
        return step_folder(checkpoints, there[0]) if there else None
    if not re.fullmatch(r"step_\d+", name):
        raise ValueError(
            f"{pointer} is damaged: it holds {name!r}, not step_N; "
            + (f"resume with --from-step {there[-1]}" if there else "start again with --fresh")
        )
    return checkpoints / name


def _latest_name(checkpoints: Path) -> str | None:
    pointer = checkpoints / LATEST
    if not pointer.exists():
        return None
    return read_regular(pointer, LATEST_BYTES).decode("utf-8", "replace").strip()


def _point(checkpoints: Path, folder: Path) -> None:
    write_text(checkpoints / LATEST, folder.name + "\n")


def _remove(folder: Path) -> None:
    """Renamed first: a folder that is half deleted has no step's name."""
    gone = folder.with_name(folder.name + REMOVED)
    if gone.exists():
        shutil.rmtree(gone)
    folder.rename(gone)
    sync_path(folder.parent)
    shutil.rmtree(gone)


def _steps(checkpoints: Path) -> list[int]:
    found = (re.fullmatch(r"step_(\d+)", p.name) for p in checkpoints.iterdir() if p.is_dir())
    return [int(m[1]) for m in found if m]
