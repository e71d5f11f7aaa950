"""The trackers of a run as its driver sees them: a process for each, of which the run waits for none."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from miles_like.config.sections.watched.trackers import TrackersConfig
from miles_like.report.trackers.run_files import unsent
from miles_like.report.trackers.sent import FOLDER, read_sent
from miles_like.variables import inherited

_OWN = ("MILES_LIKE_", "RAY_")  # variables of the run's own processes, keys among them
_QUIET = {"WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
_ELSEWHERE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_BUCKET_ID")  # where Trackio would send its rows
_KILLED_S = 5.0  # for a killed process to end


class Trackers:
    """Starts, watches and ends the processes of a run's trackers. It is a MetricSink whose rows the processes read from
    `metrics.jsonl`. say: called with each sentence for the user."""

    def __init__(self, settings: TrackersConfig, run_dir: Path, say: Callable[[str], None]) -> None:
        self._settings, self._run_dir, self._say = settings, run_dir, say
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._failing: set[str] = set()  # of which the user knows

    def start(self) -> None:
        """Call it when `config.toml` and `starts.jsonl` are written. Processes that run are left alone."""
        for name in self._settings.use:
            if name not in self._processes:
                self._processes[name] = self._started(name)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Says once of each tracker that it fails."""
        for name, process in self._processes.items():
            if name in self._failing:
                continue
            error = self._state_error(name)
            if not error and process.poll() is not None:
                error = f"its process has ended with {process.returncode}"
            if error:
                self._failing.add(name)
                self._say(f"{name}: {error}; the run goes on, and the rows are sent once it answers")

    def close(self) -> None:
        """Nothing is open that a later part of the run would not use; `end` ends the processes."""

    def end(self) -> None:
        """Lets the processes send what is left, for `exit_s` seconds altogether, and says how many rows were not."""
        for process in self._processes.values():
            assert process.stdin is not None, "a pipe"
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        deadline = time.monotonic() + self._settings.exit_s
        for name, process in self._processes.items():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_KILLED_S)
            self._report(name)
        self._processes.clear()

    def _report(self, name: str) -> None:
        try:
            state = read_sent(self._run_dir, name)
            left, rows = unsent(self._run_dir, state.step)
        except (ValueError, OSError) as e:
            self._say(f"{name}: {e}")
            return
        if state.finished and not left:
            return
        within = f"within trackers.exit_s = {self._settings.exit_s:g} s"
        why = f" ({state.error})" if state.error else ""
        how = f"`miles-like track {self._run_dir}` sends what is left"
        if left:
            self._say(f"{name}: {left} of {rows} rows were not sent {within}{why}; {how}")
        else:
            self._say(f"{name} did not confirm {within} what it was sent{why}")

    def _state_error(self, name: str) -> str:
        try:
            return read_sent(self._run_dir, name).error
        except (ValueError, OSError) as e:
            return str(e)

    def _environment(self) -> dict[str, str]:
        """Of the processes: without the run's own keys, and of clients that report nothing about themselves."""
        given = {key: value for key, value in inherited().items() if not key.startswith(_OWN)}
        if self._settings.offline:
            given = {key: value for key, value in given.items() if key not in _ELSEWHERE}
            given["TRACKIO_DIR"] = str(self._run_dir.resolve() / FOLDER / "trackio")
        return _QUIET | given

    def _started(self, name: str) -> subprocess.Popen[bytes]:
        (self._run_dir / "logs").mkdir(exist_ok=True)
        words = (name, str(self._run_dir.resolve()), self._settings.model_dump_json())
        return subprocess.Popen(
            [sys.executable, "-m", "miles_like.report.trackers.process", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._environment(),
            start_new_session=True,  # with the processes that its client starts
        )
