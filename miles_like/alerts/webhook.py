"""Posts alerts to a URL, in a thread, so that a server that is slow or away delays no step."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx

from miles_like.types import Json

MOST = 100  # messages that wait; further ones are dropped
END_S = 5.0  # for the messages that wait when the run ends


@dataclass(slots=True, kw_only=True)
class Webhook:
    """A JSON object for each message, by POST. A request that fails is repeated after `wait_s`, then after twice as
    long each time; any status below 300 is an answer.

    url: it may hold a secret, and is in no message of this class.
    """

    url: str = field(repr=False)
    timeout_s: float  # of one request
    retries: int
    wait_s: float = 0.5
    failed: int = 0  # messages that were not delivered
    why: str = ""  # the last of them was not
    _messages: queue.Queue[Mapping[str, Json]] = field(default_factory=lambda: queue.Queue(MOST), init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def send(self, message: Mapping[str, Json]) -> None:
        """Returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._deliver, name="alerts", daemon=True)
            self._thread.start()
        try:
            self._messages.put_nowait(message)
        except queue.Full:
            self._lose(f"{MOST} messages wait already")

    def close(self, within_s: float = END_S) -> None:
        """Waits until all messages are delivered or have failed, for `within_s` seconds at most."""
        end = time.monotonic() + within_s
        while self._messages.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.02)

    def _deliver(self) -> None:
        while True:
            message = self._messages.get()
            try:
                self._post(message)
            finally:
                self._messages.task_done()

    def _post(self, message: Mapping[str, Json]) -> None:
        why = ""
        for tried in range(1 + self.retries):
            if tried:
                time.sleep(self.wait_s * 2.0 ** (tried - 1))
            try:
                reply = httpx.post(self.url, json=dict(message), timeout=self.timeout_s)
            except (httpx.HTTPError, httpx.InvalidURL) as e:
                why = type(e).__name__
                continue
            if reply.status_code < 300:
                return
            why = f"HTTP {reply.status_code}"
        self._lose(why)

    def _lose(self, why: str) -> None:
        self.failed, self.why = self.failed + 1, why
