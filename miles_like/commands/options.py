"""Options that several commands have, and the check of files that they write."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

FORMATS = "fp8, fp8-ue8m0, int4, mxfp8, mxfp4 or nvfp4"
SetOption = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="override section.key of the config")]
RunDirOption = Annotated[Path, typer.Option("--run-dir", help="run directory")]
ResumeOption = Annotated[bool, typer.Option("--resume/--no-resume", help="resume from the last checkpoint")]
FromStepOption = Annotated[
    int | None, typer.Option("--from-step", metavar="N", help="resume from the checkpoint of step N, not the last")
]
FreshOption = Annotated[bool, typer.Option("--fresh/--no-fresh", help="redo complete stages")]
FuseOption = Annotated[bool, typer.Option("--fuse", help="decode FP8 while converting: no BF16 directory")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="print what would be done, touch nothing")]
RayOption = Annotated[str | None, typer.Option("--ray-address", help="join this Ray cluster")]
CacheOption = Annotated[
    Path | None,
    typer.Option("--cache-dir", help="outputs of the stages before training; default: cache beside the run directory"),
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="start a run that does not fit the memory of its devices by the plan")
]

KeyFileOption = Annotated[
    Path | None,
    typer.Option("--key-file", help="file of mode 0600 with the key; default: MILES_LIKE_SERVER_KEY"),
]


def check_writable(path: Path) -> None:
    """Raises ValueError, before the work begins, for a file that cannot be written. Leaves no file behind."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        path.touch()
        if not there:
            path.unlink()
    except OSError as e:
        raise ValueError(f"{path} cannot be written ({e.strerror}): give a file in a directory that can") from None
