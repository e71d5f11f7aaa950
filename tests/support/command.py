"""A command line in a process forked from one that has imported what it imports, which a fresh one takes five seconds
for. The process ends as Python ends: its threads are waited for, its exit functions run."""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_like import cli
from miles_like.nodes import session
from tests.support.forked import Starter, redirect

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "run_deepseek.py"


def _execute(script: str, arguments: Sequence[str], variables: Mapping[str, str], out: Path, err: Path) -> int:
    """As `python SCRIPT arguments` from the root of the checkout, or `miles-like arguments` where there is no script;
    the exit status."""
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(variables)
    session._apply_auth({name: variables.get(name) for name in session._AUTH})  # which Ray reads when it is imported
    sys.path[:0] = [p for p in variables.get("PYTHONPATH", "").split(os.pathsep) if p]
    redirect(out, 1)
    redirect(err, 2)
    sys.argv = [script or "miles-like", *arguments]
    code = 0
    try:
        if script:
            runpy.run_path(script, run_name="__main__")
        else:
            cli.main()
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:  # as the interpreter does
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return code


class Commands(Starter):
    """Runs commands one after the other."""

    def __init__(self, where: Path) -> None:
        """Output is kept in files below `where`."""
        super().__init__(
            "miles_like.run.train", "miles_like.page.write", "megatron_bridge.convert.to_megatron", __name__
        )
        self.where, self.number = where, 0

    def run(
        self, script: str, arguments: Sequence[str], variables: Mapping[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        self.number += 1
        log, out, err = (self.where / f"command_{self.number}.{kind}" for kind in ("log", "out", "err"))
        code = self.call(log, _execute, script, tuple(arguments), dict(variables), out, err, timeout_s=timeout_s)
        return subprocess.CompletedProcess((script, *arguments), code, out.read_text(), err.read_text())
