"""Where no slices can be sent, one sentence says so: to servers that receive none when the configuration is read, and
of weights without shards before a server is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_like.config.load import load_config
from rollout.config import PublishConfig
from rollout.publish.publication import PublishTarget
from rollout.publish.reshard.member import Member
from rollout.publish.reshard.publisher import ReshardPublisher
from tests.support.refusals import refuses

TINY = Path(__file__).parents[4] / "configs" / "tiny.toml"


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_servers_that_receive_no_slices_are_refused(engine: str) -> None:
    with refuses(ValueError, "publish.path", "reshard", "disk"):
        load_config(TINY, ["publish.path=reshard", f"rollout.engine={engine}"])
    divided = load_config(TINY, ["publish.path=reshard", "rollout.embedded.tp_size=2"])
    assert divided.publish.path == "reshard"


def test_a_stream_of_whole_tensors_has_no_shards() -> None:
    config = PublishConfig(path="reshard")
    target = PublishTarget(urls=("http://127.0.0.1:1",), kind="embedded", spec=None, config=config)
    for publisher in (ReshardPublisher(target, ranks=2), Member(target, rank=1, ranks=2)):
        with refuses(TypeError, "publish.path", "reshard"):
            publisher.publish([], version=1)
