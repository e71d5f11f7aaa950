"""Stock SGLang 0.5.23 on CPU, by the Python of a separate virtual environment (`make test-sglang` makes it):

    .venv-sglang/bin/python tests/sglang_cpu/serve.py --model-path HF_DIR --port P [--spawned] [any flag of
        sglang.launch_server]

Its scheduler and detokenizer are forked from it, which takes two fifths of the time; with --spawned they are started
as in the release.

BF16 only: SGLang's kernels for quantized weights on CPU need AMX. DeepSeek models need yarn in rope_scaling and
moe_layer_freq in config.json, as the published ones have.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).parent / "adaptations"),
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # without a compiler its first request hangs
    "HF_HUB_OFFLINE": "1",
}
FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--disable-cuda-graph", "--disable-overlap-schedule", "--skip-tokenizer-init"),
    *("--skip-server-warmup", "--sleep-on-idle", "--weight-version", "0"),
    *("--max-total-tokens", "8192", "--context-length", "1024", "--chunked-prefill-size", "512"),
    *("--max-running-requests", "16"),
)
ROUTES = "--enable-return-routed-experts"  # ends the server of a model without experts
FORKED = {"SERVER_FORKS": "1"}  # to `adaptations`
SPAWNED = "--spawned"
FOR_CUDA = ("--enable-memory-saver",)  # ends a server without the package torch-memory-saver, which CPUs have not


def routes(words: list[str]) -> list[str]:
    """The flag of routes, if the model has experts."""
    config = json.loads((Path(words[words.index("--model-path") + 1]) / "config.json").read_text())
    return [ROUTES] if "num_experts_per_tok" in config and ROUTES not in words else []


if __name__ == "__main__":
    ranks = int(sys.argv[sys.argv.index("--tp-size") + 1]) if "--tp-size" in sys.argv else 1
    if ranks > 1:  # without it every rank wants a NUMA node of the machine
        cores = sorted(os.sched_getaffinity(0))
        ENVIRONMENT["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[i % len(cores)]) for i in range(ranks))
    given = [word for word in sys.argv[1:] if word not in (*FOR_CUDA, SPAWNED)]
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        *FLAGS,
        *routes(given),
        *given,
    ]  # of two equal flags the last holds
    hooks = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p.endswith("hooks")]
    paths = {"PYTHONPATH": os.pathsep.join([ENVIRONMENT["PYTHONPATH"], *hooks])}
    forked = {} if SPAWNED in sys.argv else FORKED
    os.execve(sys.executable, command, os.environ | ENVIRONMENT | paths | forked)
