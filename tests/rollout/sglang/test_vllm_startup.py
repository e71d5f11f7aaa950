"""Law: a vLLM server counts as ready once it is of the version that this project works with and its weights have the
number of the launch, and it listens on no wildcard address.

A program in place of vLLM's interpreter gives recorded answers. Not covered: vLLM itself (tests/vllm_cpu).
"""

from __future__ import annotations

import sys
from pathlib import Path

import httpx
import pytest

from rollout.config import RolloutConfig, VLLMFlags
from rollout.sglang.http_replies import RolloutError
from rollout.sglang.servers import ServerLaunch
from rollout.sglang.startup import launch_server
from tests.support.refusals import refuses

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
PROGRAM = """#!{python} -S
import sys, time
sys.path[:0] = [{root!r}]
from tests.support.fake_vllm import FakeVLLM
with FakeVLLM(port=int(sys.argv[sys.argv.index("--port") + 1])) as server:
    server.answers["/version"] = 200, {{"version": {version!r}}}
    server.answers["/calls"] = 200, server.calls
    time.sleep(60)
"""


def launch(home: Path, version: str, **how: object) -> ServerLaunch:
    program = home / "python"
    program.write_text(PROGRAM.format(python=sys.executable, root=str(ROOT), version=version))
    program.chmod(0o700)
    config = RolloutConfig(engine="vllm", vllm=VLLMFlags(python=str(program)), start_timeout_s=60)
    given = {"model_path": home / "model", "log_dir": home, "weight_version": 4, **how}
    return ServerLaunch(config=config, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu"])
def test_its_weights_have_the_number_of_the_launch(version: str, tmp_path: Path) -> None:
    """vLLM calls those that it starts with "default"."""
    with launch_server(launch(tmp_path, version)) as server:
        calls = httpx.get(server.url + "/calls", trust_env=False).json()
    assert ["/update_weight_version", {"new_version": "4"}] in calls


def test_another_version_ends_the_start(tmp_path: Path) -> None:
    with refuses(RolloutError, "vLLM 0.33.0", "0.32.0", "127.0.0.1", unrecorded="it quotes the log's folder"):
        launch_server(launch(tmp_path, "0.33.0"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_it_listens_on_no_wildcard_address(host: str, tmp_path: Path) -> None:
    """It has no authentication."""
    with refuses(ValueError, host, "authentication", "127.0.0.1"):
        launch_server(launch(tmp_path, "0.32.0", host=host, port=15999))


def test_it_is_started_on_one_node(tmp_path: Path) -> None:
    with refuses(ValueError, 2, "one node"):
        launch_server(launch(tmp_path, "0.32.0", nnodes=2, port=15999))
