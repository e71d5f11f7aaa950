"""What `miles-like init` writes: a configuration, its rows and its functions, which run as they are.

The files are in miles_like/templates; those whose names end with .txt are Python that the user's run imports.
"""

from __future__ import annotations

import difflib
from pathlib import Path

TEMPLATES = Path(__file__).resolve().parents[1] / "templates"
TASKS = {
    "qa": "questions with one answer, a custom reward, GRPO",
    "tool": "a policy that may ask a calculator before it answers",
    "agent": "a policy that acts several times, and an environment that answers",
    "distill": "a student whose sampled tokens a teacher scores",
    "sft": "supervised fine-tuning on given answers",
}
# folders that a task shares with others, beside its own: rows of sums, the reward for a right answer
_SHARED = {"qa": ("sums", "right"), "agent": ("sums",), "distill": ("sums", "right"), "sft": ("sums",)}


def files_of(task: str) -> dict[str, Path]:
    """Name -> the file that is copied. Raises ValueError for an unknown task, with the nearest."""
    if task not in TASKS:
        near = difflib.get_close_matches(task, TASKS, n=1, cutoff=0.0)[0]
        raise ValueError(f"--task {task!r}: did you mean {near!r}? Known: {', '.join(TASKS)}")
    found = [path for folder in (*_SHARED.get(task, ()), task) for path in (TEMPLATES / folder).iterdir()]
    return {path.name.removesuffix(".txt"): path for path in sorted(found, key=lambda path: path.name)}


def write_template(directory: Path, task: str) -> list[Path]:
    """Write the files of a task into `directory`, which is made; returns them. Raises ValueError, with nothing written,
    for an unknown task and for a directory that is not empty."""
    files = files_of(task)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        kind = "is not empty" if directory.is_dir() else "is a file"
        raise ValueError(f"{directory} {kind}: give a directory that does not exist, or an empty one")
    directory.mkdir(parents=True, exist_ok=True)
    for name, source in files.items():
        (directory / name).write_bytes(source.read_bytes())
    return [directory / name for name in files]
