"""RL post-training of mixture-of-experts models in low precision.

Start with: miles-like demo
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable
from typing import Annotated

import typer

from miles_like.command_errors import one_sentence
from miles_like.commands.config.app import config
from miles_like.commands.convert import convert
from miles_like.commands.data.files import data
from miles_like.commands.doctor import doctor
from miles_like.commands.evaluate import calibrate, evaluate
from miles_like.commands.export import export
from miles_like.commands.launch.app import launch
from miles_like.commands.options import Command, Group
from miles_like.commands.output import LOG_LEVELS, set_output
from miles_like.commands.plan import plan
from miles_like.commands.quantize import dequantize, quantize
from miles_like.commands.records.diagnose import diagnose, track
from miles_like.commands.report import compare, report, top, watch
from miles_like.commands.serve import serve
from miles_like.commands.servers.app import servers
from miles_like.commands.simulate import simulate
from miles_like.commands.train import demo, init, train
from miles_like.commands.verify import verify

# otherwise the interpreter's last collection visits a million imported objects: 0.3 s of every command
atexit.register(gc.freeze)

RUNS, CHECKPOINTS, PLANS, DATA = "Runs", "Checkpoints", "Plans and nodes", "Data"

app = typer.Typer(cls=Group, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
_PANELS: dict[str, dict[str, Callable[..., None]]] = {
    RUNS: {
        "demo": demo,
        "init": init,
        "train": train,
        "verify": verify,
        "eval": evaluate,
        "calibrate": calibrate,
        "report": report,
        "watch": watch,
        "top": top,
        "compare": compare,
        "diagnose": diagnose,
        "track": track,
    },
    CHECKPOINTS: {"export": export, "quantize": quantize, "dequantize": dequantize, "serve": serve},
    PLANS: {"plan": plan, "simulate": simulate, "doctor": doctor},
}
for panel, commands in _PANELS.items():
    for name, command in commands.items():
        app.command(name, cls=Command, rich_help_panel=panel)(command)
app.add_typer(convert, name="convert", rich_help_panel=CHECKPOINTS)
app.add_typer(data, name="data", rich_help_panel=DATA)
app.add_typer(config, name="config", rich_help_panel=PLANS)
app.add_typer(launch, name="launch", rich_help_panel=RUNS)
app.add_typer(servers, name="servers", rich_help_panel=RUNS)


def _print_version(asked: bool) -> None:
    if asked:
        from miles_like import __version__

        typer.echo(f"miles-like {__version__}")
        raise typer.Exit


@app.callback()
def output(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="print only errors")] = False,
    log_level: Annotated[
        str,
        typer.Option(
            "--log-level",
            metavar="LEVEL",
            help=f"level of log messages: {', '.join(LOG_LEVELS[:-1])} or {LOG_LEVELS[-1]}",
        ),
    ] = "warning",
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="print mismatch, tokens per second and phase times with each step")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print only the metrics of each step, as JSON lines")] = False,
) -> None:
    with one_sentence():
        set_output(quiet=quiet, log_level=log_level, verbose=verbose, json=json)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
