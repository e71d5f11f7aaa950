"""A local Ray that the commands of several tests join: to start one takes six processes of Ray's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from miles_like.cluster.run_nodes import RunNodes
from miles_like.config.sections.cluster import ClusterConfig
from miles_like.nodes.reservation import reserve

STARTS = """
import secrets, sys
token = secrets.token_hex(32)
secrets.token_hex = lambda n: token
from miles_like.nodes.session import start_ray, stop_ray
start_ray(None)
import ray
print(ray.get_runtime_context().gcs_address, token, flush=True)
sys.stdin.read()
stop_ray()
"""


@contextmanager
def own_ray() -> Iterator[Mapping[str, str]]:
    """The variables with which a command joins it."""
    process = subprocess.Popen([sys.executable, "-c", STARTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        address, token = process.stdout.readline().split()
        yield {
            "RAY_ADDRESS": address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token,
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }
    finally:
        process.stdin.close()
        process.wait(60)


def this_node() -> RunNodes:
    """This machine, in the Ray that this process has started."""
    held = reserve(1, 0, run="a", when_busy="refuse", timeout_s=60, say=print)
    return RunNodes(nodes=held.nodes, facts=held.facts, cluster=ClusterConfig(), local=True)
