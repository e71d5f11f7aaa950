"""Saves and loads the state of the loop: everything that a resumed run needs in addition to the trainer's checkpoint.

    checkpoints/step_40/trainer/, critic/    written by the ranks
    checkpoints/step_40/groups.safetensors   samples that are waiting or unfinished (saved_groups.py)
    checkpoints/step_40/groups/              those of rollout workers, a file each
    checkpoints/step_40/run_state.json       the loop's state and the manifest of the folder: written last
    checkpoints/latest                       the text "step_40", written after it

Files are on disk before the name that makes them valid, and each name before the next, so that a process killed at any
moment leaves `latest` pointing at a complete checkpoint. Everything is verified before it is used: the manifest has a
checksum of itself, and the size and checksum of the files beside it (checkpoint_files.py).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from miles_like.checkpoint.run_state_schema import RunStateKeys, check_state
from miles_like.checkpoint.saved_groups import read_groups, write_groups
from miles_like.hf.checkpoint import sync_path
from miles_like.limits.regular_files import MIB, is_inner_name, read_json, read_regular
from miles_like.storage.checkpoint_files import (
    DamagedError,
    check_files,
    file_facts,
    json_sha256,
    sync_tree,
    write_text,
)
from miles_like.storage.completion import file_sha256
from miles_like.storage.fencing import later_start
from miles_like.types import Json, SampleGroup

STATE_FILE = "run_state.json"
GROUPS_FILE = "groups.safetensors"
GROUPS_FOLDER = "groups"  # of rollout workers: a file of each
LATEST = "latest"
FORMAT = 2
HELD = "held_groups"  # the part of the state with the files of the rollout workers: name -> SHA-256
STATE_BYTES, LATEST_BYTES = 256 * MIB, 4096  # largest files that are read
REMOVED = ".removed"  # suffix of a folder that is being deleted


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The loop's position at a step boundary: one step is complete and the next has not begun."""

    step: int  # optimizer steps done
    weight_version: int  # published last
    tokens_total: int  # response tokens trained
    parts: Mapping[str, Json] = field(default_factory=dict)  # name of a component of the loop -> its state
    groups: Mapping[str, SampleGroup] = field(default_factory=dict)  # key -> samples that are not trained yet
    epoch: int | None = None  # of the run directory, in which it was written; None: it had none

    def __post_init__(self) -> None:
        for name in ("step", "weight_version", "tokens_total"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"run state has {name} = {value!r}: expected an integer of at least 0")


def step_folder(checkpoints: Path, step: int) -> Path:
    """The folder of the checkpoint of `step`."""
    return checkpoints / f"step_{step}"


def empty_folder(checkpoints: Path, step: int) -> Path:
    """`step_folder` for a trainer about to save, after deleting a leftover of a run that was resumed from an earlier
    step. Not created. Raises ValueError when it is the checkpoint to resume from."""
    folder = step_folder(checkpoints, step)
    if folder.name == _latest_name(checkpoints):
        raise ValueError(
            f"{folder} is the latest checkpoint and would be overwritten: pass --resume to continue, or --fresh "
            "to start again"
        )
    if folder.exists():
        _remove(folder)
    return folder


def clear_unfinished(checkpoints: Path) -> None:
    """Delete folders that a killed run left unfinished or partly deleted. Call it only while no save is in progress."""
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
    """Complete the checkpoint of `state.step`, point `latest` at it, and delete all checkpoints but the last `keep`,
    those whose step is a multiple of `every`, and that of step `best`.

    Call it after the trainer has saved into `step_folder`. Returns that folder. Raises ValueError for keep < 1, or for
    groups that cannot be stored.
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
        "files": file_facts(folder, but=STATE_FILE),
        **({} if state.epoch is None else {"epoch": state.epoch}),
    }
    write_text(folder / STATE_FILE, json.dumps({**content, "sum": json_sha256(content)}) + "\n")
    _point(checkpoints, folder)
    # folders of later steps are leftovers of a run that was resumed from an earlier step
    done = sorted(n for n in _steps(checkpoints) if n <= state.step)
    for n in done[:-keep]:
        if not (every and n % every == 0) and n != best:
            _remove(step_folder(checkpoints, n))
    return folder


def load_latest(checkpoints: Path, *, groups: bool = True) -> tuple[Path, RunState] | None:
    """The folder that `latest` names and its state; None without any checkpoint. groups: as of `load`.

    Raises ValueError naming a damaged file and the newest complete checkpoint before it, also for one that a process
    has written which a later start had replaced.
    """
    folder = latest_folder(checkpoints)
    if folder is None:
        return None
    with suggesting_earlier_checkpoint(folder):
        state = load(folder, groups=groups)
        _check_epoch(checkpoints.parent, state)
    return folder, state


def latest_folder(checkpoints: Path) -> Path | None:
    """The folder that `latest` names, not verified; None without any checkpoint. Raises ValueError when `latest` is
    missing or damaged."""
    return _latest(checkpoints, kept_steps(checkpoints))


def go_back(checkpoints: Path, step: int) -> None:
    """Make `latest` name the checkpoint of `step`; later ones become leftovers. Raises ValueError for a step without a
    checkpoint, and as `load_latest` does, before anything is changed."""
    check_kept(checkpoints, step)
    with suggesting_earlier_checkpoint(step_folder(checkpoints, step)):
        state = load(step_folder(checkpoints, step))
        _check_epoch(checkpoints.parent, state)
    _point(checkpoints, step_folder(checkpoints, step))


def _check_epoch(run_dir: Path, state: RunState) -> None:
    """Raises DamagedError for a checkpoint of an epoch of the run after which another one began before its step."""
    later = None if state.epoch is None else later_start(run_dir, state.epoch, state.step)
    if later is not None:
        raise DamagedError(
            f"checkpoint step_{state.step} is of epoch {state.epoch}, but epoch {later[0]} of the run began from step "
            f"{later[1]}: a process that was stopped or cut off has written it, or the run went back before it"
        )


def check_kept(checkpoints: Path, step: int) -> None:
    """Raises ValueError, listing the existing checkpoints, when there is none of `step`."""
    kept = kept_steps(checkpoints)
    if step not in kept:
        others = f"kept are the checkpoints of steps {', '.join(map(str, kept))}" if kept else f"{checkpoints} has none"
        raise ValueError(f"--from-step {step}: the checkpoint of that step was not kept: {others}")


def load(folder: Path, *, groups: bool = True) -> RunState:
    """The state in a checkpoint folder. groups: read the samples; otherwise rollout workers do, from `group_files`.
    Raises DamagedError, a ValueError, naming a missing or damaged file."""
    found = _manifest(folder)
    check_files(folder, found["files"])
    try:
        return RunState(
            step=found["step"],
            weight_version=found["weight_version"],
            tokens_total=found["tokens_total"],
            parts=found["parts"],
            groups=_groups(folder, found["parts"]) if groups else {},
            epoch=found.get("epoch"),
        )
    except ValueError as e:
        raise DamagedError(f"checkpoint {folder.name} is damaged: {e}") from e


def group_files(folder: Path, parts: Mapping[str, Json]) -> dict[Path, str | None]:
    """The files with the samples of a checkpoint, and their SHA-256; None: `load` has verified it. Raises DamagedError
    for a file outside of the folder."""
    held = parts.get(HELD, {})
    files: dict[Path, str | None] = {folder / GROUPS_FILE: None}
    assert isinstance(held, Mapping), "checked by the schema"
    if wrong := [name for name in held if not is_inner_name(name)]:
        raise DamagedError(f"checkpoint {folder.name} is damaged: it lists {wrong[0]!r}, which is not a path inside it")
    return files | {folder / name: str(sha256) for name, sha256 in held.items()}


def _groups(folder: Path, parts: Mapping[str, Json]) -> dict[str, SampleGroup]:
    out: dict[str, SampleGroup] = {}
    for path, sha256 in group_files(folder, parts).items():
        if sha256 is not None and file_sha256(path) != sha256:
            raise ValueError(f"{path} was changed after it was written")
        out |= read_groups(path)
    return out


def consumed_rows(state: RunState) -> int:
    """The number of rows of data.train that a supervised run has used, which is its parts["prompts"]."""
    rows = state.parts.get("prompts")
    if type(rows) is not int:
        raise DamagedError(f"the checkpoint of step {state.step} is damaged: parts.prompts has no number of rows")
    return rows


def require_parts(state: RunState, *names: str) -> None:
    """Raises DamagedError unless the state has all these parts."""
    if missing := [name for name in names if name not in state.parts]:
        raise DamagedError(f"the checkpoint of step {state.step} is damaged: {', '.join(missing)} is missing")


@contextmanager
def suggesting_earlier_checkpoint(folder: Path) -> Iterator[None]:
    """Context for reading a checkpoint: DamagedError becomes a ValueError that adds the option for resuming from the
    checkpoint before it."""
    try:
        yield
    except DamagedError as e:
        raise ValueError(f"{e}; {_earlier_checkpoint_hint(folder)}") from e


def kept_steps(checkpoints: Path) -> list[int]:
    """Steps of the checkpoints that have a manifest, ascending."""
    if not checkpoints.is_dir():
        return []
    return sorted(n for n in _steps(checkpoints) if (step_folder(checkpoints, n) / STATE_FILE).exists())


def _earlier_checkpoint_hint(folder: Path) -> str:
    step = int(folder.name.removeprefix("step_"))
    for n in reversed([n for n in kept_steps(folder.parent) if n < step]):
        try:
            load(step_folder(folder.parent, n))
        except DamagedError:
            continue
        return f"the latest complete checkpoint before it is that of step {n}: resume from it with --from-step {n}"
    return "no complete checkpoint precedes it: start again with --fresh"


def _manifest(folder: Path) -> RunStateKeys:
    """The content of run_state.json, verified, without format and sum."""
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
    if (now := json_sha256(found)) != stored and stored is not None:
        raise DamagedError(f"{broken} was changed: its SHA-256 is {now[:12]}, but {str(stored)[:12]} was written")
    version = found.pop("format")
    if version != FORMAT or stored is None:
        raise ValueError(
            f"{path} has format {version}, but this version of miles-like reads format {FORMAT}: resume with "
            "the version that wrote it"
        )
    try:
        state = check_state(found)
    except ValueError as e:
        raise DamagedError(f"{broken} has an invalid value: {e}") from None
    if folder.name != f"step_{state['step']}":
        raise DamagedError(
            f"{broken} belongs to step {state['step']}: the checkpoint was renamed or mixed with another"
        )
    return state


def _latest(checkpoints: Path, kept: list[int]) -> Path | None:
    pointer, name = checkpoints / LATEST, _latest_name(checkpoints)
    if name is None:
        if len(kept) > 1:
            raise ValueError(
                f"{pointer} is missing, but checkpoints of steps {', '.join(map(str, kept))} exist: resume from "
                f"one of them, for example with --from-step {kept[-1]}"
            )
        # the run was killed between completing its first checkpoint and writing `latest`
        return step_folder(checkpoints, kept[0]) if kept else None
    if not re.fullmatch(r"step_\d+", name):
        raise ValueError(
            f"{pointer} is damaged: it contains {name!r}, not step_N; "
            + (f"resume with --from-step {kept[-1]}" if kept else "start again with --fresh")
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
    """Delete a folder; it is renamed first, so that a partly deleted folder has no step's name."""
    gone = folder.with_name(folder.name + REMOVED)
    if gone.exists():
        shutil.rmtree(gone)
    folder.rename(gone)
    sync_path(folder.parent)
    shutil.rmtree(gone)


def _steps(checkpoints: Path) -> list[int]:
    found = (re.fullmatch(r"step_(\d+)", p.name) for p in checkpoints.iterdir() if p.is_dir())
    return [int(m[1]) for m in found if m]
