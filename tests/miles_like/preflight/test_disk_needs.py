"""What the stages will write is known before the first, by disk, and held to what is free."""

from __future__ import annotations

from pathlib import Path

from miles_like.config.load import load_config
from miles_like.pipeline.stage_names import STAGES
from miles_like.preflight.disks import DiskNeed, check_disks, disk_needs
from tests.support.planned import planned
from tests.support.refusals import refuses

CONFIGS = Path(__file__).parents[3] / "configs"
GIB = 1 << 30
BF16 = 1_342_052_868_096  # bytes of DeepSeek-V3


def test_disk_is_summed_over_the_stages_of_a_file_system() -> None:
    """Each alone would fit. The message has needed and free space."""
    needs = [DiskNeed(stage=s, directory=Path("/a"), bytes=6 * GIB) for s in ("fetch", "convert")]
    with refuses(ValueError, 10.0, "GiB", 12.0, "GiB", 6.0):
        check_disks(needs, lambda path: (1, 10 * GIB))
    check_disks(needs, lambda path: (1, 12 * GIB))
    check_disks(
        [*needs, DiskNeed(stage="train", directory=Path("/b"), bytes=9 * GIB)], lambda p: (ord(p.name), 12 * GIB)
    )


def test_disk_needs_are_of_what_each_stage_writes(tmp_path: Path) -> None:
    """DeepSeek-V3: 671 B parameters in FP8 and BF16; node-local staging counts on each node; what is there already
    counts no more."""
    config = load_config(CONFIGS / "deepseek_v3_fp8.toml")
    stages = planned(config, tmp_path / "a")
    needs = {(n.stage, n.on): n for n in disk_needs(config, stages, STAGES)}
    fp8, bf16 = 673_150_611_808, 1_342_052_868_096
    assert needs["fetch", "here"].bytes == fp8
    assert needs["dequantize", "here"].bytes == needs["convert", "here"].bytes == bf16
    staging = needs["stage", "nodes"]
    assert staging.directory.parent == Path("/local_nvme/miles-like") and staging.bytes == max(staging.by_node)
    # each node has a server, and half of a stage of eight
    assert len(staging.by_node) == 16 and fp8 < min(staging.by_node) < staging.bytes < fp8 + bf16 / 10
    assert staging.of_node(0, 7).bytes == staging.by_node[0] - 7 < staging.bytes and staging.of_node(16, 0).bytes == 0
    assert needs["train", "here"].bytes == 3 * 7 * bf16  # keep = 2, and the one that is written
    assert disk_needs(config, stages, ["train"])[0].on == "here"
    stages[0].directory.mkdir(parents=True)
    (stages[0].directory / "half").write_bytes(b"x" * 1000)
    assert disk_needs(config, stages, ["fetch"])[0].bytes == fp8 - 1000
    fused = load_config(CONFIGS / "deepseek_v3_fp8.toml", ["convert.fuse=true"])
    assert "dequantize" not in {n.stage for n in disk_needs(fused, planned(fused, tmp_path / "b"), STAGES)}


def test_a_node_that_does_not_see_the_cache_needs_room_for_what_it_converts(tmp_path: Path) -> None:
    """Beside the copies that it loads. It keeps its pieces where the conversion puts them."""
    shipped = load_config(CONFIGS / "deepseek_v3_fp8.toml")
    for stage_dir, where in (
        (shipped.cluster.stage_dir, Path("/local_nvme/miles-like") / "{}.data.pieces"),
        (None, tmp_path / "cache" / "{}" / "data.pieces"),
    ):
        cluster = shipped.cluster.model_copy(update={"stage_dir": stage_dir})
        config = shipped.model_copy(update={"cluster": cluster})
        stages = planned(config, tmp_path / "a")
        assert "apart" not in {n.on for n in disk_needs(config, stages, STAGES)}
        needs = {(n.stage, n.on): n for n in disk_needs(config, stages, STAGES, joins_cluster=True)}
        key = next(s.directory.name for s in stages if s.name == "convert")
        pieces = needs["convert", "apart"]
        assert str(pieces.directory) == str(where).format(key) and len(set(pieces.by_node)) == 1
        assert BF16 / 16 < pieces.bytes == pieces.by_node[15] < BF16 / 16 + 3 * GIB
        copies = needs["stage", "nodes" if stage_dir else "apart"]
        assert copies.bytes == max(copies.by_node) > 673e9 and pieces.of_node(3, 9).bytes == pieces.bytes - 9


def test_the_files_of_a_model_s_first_layers_are_on_disk_beside_these(tmp_path: Path) -> None:
    config = load_config(CONFIGS / "rehearsal_deepseek_v3.toml")
    stages = planned(config, tmp_path / "a")
    fetch = stages[0]
    assert fetch.size is not None and fetch.size < fetch.removed < fetch.size + 25e9
    (need,) = disk_needs(config, stages, ["fetch"])
    assert need.bytes == fetch.size + fetch.removed
    (fetch.directory / "whole").mkdir(parents=True)
    (fetch.directory / "whole" / "a").write_bytes(b"x" * 1000)
    assert disk_needs(config, stages, ["fetch"])[0].bytes == need.bytes - 1000  # of an interrupted download
    whole = load_config(CONFIGS / "deepseek_v3_fp8.toml")
    assert planned(whole, tmp_path / "b")[0].removed == 0
