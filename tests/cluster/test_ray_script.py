"""The script of `miles-like launch ray` on nodes of namespaces: Ray on each by its own address and with the cluster's
token, then the run.

The run is a stand-in that says what it is given. Not covered: GPUs, which Ray counts only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_like.cli import app
from tests.support.cli_runner import CliRunner
from tests.support.namespaces import ROOT, Cluster, nodes

pytestmark = pytest.mark.long(beside="tests/miles_like/launch/test_launch_layout.py")
RUN = '#!/bin/bash\necho "given: $*"\n'
OPTIONS = ("--join-s", "120", "--temp-dir", "/tmp/ray", "--ray-start", "object-store-memory=80000000")
SETTINGS = ("--set", "cluster.nodes=2", "--set", "cluster.gpus_per_node=8", "--set", "cluster.env={HF_TOKEN=''}")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with nodes(2, hosts=["hostile", "good"], work=tmp_path_factory.mktemp("n")) as made:
        yield made


def test_the_commands_of_the_script_start_a_cluster_and_the_run(cluster: Cluster, tmp_path: Path) -> None:
    own = tmp_path / "environment" / "bin"
    own.mkdir(parents=True)
    real = {name: f'#!/bin/sh\nexec {Path(sys.executable).with_name(name)} "$@"\n' for name in ("ray", "python")}
    for name, text in {**real, "miles-like": RUN}.items():
        (own / name).write_text(text)
        (own / name).chmod(0o755)
    out, run_dir = tmp_path / "launch.sh", tmp_path / "run"
    given = ["--run-dir", str(run_dir), "--environment", str(own.parent), "--out", str(out), *OPTIONS, *SETTINGS]
    done = CliRunner().invoke(app, ["launch", "ray", str(ROOT / "configs" / "tiny.toml"), *given])
    assert done.exit_code == 0, done.output
    bash = ["bash", str(out)]
    node = cluster[1].popen([*bash, "node"])  # it waits for the head
    cluster[0].run([*bash, "head"])
    assert node.wait(120) == 0
    token = tmp_path / "run.ray" / "token"
    assert len(token.read_text()) == 64 and token.stat().st_mode & 0o77 == 0
    without = cluster[0].run([*bash, "train"], check=False, env={"HF_TOKEN": ""})
    assert without.returncode == 1 and "HF_TOKEN" in without.stderr and "given" not in without.stdout
    trained = cluster[0].run([*bash, "train"], env={"HF_TOKEN": "a secret"}).stdout
    assert "2 nodes are in the Ray cluster" in trained and "--ray-address 192.168.77.1:6379" in trained
    assert "--resume" not in trained and "a secret" not in trained + out.read_text()
    run_dir.mkdir()
    assert "--resume" in cluster[0].run([*bash, "train"], env={"HF_TOKEN": "a secret"}).stdout
    stranger = [str(own / "python"), "-m", "miles_like.nodes.joined", "192.168.77.1:6379", "2", "1"]
    refused = cluster[1].run(stranger, check=False)
    assert refused.returncode == 1 and "token" in refused.stdout
    for k in (1, 0):
        cluster[k].run([*bash, "stop"])
    assert not token.parent.exists()
