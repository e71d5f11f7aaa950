"""Law: the parts of a stock SGLang server on two nodes find each other as a run starts them, answer as one server, and
of a part that ends the run has the node, the part, its log file and the log's last error.

Why it must hold: every shipped model that needs more than a node is served this way, and the rest of the tests has
scripts in the place of such parts. SGLang 0.5.23 on CPU, tensor parallel by gloo over two nodes of namespaces with a
network and a hosts file each; their GPUs are Ray's count. In `make sglang-all` such a server is a run's, which sends it
weights and replays its routes. Not covered: NCCL, expert parallelism over nodes.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import pytest

from tests.sglang_cpu.served import INTERPRETER, ROOT, START_S, given
from tests.support.namespaces import address_of, nodes
from tests.support.refusals import check_refusal
from tests.support.tiny_models import random_tensors, tiny_qwen, write_checkpoint

KL_MAX = 1e-3  # of two kernels in BF16 and equal weights (miles_like/alignment/allowance.py)


def test_a_server_over_two_nodes_answers_and_names_the_part_that_ends(tmp_path: Path) -> None:
    hf = tiny_qwen(eos_token_id=None)
    model, logs = write_checkpoint(tmp_path / "hf", hf, random_tensors(hf)), tmp_path / "logs"
    with nodes(2, work=tmp_path, hosts=["good", "hostile"]) as cluster:
        cluster.start_ray(gpus=1)
        words = [cluster.ray_address, str(model), str(logs), str(tmp_path / "found.json")]
        cluster[0].run([sys.executable, "-m", "tests.sglang_cpu.programs.two_nodes", *words], timeout_s=START_S)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["url"].startswith(f"http://{address_of(0)}:") and len(found["answer"]) == 6
    assert "rollout server 0 of 1: connecting its ranks" in found["phases"]
    head, part = (next(logs.glob(f"sglang_*.{k}.log")) for k in range(2))
    for k, log in enumerate((head, part)):
        assert f"TP{k}] Load weight end" in log.read_text()
    facts = "rollout server 0, part 1 of 2,", "node1", address_of(1), "SIGKILL", part
    check_refusal(found["failure"], *facts, unrecorded="it names the log")


STEPS = 2
SETTINGS = (
    *("cluster.nodes=2", "parallel.dp=2", "parallel.ep=2", "precision.format=bf16", "precision.qat=false"),
    *("rollout.engine=sglang", "rollout.sglang.tp_size=2", f"rollout.sglang.python={INTERPRETER}"),
    *("rollout.start_timeout_s=600", "rollout.request_timeout_s=600", "rollout.max_new_tokens=16"),
    *("publish.path=distributed", f"train.steps={STEPS}", "train.groups_per_step=2", "train.samples_per_group=2"),
    *("model.make=false", "eval.max_prompts=2", "mismatch.check_prompts=2"),
    "rollout.env={SGLANG_CPU_OMP_THREADS_BIND='0|1'}",  # SGLang refuses more ranks than NUMA nodes without it
)


@pytest.mark.slow
@pytest.mark.sglang_all
def test_a_run_publishes_to_both_parts_and_replays_their_routes(tmp_path: Path) -> None:
    """The trainer has a rank on each node too; the known answer, which the server gives after each publication, is that
    of the trainer's weights."""
    hf = json.loads((ROOT / "configs" / "tiny" / "model.json").read_text())
    model = write_checkpoint(tmp_path / "hf", hf, random_tensors(hf))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(ROOT / "configs" / "tiny" / name, model / name)
    words = ["train", str(ROOT / "configs" / "tiny_bf16.toml"), "--run-dir", str(tmp_path / "run")]
    with nodes(2, work=tmp_path, hosts=["good", "hostile"]) as cluster:
        cluster.start_ray()
        own = (f"model.path={model}", f"cluster.stage_dir={cluster.disk}/local", f"cache_dir={tmp_path}/cache")
        cluster[0].run(
            [sys.executable, "-m", "tests.sglang_cpu.programs.over_two_nodes", *words, *given((*SETTINGS, *own))],
            timeout_s=3 * START_S,
        )
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert [row["weight_version"] for row in steps] == list(range(1, STEPS + 1))
    for row in steps:
        assert row["routing/replay_coverage"] == 1 and row["train/grad_norm"] > 0
        assert 0 < row["mismatch/known_answer"] < 0.6745 * math.sqrt(2 * KL_MAX) and row["mismatch/kl"] < KL_MAX
    head, part = (next((tmp_path / "run" / "logs").glob(f"sglang_*.{k}.log")) for k in range(2))
    for k, log in enumerate((head, part)):
        assert f"TP{k}] Load weight end" in log.read_text()
