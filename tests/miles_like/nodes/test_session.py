"""Ray's authentication: a run's own Ray has a token that the run made, a cluster's is its owner's and stays as it is.

That a stranger is refused in the middle of a run is tests/e2e/test_pipeline.py.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray

from miles_like.nodes.session import start_ray, stop_ray
from tests.support.refusals import check_refusal, refuses

CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
JOINS = """
import os, sys
from miles_like.nodes.session import start_ray, stop_ray
def ray_s(): return {k: v for k, v in os.environ.items() if k.startswith("RAY_AUTH")}
before = ray_s()
try:
    start_ray(sys.argv[1])
except ValueError as e:
    print("refused:", e)
    sys.exit(3)
import ray
print("joined", ray.get(ray.remote(num_cpus=0)(lambda: 7).remote()), ray_s() == before)
stop_ray()
"""


def clean(**more: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | more


def listeners() -> set[tuple[int, str, int]]:
    """Process, address and port of all that this process and its children listen on."""
    here = psutil.Process()
    return {
        (process.pid, c.laddr.ip.removeprefix("::ffff:"), c.laddr.port)
        for process in (here, *here.children(recursive=True))
        for c in process.net_connections(kind="inet")
        if c.status == psutil.CONN_LISTEN
    }


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, dict[str, str]]]:
    """Its address, and the variables that open it."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], env=clean(**token), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    yield process.stdout.readline().strip(), token
    process.stdin.close()
    process.wait(60)


def joined(address: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", JOINS, address], env=env, capture_output=True, text=True, timeout=200)


@pytest.mark.long(beside="tests/e2e/test_pipeline.py")
def test_a_cluster_s_own_token_is_respected(cluster: Any, tmp_path: Any) -> None:
    """With it the cluster is joined, and this process's variables stay; without it, or with another, one sentence."""
    address, token = cluster
    done = joined(address, clean(**token))
    assert done.stdout.splitlines()[-1:] == ["joined 7 True"], done.stdout + done.stderr[-2000:]
    elsewhere = {"HOME": str(tmp_path)}  # where no ~/.ray/auth_token is
    for other in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        done = joined(address, clean(**elsewhere, **other))
        assert done.returncode == 3, done.stdout + done.stderr[-2000:]
        check_refusal(done.stdout, address, "RAY_AUTH_TOKEN", unrecorded="the address is the machine's own")


def test_what_was_set_before_a_local_ray_is_set_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also RAY_AUTH_MODE = disabled, which does not reach its processes or other clusters of this process."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    made, token_hex = [], secrets.token_hex
    monkeypatch.setattr(secrets, "token_hex", lambda n: made.append(token_hex(n)) or made[-1])
    others = listeners()  # the cluster's are this process's children too
    start_ray(None)
    try:
        assert os.environ["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" not in os.environ
        environment = ray.get(ray.remote(num_cpus=0)(lambda: dict(os.environ)).remote())
        assert environment["RAY_AUTH_MODE"] == "token" and len(environment["RAY_AUTH_TOKEN"]) == 64
        assert environment["RAY_AUTH_TOKEN"] in made
        assert {address for _, address, _ in listeners() - others} == {"127.0.0.1"}
    finally:
        stop_ray()
    assert os.environ["RAY_AUTH_MODE"] == "disabled" and "RAY_AUTH_TOKEN" not in os.environ
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in os.environ


def test_a_ray_that_does_not_start_in_time_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray raises a plain Exception for it."""

    def late(**_: Any) -> None:
        raise Exception("The current node timed out during startup. This could happen because\nof many things")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", late)
    with refuses(RuntimeError, "The current node timed out", "--ray-address"):
        start_ray(None)
    assert "RAY_AUTH_TOKEN" not in os.environ
