"""Publications by path: closed forms, and published transfers.

Not covered: paths of which only the formula exists, beyond it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_bridge.families.registry import family_of
from miles_like.device_table import device
from miles_like.timing.engine import EngineSetup
from miles_like.timing.publish import Path as Route
from miles_like.timing.publish import PublishSetup, publish_time, served_bytes, tensors
from miles_like.timing.rates.calibration import (
    COMPRESSOR,
    DELTA_WIRE,
    HOST,
    HOST_MEMORY,
    MEMORY,
    NETWORK,
    NVLINK,
    ONE_ENCODER,
    ONE_WRITER,
    TENSOR,
)
from miles_like.timing.shape import model_shape

ROOT = Path(__file__).parents[3]
V3 = model_shape(json.loads((ROOT / "configs/deepseek_v3/config.json").read_text()))
LARGE = model_shape(json.loads((ROOT / "configs/qwen3_235b_a22b/config.json").read_text()))
SMALL = model_shape(json.loads((ROOT / "configs/qwen3_30b_a3b/config.json").read_text()))
H100 = device("H100")
FP8 = EngineSetup(device=H100, servers=4, tp=32, weight_bytes=1.0, expert_bytes=1.0)


def setup(path: Route, engine: EngineSetup = FP8, **more: object) -> PublishSetup:
    return PublishSetup(path=path, device=H100, ranks=128, engine=engine, **more)  # type: ignore[arg-type]


def test_served_bytes_are_those_of_the_published_checkpoint() -> None:
    """DeepSeek-V3's FP8 checkpoint without its draft layer: 688.6 GB with it, of which it takes 14 B parameters."""
    assert served_bytes(V3, FP8) == pytest.approx(673e9, rel=0.005)
    assert served_bytes(V3, replace(FP8, weight_bytes=2.0, expert_bytes=2.0)) == 2 * V3.parameters


def test_requests_in_json_send_115_terabytes_of_deepseek_v3() -> None:
    """4/3 bytes of base64 a byte, once for each of 32 ranks, to each of 4 servers, through one node's link."""
    found = publish_time(V3, setup("tensor")).terms
    body = served_bytes(V3, FP8) * 4 / 3 * 32
    assert body * 4 == pytest.approx(115e12, rel=0.01)
    assert found["requests"] == pytest.approx(body * 4 / (NETWORK * H100.inter))
    assert found["encoding"] == pytest.approx(body / ONE_ENCODER)
    assert publish_time(V3, setup("tensor")).decides == "encoding"


def test_handles_repeat_no_byte_for_a_server_s_ranks() -> None:
    """On one node, out of the host's memory: the model once over the sender's PCI Express, as fast as each reader takes
    it over its own. Where the one server has the sender's GPU, all readers share that GPU's links."""
    engines = [EngineSetup(device=H100, servers=1, tp=tp) for tp in (1, 4)]
    apart = [PublishSetup(path="tensor", device=H100, ranks=4, engine=engine) for engine in engines]
    name, nbytes = "gather, packing and opening", 2 * SMALL.parameters
    one, four = (publish_time(SMALL, setup).terms[name] for setup in apart)
    assert one == pytest.approx(max(nbytes / (HOST * H100.host), TENSOR * tensors(SMALL)), rel=1e-3)
    assert four == pytest.approx(max(one, 4 * nbytes / HOST_MEMORY), rel=1e-3)
    turns = replace(apart[1], ranks=8, engine=replace(engines[1], tp=8), colocated=True)
    gather = TENSOR * tensors(SMALL)
    assert publish_time(SMALL, turns).terms[name] == pytest.approx(max(gather, 7 * nbytes / (NVLINK * H100.intra)))
    assert "requests" in publish_time(SMALL, replace(turns, colocated=False)).terms  # eight and eight are two nodes
    assert publish_time(SMALL, turns).seconds < 0.1 * publish_time(SMALL, replace(turns, colocated=False)).seconds


def test_one_writer_and_many() -> None:
    one, many = publish_time(V3, replace(setup("disk"), ranks=1)), publish_time(V3, setup("disk"))
    assert one.terms["gather and writing"] == pytest.approx(served_bytes(V3, FP8) / ONE_WRITER)
    gather = publish_time(V3, setup("ipc")).terms["gather"]
    assert many.terms["gather and writing"] == max(gather, served_bytes(V3, FP8) / (128 * ONE_WRITER))
    assert many.terms["reading"] == one.terms["reading"] == pytest.approx(served_bytes(V3, FP8) / H100.disk)
    shared = publish_time(V3, setup("disk", disk=10e9))
    assert shared.terms["gather and writing"] == pytest.approx(served_bytes(V3, FP8) / 10e9)
    assert shared.terms["reading"] == pytest.approx(4 * served_bytes(V3, FP8) / 10e9)


# Bytes of BF16 that went from the trainer's ranks to the servers', and seconds. NeMo-RL, docs/guides/
# checkpoint-engine-refit.md: NIXL without expert shards, 256 to 32 GPUs. verl, docs/advance/fully_async.md.
SEEN = ((V3, 256, 32, 36.8), (LARGE, 64, 64, 23.7))


@pytest.mark.parametrize(("shape", "ranks", "gpus", "seen"), SEEN)
def test_whole_tensors_take_what_was_published(shape: object, ranks: int, gpus: int, seen: float) -> None:
    assert isinstance(shape, type(V3))
    engine = EngineSetup(device=H100, servers=gpus // 32, tp=32)
    found = publish_time(shape, PublishSetup(path="distributed", device=H100, ranks=ranks, engine=engine))
    assert found.seconds == pytest.approx(seen, rel=0.4)


def test_a_broadcast_is_bounded_by_its_sources_links() -> None:
    bf16 = replace(FP8, weight_bytes=2.0, expert_bytes=2.0)
    once = publish_time(V3, setup("distributed", bf16)).terms["gather and broadcast"]
    assert once == pytest.approx(2 * V3.parameters / (NETWORK * H100.inter), rel=0.001)
    more = publish_time(V3, setup("distributed", bf16, sources=8)).terms["gather and broadcast"]
    assert more < once
    # then the host's time for each tensor remains
    assert more == publish_time(V3, setup("ipc", bf16)).terms["gather"]


def test_pipeline_stages_gather_at_once() -> None:
    """As long as the gather takes longer than the broadcast of eight sources."""
    whole, half = (publish_time(V3, setup("distributed", sources=8, stages=n)).terms for n in (1, 2))
    assert half["gather and broadcast"] == pytest.approx(whole["gather and broadcast"] / 2)
    many = publish_time(V3, setup("distributed", sources=8, stages=1000)).terms["gather and broadcast"]
    assert many == pytest.approx(served_bytes(V3, FP8) / 8 / (NETWORK * H100.inter), rel=0.01)


def test_a_difference_costs_by_what_has_changed() -> None:
    """Nothing on the wire where nothing changes, and never more than the weights themselves."""
    full = publish_time(V3, setup("distributed", sources=8)).terms["gather and broadcast"]
    sent = [publish_time(V3, setup("delta", changed=x)).terms["broadcast"] for x in (0.0, 0.03, 1.0)]
    nbytes = served_bytes(V3, FP8) / (NETWORK * H100.inter)
    assert sent[0] < 1e-3 and sent[1] == pytest.approx(0.03 * DELTA_WIRE * nbytes, rel=0.001)
    assert sent[2] == pytest.approx(DELTA_WIRE * nbytes, rel=0.001) and sent[1] < full
    compressed = 2 * 0.03 * served_bytes(V3, FP8) / COMPRESSOR
    found = publish_time(V3, setup("delta", changed=0.03)).terms
    assert found["difference"] > compressed / 128 and found["loading"] > compressed / 32


def test_slices_are_received_by_all_ranks_at_once() -> None:
    found = publish_time(V3, setup("reshard")).terms
    assert found["slices"] == pytest.approx(served_bytes(V3, FP8) / 32 / (NETWORK * H100.inter))
    few = replace(setup("reshard"), ranks=8)  # then the senders' links are the narrower ones
    sent = 4 * served_bytes(V3, FP8) / 8
    assert publish_time(V3, few).terms["slices"] == pytest.approx(sent / (NETWORK * H100.inter))


def test_the_paths_stand_in_this_order_for_a_large_model() -> None:
    times = [publish_time(V3, setup(path)).seconds for path in ("tensor", "disk", "distributed", "reshard")]
    assert times == sorted(times, reverse=True) and times[0] > 1000 * times[-1]


def test_loading_reads_whole_tensors_and_writes_a_slice() -> None:
    found = publish_time(V3, setup("ipc")).terms["loading"]
    assert found == pytest.approx(served_bytes(V3, FP8) * (1 + 1 / 32) / (MEMORY * H100.hbm))


def test_tensors_are_counted_as_the_checkpoint_s_index_does() -> None:
    """Of the family tables: 18,867 of Qwen3-30B-A3B."""
    for name, shape in (("qwen3_30b_a3b", SMALL), ("deepseek_v3", V3), ("qwen3_235b_a22b", LARGE)):
        hf = json.loads((ROOT / f"configs/{name}/config.json").read_text())
        counted = sum(n for _, n in family_of(hf).bind(hf).kinds())
        assert tensors(shape) == pytest.approx(counted, rel=0.01)
