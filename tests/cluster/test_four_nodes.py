"""A run over four nodes that share no disk, and on three of them after one is lost, is the run of one machine.

Ray has the addresses of the nodes' second network, and the cables of the first are pulled, whose addresses the hosts
files have: what does not go by the address under which Ray knows a node reaches nothing. The model, in FP8 and with
a layer more than is trained, is on the disk of the driver's node alone, which is not the first. Tensor-, expert- and
pipeline-parallel groups of the trainer have members on several nodes; the server is on another one. Routes are replayed
(R3).

Not covered: GPUs, NCCL, a server over two nodes (tests/sglang_cpu), nodes that are lost while the run trains.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_bridge.convert.to_megatron import to_megatron
from miles_like.pipeline.dequantize import dequantize_checkpoint
from miles_like.pipeline.first_layers import write_first_layers
from miles_like.pipeline.rollout_checkpoint import store_served
from quant.spec import QuantFormat, QuantSpec
from tests.support import spread_run
from tests.support.local_run import QUICK, SMALL_MODEL, TINY, Runs, untimed
from tests.support.namespaces import Cluster, address_of, nodes
from tests.support.node_listing import listed
from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

pytestmark = pytest.mark.long(beside="tests/cluster/test_spread_run.py")

NODES, DRIVER, LOST, NETWORK = 4, 3, 1, 1
LAYERS = 2
SETTINGS = (*QUICK, "parallel.dp=1", "parallel.tp=2", "parallel.ep=2")
FOUR = (*SETTINGS, "parallel.pp=2", "train.steps=2")
THREE = (*SETTINGS, "parallel.pp=1", "train.steps=4")
POOLS = {  # numbers of the run's nodes
    FOUR: ("cluster.nodes=4", "cluster.pools.trainer.nodes='0-2'", "cluster.pools.rollout.nodes='3'"),
    THREE: ("cluster.nodes=3", "cluster.pools.trainer.nodes='0-1'", "cluster.pools.rollout.nodes='2'"),
}


class Ran(NamedTuple):
    """A run that has ended, or was continued."""

    seen: Mapping[str, Any]  # process -> what it found
    staged: list[dict[str, str]]  # of each node: file -> SHA-256
    metrics: bytes
    output: str


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("four")


@pytest.fixture(scope="module")
def runs(work: Path) -> Iterator[Runs]:
    """On the models of `make_models`."""
    (home := work / "home").mkdir()
    with Runs(home) as started:
        for part in ("hf", "megatron"):
            (home / part).unlink()
        assert started.call(home / "models.log", make_models, home) == 0, (home / "models.log").read_text()
        yield started


def make_models(home: Path) -> None:
    """`home`/whole, in FP8 and with a layer more; of its first layers, in BF16, `home`/hf and `home`/megatron."""
    hf = tiny(**SMALL_MODEL | {"num_hidden_layers": LAYERS + 1})
    write_checkpoint(home / "bf16", hf, random_tensors(hf))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(TINY.parent / "tiny" / name, home / "bf16" / name)
    store_served(home / "bf16", home / "whole", QuantSpec.of(QuantFormat.FP8))
    write_first_layers(home / "whole", home / "fp8", LAYERS)
    dequantize_checkpoint(home / "fp8", home / "hf")
    to_megatron(home / "hf", home / "megatron")


@pytest.fixture(scope="module")
def cluster(work: Path, runs: Runs) -> Iterator[Cluster]:
    with nodes(NODES, hosts=["good", "hostile", "good", "empty"], disk_mib=256, work=work) as made:
        for node in made:
            node.run(["sh", "-c", f"printf {node.name} > {made.disk}/owner"])
        made[DRIVER].run(["cp", "-r", str(runs.home / "whole"), str(made.disk / "whole")])
        made.start_ray(network=NETWORK)
        for node in made:
            node.unplug(0)
        yield made


def launch(cluster: Cluster, run_dir: Path, settings: tuple[str, ...], *more: str) -> Ran:
    disk, found = cluster.disk, f"{spread_run.DISK}='{cluster.disk}'"
    own = [
        f"model.path={disk}/whole",
        f"model.first_layers={LAYERS}",
        f"cache_dir={disk}/cache",
        f"cluster.stage_dir={disk}/local",
    ]
    own += ["model.make=false", f"cluster.env={{{found}}}", f"rollout.env={{{found}}}", *POOLS[settings]]
    words = [word for setting in (*settings, *own) for word in ("--set", setting)]
    train = ["train", str(TINY), "--run-dir", str(run_dir), "--ray-address", cluster.ray_address, *words, *more]
    for old in (run_dir / "logs").glob("*.json"):
        old.unlink()
    done = cluster[DRIVER].run(
        [sys.executable, "-c", "from tests.support.spread_run import command; command()", *train],
        check=False,
        env={"COLUMNS": "200", spread_run.UNIT_BYTES: "60000"},  # some for each node
        timeout_s=900.0,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return Ran(
        {p.stem: json.loads(p.read_text()) for p in (run_dir / "logs").glob("*.json")},
        [node.call(listed, disk / "local") for node in cluster],
        untimed(run_dir / "metrics.jsonl"),
        done.stdout,
    )


@pytest.fixture(scope="module")
def four(cluster: Cluster, work: Path) -> Ran:
    return launch(cluster, work / "run", FOUR)


@pytest.fixture(scope="module")
def alone(work: Path, runs: Runs) -> Path:
    """The same two steps as processes of one machine."""
    assert runs.run(work / "alone", FOUR) == 0
    return work / "alone"


def where(ran: Ran) -> dict[str, str]:
    return {name: seen["host"] for name, seen in ran.seen.items()}


def test_four_nodes_train_what_one_machine_trains(four: Ran, alone: Path) -> None:
    assert four.metrics == untimed(alone / "metrics.jsonl")
    rows = [json.loads(line) for line in four.metrics.splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["routing/replay_coverage"] == 1.0 and row["train/grad_norm"] > 0 for row in rows[1:])


def test_each_process_is_where_its_pool_says_and_uses_ray_s_network(four: Ran) -> None:
    ranks = {f"trainer_rank{r}": f"node{r % 3}" for r in range(4)}
    assert where(four) == {**ranks, "rollout_actor0.0": "node3"}
    for seen in four.seen.values():
        assert seen["address"] == address_of(int(seen["host"][-1]), NETWORK) and seen["disk"] == seen["host"]
        assert seen["environment"]["GLOO_SOCKET_IFNAME"] == f"eth{NETWORK}"
    assert all(four.seen[rank]["world"] == 4 for rank in ranks)


def test_each_node_has_what_it_loads_and_no_more(four: Ran, cluster: Cluster) -> None:
    """Every copy has the hash that the converter has written down, wherever its pieces were written."""
    cache = cluster.disk / "cache"
    assert [bool(node.call(listed, cache)) for node in cluster] == [k == DRIVER for k in range(NODES)]
    (converted,) = cluster[DRIVER].call(converted_in, cache)
    files, elsewhere = converted
    assert set(elsewhere.values()) <= {address_of(k, NETWORK) for k in range(NODES) if k != DRIVER} and elsewhere
    shards = [
        {name.rpartition("/")[2]: sha for name, sha in of.items() if "/megatron/" in f"/{name}" and ".distcp" in name}
        for of in four.staged
    ]
    assert all(sha == files[name] for of in shards for name, sha in of.items())
    assert [bool(of) for of in shards] == [True, True, True, False]
    weights = [any(name.endswith(".safetensors") for name in of) for of in four.staged]
    assert weights == [False, False, False, True]


def converted_in(cache: Path) -> list[tuple[dict[str, str], dict[str, str]]]:
    """Of each converted directory: (file -> SHA-256, file -> address of the node that holds it)."""
    return [
        (
            {name: fact["sha256"] for name, fact in json.loads(path.read_text())["files"].items()},
            {name: at for name, (at, _) in json.loads(path.with_name("elsewhere.json").read_text()).items()},
        )
        for path in cache.glob("convert-*/data/manifest.json")
    ]


def test_three_nodes_go_on_after_one_is_lost(four: Ran, alone: Path, cluster: Cluster, work: Path, runs: Runs) -> None:
    """With half of the ranks, on other nodes than before. The lost node had a part of the converted weights, which are
    made again from the model, and no node is asked for them that has its own."""
    (before,) = cluster[DRIVER].call(converted_in, cluster.disk / "cache")
    lost = address_of(LOST, NETWORK)
    assert lost in before[1].values()
    cluster[LOST].crash()
    ran = launch(cluster, work / "run", THREE, "--resume")
    assert where(ran) == {"trainer_rank0": "node0", "trainer_rank1": "node2", "rollout_actor0.0": "node3"}
    (after,) = cluster[DRIVER].call(converted_in, cluster.disk / "cache")
    assert after[0] == before[0] and lost not in after[1].values()
    assert "on no node any more" in ran.output
    assert runs.run(alone, THREE) == 0
    assert ran.metrics == untimed(alone / "metrics.jsonl")
    assert (work / "run" / "ledger.jsonl").read_bytes() == (alone / "ledger.jsonl").read_bytes()
