"""How a stock vLLM server is started: its command line and environment variables, as pure functions."""

from __future__ import annotations

import sys
from pathlib import Path

from rollout.config import VLLMFlags

OPEN = (
    "vLLM servers have no authentication: every process that reaches their ports can change their weights. They listen "
    "on loopback, or on the network of the cluster's nodes, which must be closed (docs/security.md)"
)
# Without the first none of the endpoints that change weights exists. The second keeps usage statistics on the machine.
VARIABLES = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}


def vllm_command(flags: VLLMFlags, *, model_path: Path, host: str, port: int, routes: bool) -> list[str]:
    """Command line of a stock vLLM 0.32 server. routes: it returns the expert routes of its tokens.

    Log-probabilities are those of logits / temperature (`processed_logprobs`), as everywhere in this project; by
    default vLLM reports them at temperature 1. `--generation-config vllm` keeps the checkpoint's generation_config.json
    from changing sampling parameters. The server runs without a tokenizer: requests and replies hold token ids, and the
    client makes the text.
    """
    pairs: list[tuple[str, object]] = [
        ("--host", host),
        ("--port", port),
        ("--tensor-parallel-size", flags.tensor_parallel_size),
        ("--gpu-memory-utilization", flags.gpu_memory_utilization),
        ("--kv-cache-dtype", flags.kv_cache_dtype),
        ("--dtype", flags.dtype),
        ("--logprobs-mode", "processed_logprobs"),
        ("--generation-config", "vllm"),
    ]
    optional: list[tuple[str, object]] = [
        ("--max-model-len", flags.max_model_len),
        ("--max-num-seqs", flags.max_num_seqs),
        ("--max-logprobs", flags.max_logprobs),
    ]
    pairs += [(flag, value) for flag, value in optional if value is not None]
    return [
        *(flags.python or sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model_path)),
        *(str(word) for pair in pairs for word in pair),
        "--skip-tokenizer-init",
        "--enable-scale-out",
        *(("--enable-expert-parallel",) if flags.enable_expert_parallel else ()),
        *(("--enforce-eager",) if flags.enforce_eager else ()),
        *(("--enable-return-routed-experts",) if routes else ()),
    ]
