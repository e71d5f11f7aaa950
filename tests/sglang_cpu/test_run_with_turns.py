"""Law: a whole run that takes turns gives a stock server the calls of the documented order and no other, in every step,
and tries none of those by which the server ends.

Why it must hold: test_stock_contract.py sends the order by hand; here the loop brings it about, with trainer
ranks whose calls lie between those to the server. Order is asserted twice: in the driver's list of both sides' calls,
and in the access log of the server, which also has the requests of the trainer ranks. SGLang 0.5.23 on CPU, where the
release frees nothing. Not covered: GPUs, several servers.
"""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path

import pytest

from rollout.wire import endpoints
from tests.sglang_cpu.conftest import Run
from tests.sglang_cpu.served import CONFIGS, INTERPRETER, PORTS, PROGRAMS, ROOT, given
from tests.support.tiny_models import random_tensors, tiny_qwen, write_checkpoint

pytestmark = pytest.mark.slow
STEPS = 2
RUN = (
    *("cluster.colocate=true", f"train.steps={STEPS}", "train.groups_per_step=2", "train.samples_per_group=2"),
    *("model.make=false", "precision.format=bf16", "precision.qat=false", "parallel.dp=1", "parallel.ep=1"),
    *("eval.every=0", "eval.max_prompts=2", "mismatch.check_prompts=0", "checkpoint.every=1"),
    *("rollout.engine=sglang", "rollout.start_timeout_s=600", "rollout.request_timeout_s=600"),
    "rollout.max_new_tokens=8",
)
ALL = "release kv_cache+weights+cuda_graph"
TO_SERVERS = ("sleep", "resume weights", "publish {}", "resume kv_cache+cuda_graph")
TO_TRAINER = (ALL, "wake", "train")
PUBLICATION = (endpoints.BEGIN_UPDATE, endpoints.UPDATE_FROM_TENSOR, endpoints.END_UPDATE)
ORDERS = {endpoints.RELEASE_MEMORY, endpoints.RESUME_MEMORY, endpoints.GENERATE, *PUBLICATION}


def repeated_once(lines: list[str]) -> list[str]:
    return [line for line, _ in itertools.groupby(lines)]


def turns_of(lines: list[str]) -> list[str]:
    """The calls that belong to a turn, each of which has ended before the next begins; generations of a turn as one."""
    names = {"sleep", "wake", "train", "publish", "release", "resume", "generate"}
    calls = [line for line in lines if line[:2] in ("> ", "< ") and line.split()[1] in names]
    alone = [line for line in calls if line.split()[1] != "generate"]
    for began, ended in zip(alone[::2], alone[1::2], strict=True):
        assert (began[:2], ended[:2]) == ("> ", "< ") and began[2:] == ended[2:], (began, ended)
    flying = 0
    for line in calls:
        if line.split()[1] == "generate":
            flying += 1 if line.startswith(">") else -1
        else:
            assert not flying, f"{line} while {flying} generations were in flight"
    return repeated_once([line[2:] for line in calls if line.startswith(">")])


def test_the_calls_of_a_run_with_turns(miles_like: Run, tmp_path: Path) -> None:
    hf = write_checkpoint(tmp_path / "hf", tiny_qwen(), random_tensors(tiny_qwen()))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(ROOT / "configs" / "tiny" / name, hf / name)
    settings = given((*RUN, *PORTS, f"model.path={hf}", f"rollout.sglang.python={INTERPRETER}"))
    calls, run_dir = tmp_path / "calls.txt", tmp_path / "run"
    words = ["train", ROOT / "configs" / CONFIGS["qwen"], "--run-dir", run_dir, *settings]
    done = miles_like(calls, *words, script=PROGRAMS / "recorded_turns.py")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    lines = calls.read_text().splitlines()
    to_servers = [[call.format(version) for call in TO_SERVERS] for version in range(STEPS + 1)]
    turns = [ALL, *to_servers[0]]
    for step in range(1, STEPS + 1):
        turns += ["generate", *TO_TRAINER, *to_servers[step]]
    turns.append("generate")  # the evaluation at the end
    assert turns_of(lines) == turns
    check_refusals(lines, turns)
    (log,) = (run_dir / "logs").glob("sglang_*.0.log")
    seen = re.findall(r'"POST (/\w+)[^"]*" (\d+)', log.read_text())
    assert {status for _, status in seen} == {"200"}
    posts = repeated_once([endpoint for endpoint, _ in seen if endpoint in ORDERS])
    served = [endpoints.RESUME_MEMORY, *PUBLICATION, endpoints.RESUME_MEMORY, endpoints.GENERATE]
    assert posts == [*[endpoints.RELEASE_MEMORY, *served] * (STEPS + 1)]


def check_refusals(lines: list[str], turns: list[str]) -> None:
    """Each order that would end the server was refused in the driver whenever it was tried."""
    assert not [line for line in lines if line.startswith("accepted")]
    refused = [line for line in lines if line.startswith("refused")]
    tried = {ALL: 2, "resume weights": 2, "resume kv_cache+cuda_graph": 1}
    generations = lines.count("> generate")
    assert generations > STEPS
    assert len(refused) == generations + sum(tried.get(call, 0) for call in turns)
    for fact in (
        "requests are in flight",
        "was already released",
        "memory is released: resume it first",
        "not released",
    ):
        assert any(fact in line for line in refused), fact
