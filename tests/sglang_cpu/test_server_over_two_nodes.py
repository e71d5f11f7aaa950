"""Law: the parts of a stock SGLang server on two nodes find each other as a run starts them, answer as one server, and
of a part that ends the run has the node, the part, its log file and the log's last error.

Why it must hold: every shipped model that needs more than a node is served this way, and the rest of the tests has
scripts in the place of such parts. SGLang 0.5.23 on CPU, tensor parallel by gloo over two nodes of namespaces with a
network and a hosts file each; their GPUs are Ray's count. Not covered: NCCL, expert parallelism over nodes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.sglang_cpu.served import START_S
from tests.support.namespaces import address_of, nodes
from tests.support.refusals import check_refusal
from tests.support.tiny_models import random_tensors, tiny_qwen, write_checkpoint


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
