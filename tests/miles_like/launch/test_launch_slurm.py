"""The batch script has the configuration's nodes and GPUs and is valid; what sbatch would refuse, or what would replace
a part of the script, is refused before.

Not covered: what the script does, which tests/cluster/test_slurm.py runs.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from miles_like.launch.slurm import SlurmOptions, render_slurm
from tests.support.launched import planned
from tests.support.refusals import refuses


def rendered(*overrides: str, chdir: Path = Path("/shared"), **options: Any) -> str:
    return render_slurm(planned(*overrides), SlurmOptions(**({"partition": "gpu"} | options)), "of a test", chdir)


def directives(text: str) -> Sequence[str]:
    return [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_the_script_asks_for_the_nodes_of_the_configuration() -> None:
    text = rendered("checkpoint.grace_s=600", time="1-00:00:00", directives=["account=team"])
    assert text.startswith("#!/bin/bash\n# of a test\n#SBATCH --job-name=deepseek-v3-fp8\n")
    want = (
        "partition=gpu nodes=16 ntasks-per-node=1 exclusive gpus-per-node=8 time=1-00:00:00 signal=B:TERM@670 requeue"
    )
    assert {*want.split(), "open-mode=append", "chdir=/shared", "mem=0", "account=team"} <= set(directives(text))
    assert "output=/shared/run-slurm-%j.out" in directives(text)  # beside the run directory, which must not exist yet
    assert "\nSTOP_S=670\n" in text and "\nSTOP_S=''\n" in rendered("checkpoint.deadline_s=3600")
    without = directives(rendered("cluster.gpus_per_node=0", "cluster.colocate=true", directives=["mem-per-cpu=2G"]))
    assert not [one for one in without if one.startswith(("gpus", "time", "mem=")) or "=0" in one]


@pytest.mark.slow
def test_values_are_quoted_for_the_shell() -> None:
    text = rendered("data.prompt_key='$(touch /tmp/x) plain'")
    script = "\n".join(
        [line for line in text.splitlines() if line.startswith("TRAIN=")] + ['printf "%s|" "${TRAIN[@]}"']
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("|") == [*planned("data.prompt_key='$(touch /tmp/x) plain'").train, ""]


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"partition": None}, ("--partition", "sinfo")),
        ({"time": "24h"}, ("--time", "24h", "[DAYS-]HH:MM:SS")),
        ({"time": "00:11:00"}, ("--time", "00:11:00", 660, 600, 90)),
        ({"stop_before": 70000}, (70000, 65535, "--stop-before", "checkpoint.grace_s")),
        ({"requeues": -1}, ("--requeues", -1)),
        ({"directives": ["nodes=2"]}, ("--sbatch", "nodes=2", "--nodes")),
        ({"directives": ["-A=x"]}, ("--sbatch", "-A=x", "account=NAME")),
        ({"directives": ["comment=two words"]}, ("--comment=two words", "#SBATCH")),
        ({"chdir": Path("/with blank")}, ("--chdir=/with blank", "#SBATCH")),
    ],
)
def test_what_sbatch_would_refuse_is_refused(options: dict[str, Any], facts: tuple[object, ...]) -> None:
    with refuses(ValueError, *facts):
        rendered(**options)
