"""The process beside a run that sends its rows to one tracker.

    python -m miles_like.report.trackers.process NAME RUN_DIR SETTINGS

It reads `metrics.jsonl` and `rollouts/` as the run writes them, so the run waits for none of it, holds no queue, and
loses no row where the tracker is away. It ends once its standard input does, which the run closes, or the kernel with
the run: what is new is sent, for `exit_s` seconds at most. Nothing of the client's own output is kept, which may repeat
keys; `logs/tracker_NAME.log` has what failed, without them.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from miles_like.alerts.rows import ROLLBACK
from miles_like.config.sections.watched.trackers import TrackersConfig
from miles_like.report.trackers.client import TrackerClient
from miles_like.report.trackers.run_files import Rows, samples_age, samples_of, tracked_run
from miles_like.report.trackers.secrets_in_text import without_secrets
from miles_like.report.trackers.sent import ReplacedError, Sent, read_sent
from miles_like.variables import inherited

POLL_S = 0.5  # between two looks at the files
LONGEST_WAIT_S = 60.0  # between two attempts
SETTLED_S = 1.0  # since the last write to a file of samples, which then counts as written
NICE = 5  # lower priority than the run's processes


def make_client(name: str) -> TrackerClient:
    """Imports the client's package."""
    if name == "wandb":
        from miles_like.report.trackers.wandb_client import WandbClient

        return WandbClient()
    if name == "mlflow":
        from miles_like.report.trackers.mlflow_client import MlflowTracker

        return MlflowTracker()
    from miles_like.report.trackers.trackio_client import TrackioClient

    return TrackioClient()


@dataclass(kw_only=True)
class Forwarder:
    """Sends the rows of a run. ended: waits some seconds, and returns whether the run has ended. say: called with each
    sentence of the log."""

    name: str
    run_dir: Path
    settings: TrackersConfig
    ended: Callable[[float], bool]
    say: Callable[[str], None]
    make: Callable[[str], TrackerClient] = make_client
    sent: Sent = field(default_factory=Sent)
    _client: TrackerClient | None = None
    _tables: list[int] = field(default_factory=list)  # steps whose samples are not sent yet

    def run(self) -> None:
        """Until the run has ended and all is sent. Raises ReplacedError where another process sends."""
        self.sent = read_sent(self.run_dir, self.name)
        self.sent.claim(self.run_dir, self.name)
        self._rows, failures, over = Rows(self.run_dir), 0, False
        while True:
            try:
                self._forward(over)
                failures = 0
                if over:
                    break
            except ReplacedError:
                raise
            except Exception as e:  # of a client, which may raise anything
                failures += 1
                self._failed(e)
            wait_s = min(POLL_S * 2.0 ** min(failures, 16), LONGEST_WAIT_S)
            if over:
                time.sleep(min(wait_s, 1.0))
            over = over or self.ended(wait_s)

    def _forward(self, over: bool) -> None:
        if self._client is None:
            client = self.make(self.name)
            run = tracked_run(self.run_dir)
            self._began = run.began
            self.sent.run_id = client.open(run, self.settings, self.sent.run_id)
            self.sent.write(self.run_dir, self.name)
            self._client = client
        for step, metrics in self._rows.new():
            every = self.settings.samples_every
            if every and step > max(self.sent.table, 0) and step % every == 0 and step not in self._tables:
                self._tables.append(step)
            if step > self.sent.step:
                self._send(step, metrics, self._client)
        for step in list(self._tables):
            age = samples_age(self.run_dir, step, time.time())
            if over or (age is not None and age >= SETTLED_S):
                self._send_samples(step, self._client)
        if over:
            self._client.close()
            self.sent.finished = True
        if over or self.sent.error:
            self.sent.error = ""
            self.sent.write(self.run_dir, self.name)

    def _send(self, step: int, metrics: dict[str, float], client: TrackerClient) -> None:
        """Notes the row before it is sent, so that a process which is killed in between does not send it twice."""
        self.sent.check(self.run_dir, self.name)
        before, self.sent.step = self.sent.step, step
        self.sent.write(self.run_dir, self.name)
        try:
            client.log(step, metrics, self._began + metrics.get("wall_s", 0.0))
            if ROLLBACK in metrics:
                client.rolled_back(step, int(metrics[ROLLBACK]))
        except Exception:
            self.sent.step = before
            raise

    def _send_samples(self, step: int, client: TrackerClient) -> None:
        if rows := samples_of(self.run_dir, step, self.settings.samples):
            client.table(step, rows)
        self._tables.remove(step)
        self.sent.table = step
        self.sent.write(self.run_dir, self.name)

    def _failed(self, error: Exception) -> None:
        first = (str(error).strip().splitlines() or [""])[0]
        text = without_secrets(f"{type(error).__name__}: {first}"[:500], inherited())
        if text != self.sent.error:
            self.say(text)
        self.sent.error = text
        self.sent.write(self.run_dir, self.name)


def _input_ended(wait_s: float) -> bool:
    """Waits for the end of standard input."""
    ready, _, _ = select.select([0], [], [], wait_s)
    return bool(ready) and not os.read(0, 1)


def main(arguments: list[str]) -> None:
    name, run_dir, settings = arguments[0], Path(arguments[1]), TrackersConfig.model_validate_json(arguments[2])
    log = (run_dir / "logs" / f"tracker_{name}.log").open("a", encoding="utf-8", buffering=1)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    os.nice(NICE)
    ended = threading.Event()

    def watch() -> None:
        while not _input_ended(60.0):
            pass
        ended.set()
        time.sleep(settings.exit_s)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="end of the run").start()

    def say(text: str) -> None:
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    try:
        Forwarder(name=name, run_dir=run_dir, settings=settings, ended=ended.wait, say=say).run()
    except ReplacedError as e:
        say(str(e))


if __name__ == "__main__":
    main(sys.argv[1:])
