"""A node copies what its ranks and servers load: of the shards the files of its ranks, of the weights all or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_bridge.convert.directory.boxes import Grid
from megatron_bridge.convert.source import Source
from megatron_bridge.convert.to_megatron import convert_source
from miles_like.config.load import load_config
from miles_like.hf.checkpoint import read_config_file
from miles_like.staging.stage_files import layout_inputs, node_needs, stage_plan
from miles_like.storage.completion import Output, file_fact, files_under
from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

QWEN = Path(__file__).parents[3] / "configs" / "qwen3_30b_a3b.toml"
TINY = QWEN.with_name("tiny.toml")
HF = tiny(num_hidden_layers=3)
STAGES = ("parallel.pp=3", "parallel.dp=1", "parallel.ep=1", "cluster.nodes=3", "rollout.servers=1", "replay.mode=off")


def output(root: Path) -> Output:
    return Output(root, {str(p.relative_to(root)): file_fact(p) for p in files_under(root)})


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Output, Output]:
    """A checkpoint and its shards, in many small files."""
    home = tmp_path_factory.mktemp("staging")
    hf = write_checkpoint(home / "hf", HF, random_tensors(HF), shard_bytes=1 << 19)
    (hf / "tokenizer.json").write_text('{"version": "1.0"}')
    convert_source(Source.open(hf), home / "megatron", Grid(), chunk_bytes=1 << 13, unit_bytes=1 << 15)
    return output(hf), output(home / "megatron")


def test_each_node_gets_the_files_of_its_ranks_and_only_a_server_the_weights(outputs: tuple[Output, Output]) -> None:
    """One pipeline stage on each of three nodes, the server on the first."""
    served, shards = outputs
    plan = stage_plan(load_config(TINY, list(STAGES)), Path("/staged"), served, shards)
    weights = {name for name in served.files if name.endswith(".safetensors")}
    every = {name for name in shards.files if name.endswith(".distcp")}
    hf, megatron = zip(*(map(set, (c.files for c in node.copies)) for node in plan.nodes), strict=True)
    assert weights <= hf[0] and not weights & (hf[1] | hf[2])
    assert all({"config.json", "tokenizer.json"} <= names for names in hf)
    assert set.union(*megatron) >= every and all(names & every < every for names in megatron)
    assert all(".metadata" in names for names in megatron)
    (small,) = plan.driver.copies
    assert {"config.json", "tokenizer.json"} <= set(small.files) and not weights & set(small.files)


def test_nodes_of_the_reference_get_what_its_ranks_load() -> None:
    """And the pools are part of the stage's key, because they decide which node gets what."""
    config = read_config_file(QWEN.with_suffix("") / "config.json")
    settings = ["cluster.nodes=4", "algorithm.kl_coefficient=0.1", "cluster.pools.trainer.nodes=0-1"]
    settings += ["cluster.pools.rollout.nodes=0-1", "cluster.pools.reference.nodes=2-3"]
    apart, plain = load_config(QWEN, settings), load_config(QWEN)
    needs = node_needs(apart, config, 1000)
    assert [n.served for n in needs] == [1000, 1000, 0, 0]
    assert (
        [n.shards for n in needs[:2]]
        == [n.shards for n in needs[2:]]
        == [n.shards for n in node_needs(plain, config, 1)]
    )
    assert layout_inputs(apart) != layout_inputs(load_config(QWEN, settings[:2]))
