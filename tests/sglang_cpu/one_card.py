"""What tests/gpu does with stock SGLang on one GPU. test_one_card.py does the same on a CPU, where the memory that the
server opens is the host's, so that a card meets no call that has not run before."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from miles_like.config.load import load_config
from rollout.sglang.servers import ServerLaunch
from rollout.sglang.startup import launch_server
from tests.sglang_cpu.served import ROOT, given
from tests.sglang_cpu.weight_paths import Stock, check_paths
from tests.support.tiny_models import felt_tensors, tiny_qwen, write_checkpoint

CONFIG = ROOT / "configs" / "tiny_qwen.toml"
# heads and experts that the kernels of a GPU take
SHAPE = tiny_qwen(hidden_size=256, head_dim=64, moe_intermediate_size=128, num_hidden_layers=2)
STEPS = 2
# nats a token: on a CPU of two kernels in BF16, on a GPU as that of the demo (tests/gpu/test_demo_cuda.py)
KL = {"cpu": 1e-3, "cuda": 5e-3}
SERVED = (
    *("model.make=false", "precision.format=bf16", "precision.qat=false", "parallel.dp=1", "parallel.ep=1"),
    *("kernels.spec=local", "rollout.engine=sglang", "rollout.max_new_tokens=24", "replay.mode=r3"),
    *("rollout.start_timeout_s=600", "rollout.request_timeout_s=600", "eval.every=0", "eval.max_prompts=4"),
    *("rollout.sglang.max_running_requests=16", "rollout.sglang.context_length=1024"),
)
ON_A_GPU = (
    *("cluster.gpus_per_node=1", "rollout.sglang.mem_fraction_static=0.3"),
    "rollout.sglang.attention_backend=triton",
)
OF_THE_RUN = (
    *("cluster.colocate=true", f"train.steps={STEPS}", "train.groups_per_step=4", "train.samples_per_group=4"),
    *("mismatch.check_prompts=4", "mismatch.checksums_every=1"),
)


class Card(NamedTuple):
    """Where trainer and server compute."""

    device: Literal["cpu", "cuda"]
    home: Path
    miles_like: Callable[..., subprocess.CompletedProcess[str]]  # runs the command with its words
    more: tuple[str, ...] = ()  # settings of this machine, as "KEY=VALUE"

    def settings(self) -> list[str]:
        """Makes the checkpoint that they name."""
        path = self.home / "hf"
        if not path.exists():
            write_checkpoint(path, SHAPE, felt_tensors(SHAPE))
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy2(ROOT / "configs" / "tiny" / name, path / name)
        gpu = ON_A_GPU if self.device == "cuda" else ()
        return [*SERVED, *gpu, *self.more, f"model.path={path}"]


def check_server(card: Card) -> dict[str, Any]:
    """A server has, tensor for tensor, the same weights from handles as from a directory, in buckets of every size;
    `verify` then finds nothing that differs, down to the layers. Returns figures."""
    settings = card.settings()
    model, states = card.home / "hf", card.home / "states"
    states.mkdir()
    config = load_config(CONFIG, settings).rollout
    launch = ServerLaunch(model_path=model, config=config, log_dir=card.home / "logs", layer_states=states)
    with launch_server(launch) as server:
        check_paths(Stock(server.url, 1, model, card.device), card.home, ("tensor",))
        out = card.home / "found.json"
        words = ["verify", "--config", CONFIG, "--run-dir", card.home / "run", "--json", out, "--layers"]
        done = card.miles_like(*words, "--server", server.url, *given(settings))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(out.read_text())
    assert found["verdicts"] == found["bounds_broken"] == found["differing_tensors"] == []
    assert 0 < found["mismatch/kl"] < KL[card.device] and found["mismatch/tokens"] > 100
    assert found["verify/weights/verdict"] == "agrees" and found[f"verify/layers/first/{server.url}"] is None
    return {k: found[k] for k in ("mismatch/kl", "mismatch/logprob_abs_diff", "routing/agreement", "mismatch/tokens")}


def check_run(card: Card) -> list[dict[str, float]]:
    """Server and trainer take turns on the device for two steps, whose samples are trained on their routes. Returns
    figures of each."""
    run_dir = card.home / "run"
    words = ["train", CONFIG, "--run-dir", run_dir, *given([*card.settings(), *OF_THE_RUN])]
    done = card.miles_like(*words)
    logs = "".join(f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in run_dir.rglob("*.log"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:] + logs[-9000:]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "train/loss" in row]
    assert [row["weight_version"] for row in steps] == [1, 2]
    for row in steps:
        assert row["routing/replay_coverage"] == 1 and row["routing/expert_agreement"] > 0.9
        assert abs(row["mismatch/kl"]) < KL[card.device] and row["mismatch/nan_count"] == 0
        assert row["mismatch/known_answer"] > 0 and row["sync/republications"] == 0
        # buckets went by handle; on a GPU a kernel gathered them. A stock server does not say how it decodes
        assert row["sync/packed"] == (card.device == "cuda") and "rollout/triton" not in row
    shown = ("mismatch/kl", "mismatch/known_answer", "routing/expert_agreement", "sync/packed", "sync/seconds")
    more = ("perf/step_s", "perf/rollout_s", "perf/train_s", "perf/publish_s", "perf/turn/resume_s")
    return [{key: row[key] for key in (*shown, *more)} for row in steps]
