"""Law: the flags of every server of every shipped cluster configuration mean to SGLang what the configuration says.

The oracle is the argument parser of SGLang 0.5.23, in its virtual environment (`make test-sglang`), for each part of a
server that spans nodes. Not covered: what SGLang changes of the flags on a GPU, and the model's own limits.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from miles_like.cluster.placement import Slot, plan_placement
from miles_like.config.load import load_config
from miles_like.config.run import RunConfig
from miles_like.nodes.probe import find_engine
from miles_like.run.setup.rollout_side import server_launch
from rollout.sglang.servers import sglang_command
from tests.sglang_cpu.served import INTERPRETER, PROGRAMS, ROOT

SHIPPED = {
    path.stem: config
    for path in sorted((ROOT / "configs").glob("*.toml"))
    if (config := load_config(path)).servers is not None and config.rollout.engine == "sglang"
}
SAME = (  # flags with the names and values of the configuration
    *("tp_size", "ep_size", "moe_dense_tp_size", "moe_a2a_backend", "deepep_mode", "mem_fraction_static"),
    *("kv_cache_dtype", "chunked_prefill_size", "max_running_requests", "context_length", "attention_backend"),
    *("enable_memory_saver", "enable_deterministic_inference"),
)
OTHER = (
    *("attn_dp_size", "dp_size", "nnodes", "node_rank", "dist_init_addr", "host", "port", "model_path"),
    *("weight_version", "skip_tokenizer_init", "enable_return_routed_experts"),
)


class Part(NamedTuple):
    """The part of a server that runs on one node."""

    name: str
    slot: Slot
    command: list[str]


@cache
def parts() -> list[Part]:
    out = []
    for name, config in SHIPPED.items():
        model = Path(str(config.model.config)).parent
        for slot in plan_placement(config.cluster, config.parallel, config.servers).of("rollout"):
            launch = server_launch(config, model, Path("/logs"), slot, routes=True)
            first = "10.0.0.1:20000" if slot.nnodes > 1 else None
            launch = replace(launch, host=f"10.0.0.{slot.node + 1}", dist_init_addr=first)
            out.append(Part(name, slot, sglang_command(launch, 30000 + slot.index)))
    return out


@cache
def parsed() -> list[Mapping[str, Any]]:
    """SGLang's arguments for each of `parts`; one process, because its import takes long."""
    asked = {"commands": [part.command[3:] for part in parts()], "names": [*SAME, *OTHER]}
    done = subprocess.run(
        [str(INTERPRETER), str(PROGRAMS / "parsed.py")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[Mapping[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.parametrize("name", SHIPPED)
def test_sglang_reads_the_flags_of_a_shipped_configuration(name: str) -> None:
    config: RunConfig = SHIPPED[name]
    flags = config.rollout.sglang
    found = [(part.slot, answer) for part, answer in zip(parts(), parsed(), strict=True) if part.name == name]
    assert len(found) == config.rollout.servers * max(1, flags.tp_size // config.cluster.gpus_per_node)
    for slot, answer in found:
        assert "refused" not in answer, answer
        assert {key: answer[key] for key in SAME} == {key: getattr(flags, key) for key in SAME}
        assert answer["attn_dp_size"] == (flags.dp_size if flags.enable_dp_attention else 1)
        assert answer["dp_size"] == 1, "replicas inside a server refuse weight updates"
        assert (answer["nnodes"], answer["node_rank"]) == (slot.nnodes, slot.node_rank)
        assert answer["tp_size"] == slot.nnodes * len(slot.gpus), "a rank for each GPU of the placement"
        assert (answer["dist_init_addr"] is not None) is (slot.nnodes > 1)
        assert (answer["host"], answer["port"]) == (f"10.0.0.{slot.node + 1}", 30000 + slot.index)
        assert answer["skip_tokenizer_init"] and answer["enable_return_routed_experts"]
        assert answer["weight_version"] == "0"


def test_the_interpreter_is_found_with_its_version() -> None:
    assert find_engine(str(INTERPRETER), imports=True) == {"version": "0.5.23", "wrong": None}
