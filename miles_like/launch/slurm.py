"""The batch script of Slurm, whose job continues the run by itself each time it is started."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from miles_like.launch.layout import Launch, check_temp_dir
from miles_like.launch.shell import assignments, body, of_nodes

REQUEUES = 100
_LIMIT = re.compile(r"(?:(\d+)-)?(\d{1,2}):(\d{2}):(\d{2})")
_MOST_S = 65535  # sbatch's limit of the seconds in --signal
_SUBMIT_S = 60.0
# options of sbatch that the script has: another value would not fit the rest of it
_OURS = {"job-name", "partition", "nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "exclusive", "time", "signal"}
_OURS |= {"requeue", "no-requeue", "open-mode", "output", "chdir", "array"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """Options of `miles-like launch slurm`."""

    partition: str | None = None
    time: str | None = None
    """[DAYS-]HH:MM:SS; None: the partition's limit."""
    stop_before: int | None = None
    """Seconds before the limit at which Slurm warns; None: `Launch.stop_s`."""
    requeues: int = REQUEUES
    interface: str = ""
    temp_dir: Path = Path("/tmp")
    directives: Sequence[str] = ()
    """Further options of sbatch, as account=NAME."""


def render_slurm(launch: Launch, options: SlurmOptions, origin: str, chdir: Path) -> str:
    """The script. origin: one line on where it is from. chdir: the directory that the run starts in. Raises ValueError
    for options that sbatch would refuse, or that would not do what they say."""
    if not options.partition:
        raise ValueError("--partition is missing: name the partition with the nodes of the run (sinfo lists them)")
    if options.requeues < 0:
        raise ValueError(f"--requeues {options.requeues} is negative: pass 0 for a job that is never queued again")
    stop_s = launch.stop_s if options.stop_before is None else options.stop_before
    _check_stop(stop_s, launch, options)
    logs = launch.run_dir.with_name(f"{launch.run_dir.name}-slurm-%j.out")  # a run directory that exists is continued
    directives = [
        f"job-name={launch.name}",
        f"partition={options.partition}",
        f"nodes={launch.nodes}",
        "ntasks-per-node=1",
        "exclusive",
        *([f"gpus-per-node={launch.gpus}"] if launch.gpus else []),
        *([f"time={options.time}"] if options.time else []),
        f"signal=B:TERM@{stop_s}",
        "requeue",
        "open-mode=append",
        f"output={logs}",
        f"chdir={chdir}",
        *_further(options.directives),
    ]
    for one in directives:
        if any(c.isspace() or c in "'\"\\#" for c in one):
            raise ValueError(f"--{one} has a blank or a quote, which a line of #SBATCH cannot have: pass another value")
    values = of_nodes(launch, interface=options.interface, temp_dir=check_temp_dir(options.temp_dir))
    values |= {"REQUEUES": options.requeues, "STOP_S": "" if launch.own_deadline else str(stop_s)}
    head = "".join(f"#SBATCH --{one}\n" for one in directives)
    return f"#!/bin/bash\n# {origin}\n{head}\n{assignments(values)}\n{body('node.sh')}\n{body('slurm.sh')}"


def submit(script: str) -> str:
    """Give the script to sbatch; return what it prints. Raises RuntimeError with its answer where it refuses."""
    try:
        done = subprocess.run(["sbatch"], input=script, capture_output=True, text=True, timeout=_SUBMIT_S, check=False)
    except FileNotFoundError:
        raise RuntimeError("--submit needs sbatch, which is not on this machine: submit the file elsewhere") from None
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"sbatch did not answer within {_SUBMIT_S:g} s: see whether the job is there (squeue)"
        ) from None
    if done.returncode:
        raise RuntimeError(f"sbatch refused the job: {' '.join((done.stderr or done.stdout).split())}")
    return done.stdout.strip()


def _check_stop(stop_s: int, launch: Launch, options: SlurmOptions) -> None:
    if not 0 <= stop_s <= _MOST_S:
        raise ValueError(
            f"the run is to be warned {stop_s} s before its limit, of which sbatch takes 0 to {_MOST_S}: lower "
            "checkpoint.grace_s, or pass --stop-before"
        )
    if options.time is None:
        return
    found = _LIMIT.fullmatch(options.time)
    if not found:
        raise ValueError(f"--time {options.time} is no limit of the form [DAYS-]HH:MM:SS: write 24 hours as 24:00:00")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    limit = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if limit <= stop_s + launch.join_s:
        raise ValueError(
            f"--time {options.time} is {limit} s, of which up to {launch.join_s} s are for nodes to join (--join-s), "
            f"and {stop_s} s for the run to save and end (checkpoint.grace_s, --stop-before): raise --time"
        )


def _further(directives: Sequence[str]) -> list[str]:
    for one in directives:
        name = one.partition("=")[0]
        if not re.fullmatch(r"[a-z][a-z-]+", name):
            raise ValueError(f"--sbatch {one} is no option of sbatch: write --sbatch account=NAME")
        if name in _OURS:
            raise ValueError(f"--sbatch {one} would replace --{name}, which the script sets itself: remove it")
    has_memory = any(one.startswith("mem") for one in directives)
    return [*([] if has_memory else ["mem=0"]), *directives]  # 0: all of the node's
