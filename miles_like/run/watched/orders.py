"""What the alerts of a run order: it waits, it ends, or it goes back to its best checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Protocol

from miles_like.alerts.machine import Event
from miles_like.alerts.watch import Watch
from miles_like.checkpoint.best import KeptBest
from miles_like.checkpoint.writer import Snapshot
from miles_like.protocols import Fencing
from miles_like.run.watched.incident import write_incident
from miles_like.stopping import BY_ALERT, StopRequest

PAUSED = "paused"  # the file whose removal lets a run go on
_LOOK_S = 0.2  # between two looks for it
_TICK_S = 1.0  # between two looks at the phase of a step


class GoingBack(Exception):
    """The loop has ended at the boundary after `step`, from which the run goes back to step `to`."""

    def __init__(self, step: int, to: int, snapshot: Snapshot, event: Event) -> None:
        super().__init__(f"step {step}: {event.sentence}: the run goes back to step {to}")
        self.step, self.to, self.snapshot, self.event = step, to, snapshot, event


@dataclass(slots=True, kw_only=True)
class Orders:
    """Of one life of a run. say: prints a sentence. rows: those that the alerts have read."""

    run_dir: Path
    stop: StopRequest
    best: KeptBest
    say: Callable[[str], None]
    fence: Fencing | None = None
    rows: Callable[[], Sequence[Mapping[str, float]]] = lambda: ()
    _event: Event | None = field(default=None, init=False)  # that pauses the run, or lets it go back

    @property
    def goes_back(self) -> bool:
        return self._event is not None and self._event.action == "rollback"

    @property
    def pauses(self) -> bool:
        return self._event is not None and self._event.action == "pause"

    def ordered(self, event: Event) -> None:
        """An alert has fired whose action is an order. Without a best checkpoint to go back to, the run ends."""
        if event.action == "stop":
            self._end(event, "the run saves and ends")
        elif event.action == "rollback" and self.best.step is None:
            self._end(event, "there is no best checkpoint to go back to yet (checkpoint.keep_best): the run ends")
        elif not self.goes_back:
            self._event = event

    def go_back(self, step: int, snapshot: Snapshot) -> NoReturn:
        assert self._event is not None and self.best.step is not None, "goes_back"
        raise GoingBack(step, self.best.step, snapshot, self._event)

    async def pause(self, step: int) -> None:
        """Returns when the file is removed that this call writes, or a stop is requested."""
        event, self._event = self._event, None
        assert event is not None, "pauses"
        flag = self.run_dir / PAUSED
        flag.write_text(event.sentence + "\n", encoding="utf-8")
        done = f"the run is paused after step {step}, which is saved: remove {flag} to go on"
        self.note(event, done)
        self.say(done)
        while flag.exists() and not self.stop.asked:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self.stop.wait()
        flag.unlink(missing_ok=True)
        self.say(f"The run goes on after step {step}")

    def _end(self, event: Event, done: str) -> None:
        path = self.note(event, done)
        self.stop.ask(f"{event.sentence}; see {path}", BY_ALERT)

    def note(self, event: Event, done: str) -> Path:
        """Writes the incident, and prints where it is."""
        path = write_incident(self.run_dir, event, self.rows(), best=self.best.step, done=done, fence=self.fence)
        self.say(f"Incident: {path}")
        return path


class Phases(Protocol):
    """The phase of a step that goes on (miles_like.report.progress.PhaseBar)."""

    @property
    def under_way(self) -> tuple[str, float]: ...


@contextlib.asynccontextmanager
async def watching_phases(watch: Watch, phases: Phases, tick_s: float = _TICK_S) -> AsyncIterator[None]:
    """Context: looks for a phase that does not end, of which no row will tell."""

    async def look() -> None:
        while True:
            await asyncio.sleep(tick_s)
            watch.phase(*phases.under_way)

    task = asyncio.create_task(look())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
