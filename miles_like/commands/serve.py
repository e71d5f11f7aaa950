"""`miles-like serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from miles_like.command_errors import one_sentence
from miles_like.commands.options import KeyFileOption


def serve(
    hf_dir: Path,
    port: Annotated[int, typer.Option("--port", min=1, max=65535)],
    host: Annotated[str, typer.Option("--host", help="addresses other than loopback need a key")] = "127.0.0.1",
    threads: Annotated[int, typer.Option("--threads", min=1, max=1024)] = 2,
    key_file: KeyFileOption = None,
    routed_experts: Annotated[
        bool,
        typer.Option(
            "--enable-return-routed-experts/--no-return-routed-experts",
            help="return the experts of each token to requests that ask for them",
        ),
    ] = True,
) -> None:
    """Serve a model with the embedded engine and SGLang's HTTP API."""
    with one_sentence():
        from rollout.embedded.server import app as server
        from rollout.server_key import given_key

        arguments = ["--model-path", str(hf_dir), "--host", host, "--port", str(port), "--threads", str(threads)]
        arguments += ["--enable-return-routed-experts"] if routed_experts else []
        server.serve(server.parse(arguments), given_key(key_file))
