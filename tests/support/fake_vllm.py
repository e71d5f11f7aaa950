"""A server on loopback that gives the answers that were recorded from vLLM 0.32 (tests/rollout/vllm/recorded)."""

from __future__ import annotations

import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

GENERATE = "/inference/v1/generate"
_RECORDED = Path(__file__).parents[1] / "rollout" / "vllm" / "recorded" / "vllm.json"


def recorded() -> dict[str, Any]:
    """Case -> path, request, status and answer."""
    found: dict[str, Any] = json.loads(_RECORDED.read_text())
    return found


class FakeVLLM:
    """A context manager. samples: case of the answer to a request to sample, whose sample is repeated `n` times.
    calls: (path with query, body) of every request, in order. answers: path -> (status, answer), which a test may
    change."""

    def __init__(self, samples: str = "whole", port: int = 0) -> None:
        self.cases, self.samples, self.calls = recorded(), samples, list[tuple[str, Any]]()
        self.answers: dict[str, tuple[int, Any]] = {}
        for case in ("version", "models", "weight_info", "checker", "reset", "abort", "paused", "numbered", "resumed"):
            found = self.cases[case]
            self.answers[found["path"].partition("?")[0]] = found["status"], found["answer"]
        self.answers["/health"] = 200, None
        self.answers["/collective_rpc"] = 200, {"results": [None]}
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # head and body are two writes

            def do_GET(self) -> None:
                self._reply(None)

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self._reply(json.loads(raw) if raw else None)

            def _reply(self, body: Any) -> None:
                fake.calls.append((self.path, body))
                status, answer = fake._answer(self.path.partition("?")[0], body)
                content = b"" if answer is None else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> FakeVLLM:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def _answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path != GENERATE:
            unknown = self.cases["unknown"]
            return self.answers.get(path, (unknown["status"], unknown["answer"]))
        params = body["sampling_params"]
        case = self.cases["scored" if "prompt_logprobs" in params else self.samples]
        answer = copy.deepcopy(case["answer"])
        if case["status"] != 200:
            return case["status"], answer
        answer["request_id"] = f"generate-tokens-{body['request_id']}"
        answer["choices"] = [answer["choices"][0] | {"index": i} for i in range(params["n"])]
        return case["status"], answer

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]
