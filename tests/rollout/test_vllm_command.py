"""The command line of a vLLM server. tests/vllm_cpu starts servers with it; vLLM's own parser is not asked here."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from rollout.config import VLLMFlags
from rollout.vllm_command import VARIABLES, vllm_command


def pairs(command: list[str]) -> dict[str, str]:
    return {a: b for a, b in itertools.pairwise(command) if a.startswith("--")}


def test_what_keeps_log_probs_and_parameters_ours_is_always_given() -> None:
    command = vllm_command(VLLMFlags(), model_path=Path("/m"), host="127.0.0.1", port=3, routes=False)
    assert command[:5] == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "/m"]
    given = pairs(command)
    assert (given["--logprobs-mode"], given["--generation-config"]) == ("processed_logprobs", "vllm")
    assert (given["--host"], given["--port"]) == ("127.0.0.1", "3")
    assert {"--enable-scale-out", "--skip-tokenizer-init"} <= set(command)
    assert VARIABLES["VLLM_SERVER_DEV_MODE"] == "1"
    assert not {"--enable-return-routed-experts", "--max-model-len", "--enforce-eager"} & set(command)


def test_flags_follow_the_configuration() -> None:
    flags = VLLMFlags(
        python="/v/bin/python",
        tensor_parallel_size=4,
        enable_expert_parallel=True,
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=7,
        max_logprobs=64,
        enforce_eager=True,
    )
    command = vllm_command(flags, model_path=Path("/m"), host="10.0.0.1", port=3, routes=True)
    given = pairs(command)
    assert command[0] == "/v/bin/python"
    assert (given["--tensor-parallel-size"], given["--dtype"]) == ("4", "bfloat16")
    assert (given["--max-model-len"], given["--max-num-seqs"], given["--max-logprobs"]) == ("512", "7", "64")
    assert {"--enable-expert-parallel", "--enforce-eager", "--enable-return-routed-experts"} <= set(command)
