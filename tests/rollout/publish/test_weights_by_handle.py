"""Law: a server that opens a publisher's memory by a handle serves the bits that requests with the tensors give it.

With buckets of one module, of some and of all, for every family and in every kind of format. Why it must hold: the
handle carries no content that could be checked on arrival. A segment is opened on loopback only.

Not covered: stock SGLang (tests/sglang_cpu/test_weight_paths.py); CUDA memory (tests/gpu/test_handles_cuda.py); what
is refused of a description (tests/rollout/embedded/updates/test_segments.py).
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from rollout.embedded.server import handlers
from rollout.publish.publisher import TensorPublisher
from rollout.wire import endpoints
from tests.support.chosen import later
from tests.support.embedded_fixtures import served, service
from tests.support.published import FAMILIES, FORMATS, SIZES, Published, with_buckets_of
from tests.support.refusals import refuses

pytestmark = pytest.mark.slow
HERE = "tests/rollout/publish/test_weights_by_handle.py"
CASES = [(family, format) for family in FAMILIES for format in FORMATS]
FIRST = [("deepseek", "fp8"), ("qwen_moe", "int4"), ("glm", "bf16")]


def reported(url: str) -> dict[str, str]:
    reply = httpx.get(url + endpoints.CHECKSUM, trust_env=False).json()
    sums: dict[str, str] = reply["ranks"][0]["checksums"]
    return sums


@pytest.mark.parametrize("case", later(CASES, FIRST, HERE), ids="-".join)
def test_the_served_bits_are_those_of_requests_with_the_tensors(case: tuple[str, str], tmp_path: Path) -> None:
    model = Published(*case)
    with served(service(model.checkpoint(tmp_path / "hf"))) as url:
        model.publish(model.target([url]), 1, version=1)
        inline = reported(url)
        assert inline == model.sums(1)
        target = model.target([url], handles="memory")
        for version, size in enumerate(SIZES, 2):
            model.publish(model.target([url]), 0, version=version)
            assert reported(url) != inline
            report = model.publish(with_buckets_of(target, size), 1, version=version)
            assert reported(url) == inline, size
            assert report.bytes == sum(t.nbytes for t in model.encoded(1).values())
        info = httpx.get(url + endpoints.MODEL_INFO, trust_env=False).json()
        assert info["weight_version"] == str(version)


def test_a_segment_is_read_for_clients_on_this_host_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Published("qwen", "bf16")
    with served(service(model.checkpoint(tmp_path / "hf"))) as url:
        monkeypatch.setattr(handlers, "client_of", lambda request: "192.168.77.2")
        with refuses(RuntimeError, 1, "192.168.77.2", "loopback", "--resume"):
            TensorPublisher(model.target([url], handles="memory"), send=True).publish(model.weights(1), version=1)
        assert reported(url) == model.sums(0)
