"""Asks a stock SGLang server for routed experts in every way this project does, and keeps its answers as JSON.

How sglang_*.json beside this file were made, on a CPU, with sglang 0.5.23 and models of three layers with random
weights (Qwen3-MoE; DeepSeek-V3 with one dense layer; 16 experts, 4 a token). The server was started with
`--enable-return-routed-experts --skip-tokenizer-init --weight-version 0`; it unpickles what `update` sends, as that
version does.

    python tests/rollout/sglang/recorded/record.py URL MODEL_DIR OUT.json SECONDS

SECONDS: after which generation is paused in the middle of 60 tokens; try until both spans hold several tokens.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file

KEPT = (
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "weight_version",
    "weight_versions",
    "num_retractions",
    "routed_experts",
    "output_token_logprobs",
)
PROMPT = [5, 6, 7, 8, 9, 10, 11]


class Recorder:
    """Requests with the answers, each under the name of its case."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=300, trust_env=False)
        self.cases: dict[str, Any] = {}

    def ask(self, case: str, ids: list[Any], tokens: int, *, routes: bool = True, **more: Any) -> Any:
        sampling = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": "stop" not in more}
        if "stop" in more:
            sampling["stop_token_ids"] = [more.pop("stop")]
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, **more}
        reply = self.http.post("/generate", json=body | ({"return_routed_experts": True} if routes else {}))
        answer = reply.json()
        self.cases[case] = {"request": body, "status": reply.status_code, "answer": _kept(answer)}
        return answer

    def update(self, weights: dict[str, torch.Tensor], version: str) -> None:
        named = base64.b64encode(pickle.dumps(list(weights.items()))).decode()
        self.http.post("/begin_weight_update", json={})
        self.http.post(
            "/update_weights_from_tensor", json={"serialized_named_tensors": [named], "weight_version": version}
        )
        self.http.post("/end_weight_update", json={})

    def paused(self, case: str, seconds: float, weights: dict[str, torch.Tensor], version: str) -> None:
        """60 tokens, of which the later ones come from other weights."""
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self.ask, case, [*PROMPT, 40], 60)
            time.sleep(seconds)
            self.http.post("/pause_generation", json={"mode": case})
            time.sleep(0.3)
            self.update(weights, version)
            self.http.post("/continue_generation", json={})
            asked.result()

    def output_ids(self, case: str) -> list[int]:
        found: list[int] = self.cases[case]["answer"]["output_ids"]
        return found


def _kept(answer: Any) -> Any:
    if isinstance(answer, list):
        return [_kept(a) for a in answer]
    if "meta_info" not in answer:
        return answer
    meta = {k: v for k, v in answer["meta_info"].items() if k in KEPT}
    return {"output_ids": answer["output_ids"], "meta_info": meta}


def main(url: str, model: str, out: str, seconds: str) -> None:
    r = Recorder(url)
    own = load_file(Path(model) / "model.safetensors")
    g = torch.Generator().manual_seed(3)
    other = {
        k: (w + 0.05 * torch.randn(w.shape, generator=g)).to(w.dtype) if w.ndim == 2 else w for k, w in own.items()
    }
    r.http.post("/flush_cache")
    whole = r.ask("whole", PROMPT, 8)["output_ids"]
    r.ask("from_row_3", PROMPT, 8, routed_experts_start_len=3)
    r.ask("not_asked", PROMPT, 2, routes=False)
    r.ask("batch", [PROMPT, [20, 21, 22]], 3)
    r.ask("stop_token", PROMPT, 8, stop=whole[4])
    turns = [*PROMPT, *whole, 30, 31, 32]
    r.ask("second_turn_whole", turns, 4)
    r.ask("second_turn", turns, 4, routed_experts_start_len=len(PROMPT) + len(whole) - 1)
    r.ask("start_at_prompt", PROMPT, 2, routed_experts_start_len=len(PROMPT))
    r.ask("start_beyond_prompt", PROMPT, 2, routed_experts_start_len=len(PROMPT) + 1)
    r.paused("retract", float(seconds), other, "1")
    r.paused("in_place", float(seconds), own, "2")
    retracted = [*PROMPT, 40, *r.output_ids("retract")]
    for case, weights, version in (("retract_under_1", other, "3"), ("retract_under_0", own, "4")):
        r.update(weights, version)
        r.http.post("/flush_cache")
        r.ask(case, retracted, 1)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(r.ask, "aborted", PROMPT, 400, rid="abc")
        time.sleep(float(seconds))
        r.http.post("/abort_request", json={"rid": "abc"})
        asked.result()
    Path(out).write_text(json.dumps(r.cases, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
