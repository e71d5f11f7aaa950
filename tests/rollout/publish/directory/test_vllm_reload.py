"""Law: a publication to vLLM servers is a pause that names its mode, one load of the directory, a dropped prefix cache,
the number of the version, and a resume; a failure leaves the servers paused.

Against recorded answers. Not covered: that a server computes with the weights (tests/vllm_cpu).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_like.types import NamedTensor
from rollout.config import PublishConfig
from rollout.publish.directory.disk_publisher import DiskPublisher, SharedDirectory
from rollout.publish.publication import PublishTarget
from tests.support.fake_vllm import FakeVLLM
from tests.support.refusals import refuses
from tests.support.tiny_models import tiny_qwen

WEIGHTS = [NamedTensor("model.embed_tokens.weight", torch.ones(4, 4)), NamedTensor("model.norm.weight", torch.ones(4))]


def publisher(servers: list[FakeVLLM], home: Path, **config: Any) -> DiskPublisher:
    made = PublishConfig.model_validate({"path": "disk", **config})
    target = PublishTarget(urls=tuple(s.url for s in servers), kind="vllm", spec=None, config=made, timeout_s=5.0)
    return DiskPublisher(target, SharedDirectory(path=home, hf_config=tiny_qwen(), copy_from=None))


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_the_order_of_requests(mode: str, tmp_path: Path) -> None:
    pause = {"retract": "/pause?mode=keep&clear_cache=true", "abort": "/pause?mode=abort&clear_cache=true"}[mode]
    with FakeVLLM() as a, FakeVLLM() as b:
        report = publisher([a, b], tmp_path, pause_mode=mode).publish(WEIGHTS, version=3)
    load = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "version_3")}}
    for server in (a, b):
        assert server.calls == [
            ("/weight_info", None),
            (pause, {}),
            ("/collective_rpc", load),
            ("/reset_prefix_cache", {}),
            ("/update_weight_version", {"new_version": "3"}),
            ("/weight_checker", {"action": "checksum"}),
            ("/resume", {}),
        ]
    (held,) = report.checksums
    assert report.version == 3 and held and json.loads((tmp_path / "version_3" / "config.json").read_text())


def test_without_verify_no_hashes_are_asked_for(tmp_path: Path) -> None:
    with FakeVLLM() as server:
        assert publisher([server], tmp_path, verify=False).publish(WEIGHTS, version=1).checksums == ()
    assert "/weight_checker" not in server.paths()


def test_servers_that_hold_different_weights_are_named(tmp_path: Path) -> None:
    with FakeVLLM() as a, FakeVLLM() as b:
        b.answers["/weight_checker"] = 200, {"checksums": {"dp0:pp0:pcp0:tp0:model.norm.weight": "1" * 64}}
        with refuses(RuntimeError, "version 1", a.url, b.url, "restart"):
            publisher([a, b], tmp_path).publish(WEIGHTS, version=1)
    assert "/resume" not in a.paths() + b.paths()


@pytest.mark.parametrize(
    ("path", "status", "answer"),
    [
        ("/collective_rpc", 500, {"error": {"message": "SafetensorError"}}),
        ("/reset_prefix_cache", 200, {"success": False}),
        ("/update_weight_version", 404, {"detail": "Not Found"}),
    ],
)
def test_a_failure_is_named_and_leaves_the_servers_paused(path: str, status: int, answer: Any, tmp_path: Path) -> None:
    """The next publication works."""
    with FakeVLLM() as server:
        usual, server.answers[path] = server.answers[path], (status, answer)
        pub = publisher([server], tmp_path)
        with refuses(RuntimeError, "version 1", server.url, path):
            pub.publish(WEIGHTS, version=1)
        assert server.paths()[-1] == path
        server.answers[path] = usual
        assert pub.publish(WEIGHTS, version=2).version == 2 and server.paths()[-1] == "/resume"
