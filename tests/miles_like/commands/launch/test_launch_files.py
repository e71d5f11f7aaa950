"""The command writes a launch to a file or standard output, replaces no file unasked, and leaves nothing of a refused
one; scripts are free of what shellcheck warns of; a node that does not come is named.

Not covered: what scripts do, which tests/cluster runs.
"""

from __future__ import annotations

import stat
import subprocess
import time
from pathlib import Path

import pytest

from miles_like.cli import app
from miles_like.nodes import joined
from miles_like.nodes.members import Node
from miles_like.nodes.session import NoClusterError
from tests.support.cli_runner import CliRunner, Result
from tests.support.debian import need_programs
from tests.support.launched import V3
from tests.support.refusals import check_refusal


def launch(form: str, *words: str) -> Result:
    return CliRunner().invoke(app, ["launch", form, str(V3), "--run-dir", "/shared/run", *words])


FORMS = {
    "slurm": ("--partition", "gpu"),
    "ray": (),
    "kubernetes": ("--image", "x", "--volume", "runs=/shared", "--in-image", str(V3.parent.absolute())),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_is_written_and_not_replaced_unasked(form: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    printed = launch(form, *FORMS[form])
    assert printed.exit_code == 0, printed.output
    assert launch(form, *FORMS[form], "--out", str(out)).stdout.startswith(f"-> {out}\nNext: ")
    assert out.read_text() == printed.stdout and out.read_text().endswith("\n")
    out.write_text("mine")
    refused = launch(form, *FORMS[form], "--out", str(out))
    assert refused.exit_code == 2 and out.read_text() == "mine"
    check_refusal(refused.stderr, "--out", str(out), "--overwrite", unrecorded="one sentence of three forms")
    assert launch(form, *FORMS[form], "--out", str(out), "--overwrite").exit_code == 0
    assert out.read_text() == printed.stdout and [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--out", "."], ("--out", ".", "directory")),
        (["--out", "no/such/file"], ("--out", "no/such/file", "no/such")),
        (["--overwrite"], ("--overwrite", "--out")),
    ],
)
def test_where_nothing_can_be_written_nothing_is_rendered(words: list[str], facts: tuple[str, ...]) -> None:
    refused = launch("ray", *words)
    assert refused.exit_code == 2 and not refused.stdout
    check_refusal(refused.stderr, *facts)


def test_a_refused_launch_leaves_no_file(tmp_path: Path) -> None:
    refused = launch("slurm", "--out", str(tmp_path / "out"))
    assert refused.exit_code == 2 and not list(tmp_path.iterdir())
    check_refusal(refused.stderr, "--partition")


def fake_sbatch(directory: Path, text: str) -> None:
    (directory / "sbatch").write_text(f"#!/bin/sh\n{text}\n")
    (directory / "sbatch").chmod(stat.S_IRWXU)


@pytest.mark.slow
def test_a_script_is_submitted_only_where_that_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    fake_sbatch(tmp_path, f"cat > {tmp_path}/given; echo Submitted batch job 7")
    text = launch("slurm", *FORMS["slurm"]).stdout
    assert not (tmp_path / "given").exists()
    done = launch("slurm", *FORMS["slurm"], "--submit")
    assert done.stdout == "Submitted batch job 7\n" and (tmp_path / "given").read_text() == text
    fake_sbatch(tmp_path, "echo 'sbatch: error: invalid partition specified: gpu' >&2; exit 1")
    refused = launch("slurm", *FORMS["slurm"], "--submit")
    assert refused.exit_code == 2
    check_refusal(refused.stderr, "sbatch", "partition", "gpu")


@pytest.mark.long(beside="tests/miles_like/commands/launch/test_launch_files.py")
@pytest.mark.slow
@pytest.mark.parametrize("form", ["slurm", "ray"])
def test_shellcheck_warns_of_nothing(form: str, tmp_path: Path) -> None:
    need_programs("shellcheck")
    out = tmp_path / "out.sh"
    assert launch(form, *FORMS[form], "--out", str(out)).exit_code == 0
    done = subprocess.run(["shellcheck", "--severity=warning", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_nodes_that_did_not_join_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    there = (Node(id="a", address="10.0.0.1", host="head", gpus=8, cores=1),)
    monkeypatch.setattr(joined, "living_nodes", lambda: there)
    assert joined.wait_until_joined(1, 5.0) is None
    assert joined.wait_until_joined(2, 0.0) == "1 of 2 nodes are in the Ray cluster after 0 s: head (10.0.0.1)"


def test_a_head_that_does_not_answer_yet_is_asked_again_and_one_that_refuses_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[Exception | None] = [NoClusterError("not yet"), NoClusterError("not yet"), None, ValueError("token")]

    def start(address: str) -> None:
        if (error := answers.pop(0)) is not None:
            raise error

    monkeypatch.setattr(joined, "start_ray", start)
    monkeypatch.setattr(joined, "_LOOK_EVERY_S", 0.0)
    joined.join("head:6379", time.monotonic() + 60.0)
    assert len(answers) == 1
    with pytest.raises(ValueError, match="token"):
        joined.join("head:6379", time.monotonic() + 60.0)
    answers.append(NoClusterError("late"))
    with pytest.raises(NoClusterError, match="late"):
        joined.join("head:6379", time.monotonic())
