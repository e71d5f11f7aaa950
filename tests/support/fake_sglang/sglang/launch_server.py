"""What `python -m sglang.launch_server` is in the tests: SGLang's flags in front of the embedded engine.

It differs from the embedded server where stock SGLang does: weights come as SGLang's own pickled encoding, text is not
returned, all `n` samples of one request item share their seed. Unknown flags are refused, as by SGLang.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import yaml

from rollout.embedded.server import app as server
from rollout.server_key import ServerKey
from rollout.wire import endpoints
from rollout.wire.control import SAFETENSORS, encode_safetensors


def flags(argv: list[str]) -> argparse.Namespace:
    if "--config" in argv:  # as SGLang: what the file says goes before the command line
        i = argv.index("--config")
        path = Path(argv[i + 1])
        assert path.suffix in (".yaml", ".yml") and path.stat().st_mode & 0o777 == 0o600
        options = yaml.safe_load(path.read_text())
        argv = [word for key, value in options.items() for word in (f"--{key}", str(value))] + argv[:i] + argv[i + 2 :]
    p = argparse.ArgumentParser()
    p.add_argument("--api-key")
    p.add_argument("--admin-api-key")
    p.add_argument("--model-path", required=True)
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, required=True)
    for name in ("--tp-size", "--ep-size", "--attn-dp-size"):
        p.add_argument(name, type=int, default=1)
    p.add_argument("--mem-fraction-static", type=float)
    p.add_argument("--kv-cache-dtype")
    p.add_argument("--dist-init-addr")
    p.add_argument("--weight-version", default="default")
    p.add_argument("--skip-tokenizer-init", action="store_true", required=True)
    p.add_argument("--enable-return-routed-experts", action="store_true")
    a = p.parse_args(argv)
    return argparse.Namespace(
        **vars(a),
        threads=1,
        dtype="float32",
        max_total_tokens=65536,
        max_running_requests=512,
        context_length=512,
        weights="decoded",
        activations="none",
        exact_parts=None,
        disable_radix_cache=False,
        enable_return_routed_weights=False,  # stock SGLang knows no such thing
    )


class StockBodies:
    """ASGI: rewrites request bodies from stock SGLang's form to the embedded server's."""

    def __init__(self, app: Any, args: argparse.Namespace) -> None:
        self.app, self.args = app, args
        self.change = {endpoints.UPDATE_FROM_TENSOR: self.weights, endpoints.GENERATE: self.generate}

    def weights(self, body: dict[str, Any]) -> None:
        assert body.get("load_format") is None and len(body["serialized_named_tensors"]) == self.args.tp_size
        named = pickle.load(io.BytesIO(base64.b64decode(body["serialized_named_tensors"][0])))
        body["serialized_named_tensors"] = [encode_safetensors(named)]
        body["load_format"] = SAFETENSORS

    def generate(self, body: dict[str, Any]) -> None:
        params = body["sampling_params"]
        for one in params if isinstance(params, list) else [params]:
            assert one.get("n", 1) == 1, "n > 1 gives clones under deterministic inference"
        if not self.args.enable_return_routed_experts:
            body.pop("return_routed_experts", None)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        change = self.change.get(scope.get("path", ""))
        if change is None:
            await self.app(scope, receive, send)
            return
        raw, more = b"", True
        while more:
            message = await receive()
            raw += message.get("body", b"")
            more = message.get("more_body", False)
        body = json.loads(raw)
        change(body)
        bodies = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def changed() -> dict[str, Any]:
            return bodies.pop() if bodies else await receive()

        await self.app(scope, changed, send)


def main() -> None:
    args = flags(sys.argv[1:])
    print(f"server_args={vars(args)}", flush=True)  # SGLang logs its keys too
    key = ServerKey(args.api_key, args.admin_api_key) if args.api_key else None
    stock = server.make_app

    def bodies(worker: Any, a: Any, limits: Any) -> Any:
        return StockBodies(stock(worker, a, limits), a)

    server.make_app = bodies  # type: ignore[assignment]  # an ASGI app is all that uvicorn needs
    server.serve(args, key)


if __name__ == "__main__":
    main()
