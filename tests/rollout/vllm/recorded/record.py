"""Records what a vLLM server answers, for the tests beside this folder: of a model of 128 tokens, to one file.

    python tests/rollout/vllm/recorded/record.py URL tests/rollout/vllm/recorded/vllm.json

The server is one of tests/vllm_cpu. Requests are written by hand, and not by the code that is tested.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

GENERATE = "/inference/v1/generate"
PROMPT = [5, 6, 7, 8, 9, 10, 11]


class Recorder:
    """Requests with the answers, each under the name of its case."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=300, trust_env=False)
        self.cases: dict[str, Any] = {}

    def ask(self, case: str, path: str, body: Any = None, *, get: bool = False) -> Any:
        reply = self.http.get(path) if get else self.http.post(path, json=body)
        answer = reply.json() if reply.content else None
        self.cases[case] = {"path": path, "request": body, "status": reply.status_code, "answer": answer}
        return answer

    def generate(self, case: str, ids: list[int], tokens: int, **params: Any) -> Any:
        given = {"max_tokens": tokens, "temperature": 1.0, "seed": 1, "logprobs": 0, "detokenize": False} | params
        return self.ask(case, GENERATE, {"request_id": case, "token_ids": ids, "sampling_params": given})

    def meanwhile(self, case: str, act: Any) -> None:
        """400 tokens, and what `act` does while they are sampled."""
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self.generate, case, PROMPT, 400, ignore_eos=True)
            time.sleep(0.5)
            act()
            asked.result()


def main(url: str, out: str) -> None:
    r = Recorder(url)
    for case, path in (("version", "/version"), ("models", "/v1/models"), ("weight_info", "/weight_info")):
        r.ask(case, path, get=True)
    r.ask("checker", "/weight_checker", {"action": "checksum"})
    r.ask("reset", "/reset_prefix_cache", {})
    whole = r.generate("whole", PROMPT, 8, ignore_eos=True)["choices"][0]["token_ids"]
    r.generate("two", PROMPT, 4, n=2, ignore_eos=True)
    r.generate("hot", PROMPT, 8, temperature=0.7)
    r.generate("stopped", PROMPT, 8, stop_token_ids=[whole[4]])
    r.generate("scored", PROMPT, 1, prompt_logprobs=3)
    r.generate("no_tokens", PROMPT, 0)
    r.generate("too_long", [5] * 1100, 4)
    r.meanwhile("aborted", lambda: r.ask("abort", "/abort_requests", {}))

    def new_version() -> None:
        r.ask("paused", "/pause?mode=keep&clear_cache=true", {})
        r.ask("numbered", "/update_weight_version", {"new_version": "1"})
        r.ask("resumed", "/resume", {})

    def frozen() -> None:
        r.ask("paused_in_place", "/pause?mode=keep&clear_cache=false", {})
        r.ask("not_reset", "/reset_prefix_cache", {})
        r.ask("resumed_in_place", "/resume", {})

    r.meanwhile("two_versions", new_version)
    r.meanwhile("frozen", frozen)
    r.ask("unnumbered", "/update_weight_version", {"new_version": "0"})
    r.ask("unknown", "/no_such_endpoint", {})
    Path(out).write_text(json.dumps(r.cases, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
