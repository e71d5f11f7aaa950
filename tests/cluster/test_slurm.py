"""The script of `miles-like launch slurm` under munged, slurmctld and slurmd on nodes of namespaces.

A job is queued again after a warning of Slurm's, after a preemption and after the run's own deadline (status 75), each
start continues the run, and the job ends with the run's last step. Ray and the run are stand-ins that record how they
are started; in the long tier they are real, and the run is one that nothing stopped, bit for bit.

Not covered: GPUs, which Slurm counts only, cgroups, other versions of Slurm than Debian's.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from miles_like.cli import app
from tests.support.local_run import QUICK, TINY, Runs, untimed
from tests.support.namespaces import ROOT, Cluster, nodes
from tests.support.slurm import Slurm, slurm

NODES, GPUS = 2, 8
pytestmark = pytest.mark.long(beside="tests/miles_like/launch/test_launch_slurm.py")

# Of each start: its words and Slurm's environment, then what the words in `behave` say, one for each start. `wait`:
# saves at a SIGTERM and ends with 143.
RUN = """#!/bin/bash
[ "$1" != train ] && exit 2
shift
run_dir=$(sed 's/.*--run-dir \\([^ ]*\\).*/\\1/' <<<"$*")
starts=$(dirname "$run_dir")/starts
n=$(ls "$starts" | wc -l)
echo "$*" > "$starts/$n"
mkdir -p "$run_dir"
case $(sed -n "$((n + 1))p" "$(dirname "$run_dir")/behave") in
  wait)
    trap 'echo saved >> "$run_dir/saved"; exit 143' TERM
    while true; do sleep 0.1; done ;;
  again) exit 75 ;;
  fault) exit 2 ;;
esac
echo done > "$run_dir/done"
"""
# A head that listens, and a node that waits, until SIGTERM; the words of each are recorded by node.
RAY = """#!{python}
import os, socket, sys, time
from pathlib import Path
words, start = sys.argv[1:], os.environ.get("SLURM_RESTART_COUNT", "0")
Path({rays!r}, f"{{socket.gethostname()}}-{{start}}").write_text(" ".join([*words, os.environ["RAY_AUTH_TOKEN"]]))
if "--head" in words:
    (port,) = [word.partition("=")[2] for word in words if word.startswith("--port=")]
    server = socket.create_server(("", int(port)))
time.sleep(600)
"""
JOINED = """#!/bin/bash
[ "$*" = "-m miles_like.nodes.joined 192.168.77.1:6379 {nodes} 600" ] || exit 3
until [ "$(ls {rays}/*-"${{SLURM_RESTART_COUNT:-0}}" | wc -l)" = {nodes} ]; do sleep 0.1; done
"""
CONFIG = 'extends = "{root}/configs/tiny.toml"\n[cluster]\nnodes = {nodes}\ngpus_per_node = {gpus}\n'


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with nodes(NODES, hosts=["good", "hostile"], work=tmp_path_factory.mktemp("n")) as made:
        yield made


@pytest.fixture(scope="module")
def batch(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(cluster, tmp_path_factory.mktemp("slurm") / "own", gpus=GPUS) as made:
        yield made


def stand_ins(work: Path) -> Path:
    """An environment whose Ray and whose run are stand-ins."""
    (work / "starts").mkdir()
    (work / "rays").mkdir()
    own = work / "environment" / "bin"
    own.mkdir(parents=True)
    programs = {
        "miles-like": RUN,
        "ray": RAY.format(python=sys.executable, rays=str(work / "rays")),
        "python": JOINED.format(nodes=NODES, rays=work / "rays"),
    }
    for name, text in programs.items():
        (own / name).write_text(text)
        (own / name).chmod(0o755)
    return own.parent


def script(work: Path, environment: Path, *words: str) -> Path:
    """What the command writes for a run in `work`/run."""
    config = work / "config.toml"
    if not config.exists():
        config.write_text(CONFIG.format(root=ROOT, nodes=NODES, gpus=GPUS))
    out = work / "job.sh"
    given = ["--run-dir", str(work / "run"), "--partition", "main", "--environment", str(environment)]
    given += ["--temp-dir", "/tmp/ray", "--out", str(out)]
    done = CliRunner().invoke(app, ["launch", "slurm", str(config), *given, *words])
    assert done.exit_code == 0, done.output
    return out


def until(true: Callable[[], object], what: str, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, f"{what} after {limit_s:g} s"
        time.sleep(0.1)


def ended(batch: Slurm, job: str) -> bool:
    return batch.job(job)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")


def log(work: Path) -> str:
    return "\n".join(path.read_text() for path in work.glob("run-slurm-*.out"))


def test_a_job_is_queued_again_until_the_run_is_complete(batch: Slurm, tmp_path: Path) -> None:
    """Warned by Slurm at its first start; the second ends by the deadline, the third at the last step."""
    environment = stand_ins(tmp_path)
    (tmp_path / "behave").write_text("wait\nagain\n")
    job = batch.submit(str(script(tmp_path, environment, "--time", "1:00:00", "--set", "train.steps=9")))
    starts = tmp_path / "starts"
    until(lambda: (starts / "0").exists(), "the run was not started")
    shown = batch.job(job)
    assert (shown["NodeList"], shown["BatchHost"], shown["NumNodes"]) == ("node[0-1]", "node0", str(NODES))
    assert (shown["Partition"], shown["TresPerNode"], shown["TimeLimit"]) == ("main", f"gres:gpu:{GPUS}", "01:00:00")
    assert shown["Requeue"] == "1" and shown["OverSubscribe"] == "NO"
    batch.run("scancel", "--signal=TERM", "--batch", job)
    shown = batch.wait(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    assert (shown["JobState"], shown["Restarts"], shown["ExitCode"]) == ("COMPLETED", "2", "0:0"), log(tmp_path)
    assert (tmp_path / "run" / "done").exists() and (tmp_path / "run" / "saved").read_text() == "saved\n"
    first, *later = [(starts / str(k)).read_text().split() for k in range(3)]
    assert "--resume" not in first and all("--resume" in words for words in later)
    for words in (first, *later):
        assert words[0] == str(tmp_path / "config.toml") and "train.steps=9" in words
        assert words[words.index("--ray-address") + 1] == "192.168.77.1:6379"
        (left,) = [float(word.partition("=")[2]) for word in words if word.startswith("checkpoint.deadline_s=")]
        assert 3000 < left <= 3600 - 90 - 60
    check_ray(tmp_path, starts=3)


def check_ray(work: Path, starts: int) -> None:
    """Each node's Ray has its own address, also where its name is 127.0.1.1, and all of a start have one token."""
    tokens = set()
    for start in range(starts):
        head, node = [(work / "rays" / f"node{k}-{start}").read_text().split() for k in range(NODES)]
        assert {"start", "--head", "--port=6379", "--block"} <= set(head) and "--head" not in node
        assert "--address=192.168.77.1:6379" in node and head[-1] == node[-1] and re.fullmatch("[0-9a-f]{64}", head[-1])
        for k, words in enumerate((head, node)):
            assert {f"--node-ip-address=192.168.77.{k + 1}", f"--num-gpus={GPUS}"} <= set(words)
        tokens.add(head[-1])
    assert len(tokens) == starts


def test_a_fault_of_the_run_ends_the_job(batch: Slurm, tmp_path: Path) -> None:
    """It would only come again."""
    environment = stand_ins(tmp_path)
    (tmp_path / "behave").write_text("fault\n")
    job = batch.submit(str(script(tmp_path, environment)))
    shown = batch.wait(job, "COMPLETED", "FAILED", "CANCELLED")
    assert (shown["JobState"], shown["Restarts"], shown["ExitCode"]) == ("FAILED", "0", "2:0"), log(tmp_path)


def test_a_preempted_job_saves_and_goes_on_afterwards(batch: Slurm, tmp_path: Path) -> None:
    """Slurm sends SIGTERM to the steps, and not to the batch script."""
    environment = stand_ins(tmp_path)
    (tmp_path / "behave").write_text("wait\n")
    job = batch.submit(str(script(tmp_path, environment)))
    until(lambda: (tmp_path / "starts" / "0").exists(), "the run was not started")
    urgent = batch.submit("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 2")
    batch.wait(urgent, "COMPLETED")
    assert (tmp_path / "run" / "saved").read_text() == "saved\n", log(tmp_path)
    shown = batch.wait(job, "COMPLETED", "FAILED", "CANCELLED")
    assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", "1"), log(tmp_path)
    assert "--resume" in (tmp_path / "starts" / "1").read_text()


def test_a_cancelled_job_saves_and_is_not_queued_again(batch: Slurm, tmp_path: Path) -> None:
    environment = stand_ins(tmp_path)
    (tmp_path / "behave").write_text("wait\n")
    job = batch.submit(str(script(tmp_path, environment)))
    until(lambda: (tmp_path / "starts" / "0").exists(), "the run was not started")
    batch.run("scancel", job)
    shown = batch.wait(job, "CANCELLED")
    time.sleep(8.0)  # longer than a job that is queued again has to wait
    shown = batch.job(job)
    assert (shown["JobState"], shown["Restarts"]) == ("CANCELLED", "0"), log(tmp_path)
    assert len(list((tmp_path / "starts").iterdir())) == 1


STEPS = 10  # more than a machine does while Slurm looks for the next job
LIMIT_S = 1200.0  # of each part of a real run, which takes a minute on an idle machine
RAY_OPTIONS = ("--ray-start", "object-store-memory=80000000", "--ray-start", "num-cpus=2")
RUN_SETTINGS = (*QUICK, "parallel.dp=2", "parallel.ep=2", "rollout.servers=2", f"train.steps={STEPS}")


def test_a_real_run_that_is_preempted_is_the_run_that_was_not(cluster: Cluster, batch: Slurm, tmp_path: Path) -> None:
    """Metrics, samples and ledger, bit for bit, over Ray on both nodes. The steps get SIGTERM, and so all that Ray has
    started, unless it is out of reach."""
    (tmp_path / "home").mkdir()
    with Runs(tmp_path / "home") as runs:
        assert runs.run(tmp_path / "whole", RUN_SETTINGS) == 0
        model = (runs.home / "hf").resolve()
    (tmp_path / "config.toml").write_text(f'extends = "{TINY}"\n[cluster]\nnodes = {NODES}\n')
    settings = [*RUN_SETTINGS, f"model.path={model}", "model.make=false", f"cluster.stage_dir={cluster.disk}/local"]
    settings += [f"cache_dir={tmp_path}/cache", "checkpoint.grace_s=300.0", "cluster.timeout_s=300.0"]
    words = [word for setting in settings for word in ("--set", setting)]
    job = batch.submit(str(script(tmp_path, Path(sys.executable).parents[1], *RAY_OPTIONS, *words)))
    metrics, latest = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "checkpoints" / "latest"
    until(lambda: latest.exists() or ended(batch, job), "no checkpoint", LIMIT_S)
    urgent = batch.submit("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 2")
    batch.wait(urgent, "COMPLETED", limit_s=LIMIT_S)
    shown = batch.wait(job, "COMPLETED", "FAILED", "CANCELLED", limit_s=LIMIT_S)
    assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", "1"), log(tmp_path)
    assert "is saved, --resume continues" in log(tmp_path), log(tmp_path)
    for name in ("metrics.jsonl", "ledger.jsonl"):
        compared = untimed if name == "metrics.jsonl" else Path.read_bytes
        assert compared(tmp_path / "run" / name) == compared(tmp_path / "whole" / name)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
