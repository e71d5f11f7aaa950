"""`miles-like serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from miles_like.command_errors import one_sentence
from miles_like.commands.options import FORMATS, KeyFileOption
from miles_like.commands.output import console, echo

PORT = 30000  # stock SGLang's


def serve(
    path: Annotated[Path, typer.Argument(help="run directory, a run's checkpoint, or Hugging Face directory")],
    port: Annotated[int, typer.Option("--port")] = PORT,
    host: Annotated[
        str, typer.Option("--host", help="address to listen on; other addresses than loopback need a key")
    ] = "127.0.0.1",
    context_length: Annotated[
        int | None,
        typer.Option(
            "--context-length", min=1, help="maximum tokens of prompt and answer; default: the model's, up to 8192"
        ),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option("--served-model-name", help="model name for clients; default: the name of the directory"),
    ] = None,
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="for a run: its checkpoint of step N")] = None,
    format: Annotated[
        str, typer.Option("--format", help=f"for a run: format of the exported weights: bf16, {FORMATS}")
    ] = "bf16",
    hf_config: Annotated[
        Path | None,
        typer.Option("--hf-config", help="directory of the initial model, if the run's cache was deleted"),
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="cuda: the first GPU, in BF16")] = "cpu",
    threads: Annotated[int, typer.Option("--threads", min=1, max=1024)] = 2,
    key_file: KeyFileOption = None,
    routed_experts: Annotated[
        bool,
        typer.Option(
            "--enable-return-routed-experts/--no-return-routed-experts",
            help="return each token's experts to requests that ask for them",
        ),
    ] = True,
) -> None:
    """Serve a run's model, or any supported model, with OpenAI's and SGLang's HTTP APIs.

    Prints `ready: URL MODEL FORMAT, context N` when it accepts requests; / lists its routes.
    """
    with one_sentence():
        from miles_like.pipeline.convert import ConvertWork
        from miles_like.report.written import Written
        from miles_like.run.serving import CONTEXT, servable
        from miles_like.run.serving import context_length as context_of
        from rollout.embedded.server import app as server
        from rollout.server_key import given_key

        key = given_key(key_file)
        server.check_address_free(host, port, key)
        server.check_device(device)
        work = ConvertWork(memory_limit=4 << 30, workers=1, nodes=None, watch=Written("exporting", console()))
        found = servable(path, work, step=step, format=format, hf_config=hf_config, report=echo)
        context = context_of(found.directory, context_length)
        arguments = ["--model-path", str(found.directory), "--host", host, "--port", str(port)]
        arguments += ["--device", device, "--threads", str(threads), "--context-length", str(context)]
        arguments += ["--max-total-tokens", str(max(8 * CONTEXT, context))]
        arguments += ["--served-model-name", served_model_name or found.name]
        arguments += ["--enable-return-routed-experts"] if routed_experts else []
        server.serve(server.parse(arguments), key)
