"""Simulated publications are never shorter than bytes over rate, never longer on faster links, and agree with the
closed forms of `publish_time` where both speak of the same transfer.

The simulation also counts what the closed forms leave out (the host's time for tensors, encoding, latency of buckets,
the first bucket's way, fixed seconds), so what is compared is the seconds of the resource that a term is about. Not
covered: whether the rates are right (test_weight_sync_rows.py compares with published transfers).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_bridge.config import ParallelConfig
from miles_like.device_table import Device, device
from miles_like.timing.engine import EngineSetup
from miles_like.timing.publish import Path as Route
from miles_like.timing.publish import PublishSetup, publish_time, served_bytes
from miles_like.timing.rates.calibration import CONTROL, ENCODER, NETWORK, NVLINK
from miles_like.timing.shape import model_shape
from miles_like.timing.weight_sync.paths import SyncSetup, synchronize
from miles_like.timing.weight_sync.pipeline import Timeline
from miles_like.timing.weight_sync.stream import Slot, publication
from quant.spec import QuantFormat, QuantSpec
from tests.support.refusals import refuses

HF: dict[str, Any] = json.loads((Path(__file__).parents[4] / "configs/qwen3_30b_a3b/config.json").read_text())
SHAPE = model_shape(HF)
H100 = device("H100")
FP8 = QuantSpec(format=QuantFormat.FP8)
LAYOUT = ParallelConfig(tp=4, pp=2, dp=8, ep=32)
SERVERS = EngineSetup(device=H100, servers=4, tp=16, ep=16, weight_bytes=1.0, expert_bytes=1.0)
WHOLE = 1 << 40  # bytes of a bucket: then the latency of few buckets counts
ROUTES: tuple[Route, ...] = ("ipc", "distributed", "disk", "delta", "reshard")
_SLOTS: dict[tuple[object, ...], list[Slot]] = {}


def run(
    path: Route,
    *,
    layout: ParallelConfig = LAYOUT,
    engine: EngineSetup = SERVERS,
    spec: QuantSpec | None = FP8,
    on: Device = H100,
    sources: int = 1,
    **more: Any,
) -> Timeline:
    publish = setup(path, layout, replace(engine, device=on), sources)
    key = (layout.model_dump_json(), engine.tp, engine.ep, engine.dp, str(spec))
    if key not in _SLOTS:
        _SLOTS[key] = publication(HF, layout, engine, spec)
    return synchronize(_SLOTS[key], SyncSetup(publish=publish, parallel=layout, spec=spec, **more))


def setup(path: Route, layout: ParallelConfig, engine: EngineSetup, sources: int = 1) -> PublishSetup:
    changed = 0.03 if path == "delta" else 1.0
    ranks = layout.world_size
    return PublishSetup(
        path=path, device=engine.device, ranks=ranks, engine=engine, sources=sources, disk=10e9, changed=changed
    )


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("first", [True, False])
def test_a_publication_is_at_least_its_busiest_device_and_at_most_all_of_them(path: Route, first: bool) -> None:
    found = run(path, encoded_first=first)
    assert max(found.busy.values()) <= found.seconds <= sum(found.busy.values()) * (LAYOUT.pp + 1)
    assert found.busy["requests"] == CONTROL and found.busy[found.bound] == max(found.busy.values())


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("name", ["intra", "inter", "hbm", "disk"])
def test_a_faster_device_is_never_slower(path: Route, name: str) -> None:
    faster = replace(H100, **{name: 3 * getattr(H100, name)})
    assert run(path, on=faster).seconds <= run(path).seconds + 1e-9


@pytest.mark.parametrize("path", ROUTES)
def test_buffers_help_and_without_them_a_stage_s_work_adds_up(path: Route) -> None:
    layout = ParallelConfig(tp=4, dp=16, ep=32)
    times = [run(path, layout=layout, buffers=b).seconds for b in (0, 1, 2, 100)]
    assert times == sorted(times, reverse=True) and times[0] > 1.1 * times[2]
    alone = run(path, layout=layout, buffers=0)
    assert alone.seconds == pytest.approx(sum(alone.busy.values()))


def test_small_buckets_approach_the_busiest_device_and_large_ones_the_sum() -> None:
    """Of a broadcast; the latency of a bucket is in the device's seconds."""
    sizes = (1 << 40, 1 << 33, 1 << 30, 1 << 28)
    excess = []
    for size in sizes:
        found = run("distributed", bucket_bytes=size)
        excess.append((found.seconds - CONTROL) / max(found.busy.values()) - 1)
    assert excess == sorted(excess, reverse=True) and excess[0] > 0.1 and excess[-1] < 0.03


def test_a_broadcast_agrees_with_its_closed_form() -> None:
    bf16 = replace(SERVERS, weight_bytes=2.0, expert_bytes=2.0)
    for engine, spec in ((SERVERS, FP8), (bf16, None)):
        found = run("distributed", engine=engine, spec=spec, bucket_bytes=WHOLE)
        wanted = served_bytes(SHAPE, engine) / (NETWORK * H100.inter)
        assert found.busy["servers' network"] == pytest.approx(wanted, rel=0.02)
    assert publish_time(SHAPE, setup("distributed", LAYOUT, bf16)).terms["gather and broadcast"] >= wanted
    # eight sources of a node at once have eight links, and no more than a node's ranks can help
    one, eight, more = (run("distributed", sources=n, bucket_bytes=WHOLE).busy["servers' network"] for n in (1, 8, 64))
    assert eight == pytest.approx(one / 8, rel=0.03) and more == eight


def test_slices_agree_with_their_closed_form() -> None:
    """Received by each rank; the closed form leaves out what every rank keeps whole (norms and routers)."""
    terms = publish_time(SHAPE, setup("reshard", LAYOUT, SERVERS)).terms
    found = run("reshard", bucket_bytes=WHOLE)
    assert found.busy["servers' network"] == pytest.approx(terms["slices"], rel=0.08)
    few = ParallelConfig(tp=4, dp=1)  # then the links of four senders are the narrower ones
    terms = publish_time(SHAPE, setup("reshard", few, SERVERS)).terms
    assert run("reshard", layout=few, bucket_bytes=WHOLE).busy["trainer's network"] == pytest.approx(
        terms["slices"], rel=0.08
    )


def test_files_agree_with_their_closed_form() -> None:
    terms = publish_time(SHAPE, setup("disk", LAYOUT, SERVERS)).terms
    nbytes = served_bytes(SHAPE, SERVERS)
    found = run("disk")
    assert terms["reading"] == pytest.approx(4 * nbytes / 10e9)
    assert found.busy["disk"] == pytest.approx(nbytes / 10e9 + terms["reading"], rel=0.002)


def test_a_gather_in_one_stage_agrees_with_its_closed_form() -> None:
    """All ranks' rings; an all-gather moves all but a rank's own part."""
    layout = ParallelConfig(tp=8, dp=8, ep=64)
    bf16_servers = replace(SERVERS, weight_bytes=2.0, expert_bytes=2.0)
    found = run("ipc", layout=layout, spec=None, engine=bf16_servers, bucket_bytes=WHOLE)
    bf16 = 2 * SHAPE.parameters
    experts, others = 2 * SHAPE.routed, bf16 - 2 * SHAPE.routed
    ring = min(NVLINK * H100.intra, 8 * NETWORK * H100.inter)
    wanted = experts * 63 / 64 / ring
    assert found.busy["trainer's network"] == pytest.approx(wanted, rel=0.05)
    assert found.busy["trainer's NVLink"] == pytest.approx(others * 7 / 8 / (NVLINK * H100.intra), rel=0.1)


def test_stages_receive_whole_tensors_over_one_link_each() -> None:
    """What the closed form leaves out: a broadcast to the other stages passes each rank's own network link."""
    found = run("ipc")
    assert found.busy["trainer's network"] > served_bytes(SHAPE, SERVERS) / (NETWORK * H100.inter)


def test_a_node_that_receives_once_uses_all_of_its_links() -> None:
    """An eighth of what other stages send passes each link, and NVLink the rest; slices are no whole tensors."""
    one, once = (run("ipc", bucket_bytes=WHOLE, once_a_node=once).busy for once in (False, True))
    within = run("ipc", layout=ParallelConfig(tp=4, dp=16, ep=32), bucket_bytes=WHOLE).busy["trainer's network"]
    sent = one["trainer's network"] - within
    assert once["trainer's network"] == pytest.approx(within + sent / 8, rel=0.02)
    passed = served_bytes(SHAPE, SERVERS) * 7 / 8 / (NVLINK * H100.intra)
    assert once["trainer's NVLink"] - one["trainer's NVLink"] == pytest.approx(passed, rel=0.02)
    wide = replace(SERVERS, dp=16)  # attention is whole on each of the server's ranks
    each, once = (run("reshard", engine=wide, bucket_bytes=WHOLE, once_a_node=once).busy for once in (False, True))
    assert once["servers' network"] < 0.7 * each["servers' network"] and "servers' NVLink" not in each


def test_encoding_first_gathers_half_and_divides_the_encoder_s_work() -> None:
    first, later = (run("ipc", encoded_first=first, bucket_bytes=WHOLE) for first in (True, False))
    assert first.busy["trainer's network"] < 0.52 * later.busy["trainer's network"]
    linears = 2 * (SHAPE.parameters - SHAPE.embeddings)
    assert later.busy["trainer's encoder"] == pytest.approx(2 * SHAPE.parameters / ENCODER["fp8"], rel=0.01)
    assert first.busy["trainer's encoder"] < 0.1 * linears / ENCODER["fp8"]


def test_a_difference_costs_by_what_has_changed() -> None:
    """0.8 bytes on the wire for a changed one; everything else as a broadcast."""
    full, part = (run(path, bucket_bytes=WHOLE).busy["servers' network"] for path in ("distributed", "delta"))
    assert part == pytest.approx(0.03 * 0.8 * full, rel=0.1)


def test_one_sender_encodes_everything_and_needs_whole_tensors() -> None:
    one, each = (run("distributed", one_sender=o, encoded_first=False, bucket_bytes=WHOLE) for o in (True, False))
    assert one.busy["trainer's encoder"] == pytest.approx(2 * each.busy["trainer's encoder"], rel=0.1)  # two stages
    assert one.busy["trainer's network"] >= 2 * SHAPE.parameters / (NETWORK * H100.inter)
    assert one.busy["servers' network"] == each.busy["servers' network"] and one.seconds > each.seconds


def test_loading_in_turn_adds_up() -> None:
    in_turn, beside = run("distributed", load_in_turn=True), run("distributed")
    loads = beside.busy["servers' host"] + beside.busy["servers' memory"]
    assert in_turn.busy["servers' network"] == pytest.approx(beside.busy["servers' network"] + loads)
    assert in_turn.seconds > beside.seconds


def test_another_path_and_another_world_are_refused() -> None:
    with refuses(ValueError, "tensor", "reshard"):
        run("tensor")
    publish = setup("ipc", LAYOUT, SERVERS)
    with refuses(ValueError, 4, 64):
        SyncSetup(publish=publish, parallel=ParallelConfig(dp=4))
