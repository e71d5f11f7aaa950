"""Options that several commands have, and the check of files that they write."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup


class _PlainFlags:
    """Help shows a flag without a type: `--quiet`, not `--quiet <bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # of the command that this is mixed into
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_PlainFlags, TyperCommand):
    """A command of this program."""


class Group(_PlainFlags, TyperGroup):
    """A group of commands of this program."""


_AGAIN = "Continue or repeat a run"  # panel of the help
FORMATS = "fp8, fp8-ue8m0, int4, mxfp8, mxfp4 or nvfp4"
SetOption = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="override a configuration key, e.g. train.steps=10")
]
RunDirOption = Annotated[Path, typer.Option("--run-dir", help="run directory")]
ResumeOption = Annotated[
    bool,
    typer.Option("--resume/--no-resume", rich_help_panel=_AGAIN, help="continue from the latest checkpoint"),
]
FromStepOption = Annotated[
    int | None,
    typer.Option(
        "--from-step",
        metavar="N",
        rich_help_panel=_AGAIN,
        help="continue from the checkpoint of step N",
    ),
]
SuperviseOption = Annotated[
    bool,
    typer.Option(
        "--supervise",
        rich_help_panel=_AGAIN,
        help="start the driver again, and continue the run, where it is killed",
    ),
]
FreshOption = Annotated[
    bool,
    typer.Option(
        "--fresh/--no-fresh",
        rich_help_panel=_AGAIN,
        help="discard the run and repeat all its stages",
    ),
]
FuseOption = Annotated[
    bool,
    typer.Option(
        "--fuse",
        rich_help_panel="Stages before training",
        help="decode FP8 during conversion, without a BF16 copy on disk",
    ),
]
ProfileOption = Annotated[
    tuple[str, str] | None,
    typer.Option(
        "--profile",
        metavar="steps=FIRST:LAST ranks=R,R",
        help="profile these steps of these trainer ranks, e.g. --profile steps=3:5 ranks=0,7",
    ),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="validate and print the plan; changes nothing")]
ShowConfigOption = Annotated[
    bool, typer.Option("--show-config", help="with --dry-run: also the keys that differ from the defaults")
]
RayOption = Annotated[str | None, typer.Option("--ray-address", help="address of the Ray cluster to run on")]
CacheOption = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir",
        help="directory for the outputs of the stages before training; default: cache beside the run directory",
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="start even if the plan exceeds the devices' memory")]

KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        help="file (mode 0600) with the server's key; default: the environment variable MILES_LIKE_SERVER_KEY",
    ),
]


def profile_settings(given: tuple[str, str] | None) -> list[str]:
    """The overrides that `--profile` is. Raises ValueError for words of another form."""
    if given is None:
        return []
    words = dict(word.partition("=")[::2] for word in given)
    ranks = words.get("ranks", "").split(",")
    if set(words) != {"steps", "ranks"} or not all(rank.isdecimal() for rank in ranks):
        raise ValueError(f"--profile {' '.join(given)}: give steps and ranks, as --profile steps=3:5 ranks=0,7")
    return [f"trace.profile_steps={words['steps']!r}", f"trace.profile_ranks=[{', '.join(ranks)}]"]


def check_writable(path: Path) -> None:
    """Raises ValueError, before the work begins, for a file that cannot be written. Leaves no file behind."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        path.touch()
        if not there:
            path.unlink()
    except OSError as e:
        raise ValueError(f"{path} cannot be written ({e.strerror}): use a writable directory") from None
