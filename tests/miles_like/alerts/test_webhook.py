"""Alerts are posted beside the run: a server that is slow, away or answers with errors delays no step."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from miles_like.alerts.machine import Event
from miles_like.alerts.watch import Watch
from miles_like.alerts.webhook import MOST, Webhook
from miles_like.config.sections.watched.alerts import AlertsConfig, EvalRegression
from tests.support.spawn import free_port


@contextmanager
def served(statuses: list[int], hold: threading.Event | None = None) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(URL, what was posted): one status after the other, then 200. hold: answers wait for it."""
    posted: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if hold is not None:
                hold.wait(30)
            self.send_response(statuses.pop(0) if statuses else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Prints nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hooks/s3cret", posted
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def hook(url: str, **more: Any) -> Webhook:
    return Webhook(**{"url": url, "timeout_s": 5.0, "retries": 2, "wait_s": 0.01, **more})


def test_a_message_arrives_once_also_after_errors() -> None:
    with served([500, 503]) as (url, posted):
        sent = hook(url)
        sent.send({"text": "a"})
        sent.close(20)
    assert [p["text"] for p in posted] == ["a", "a", "a"] and sent.failed == 0


def test_a_server_that_does_not_answer_holds_no_caller_and_messages_have_a_bound() -> None:
    hold = threading.Event()
    with served([], hold) as (url, posted):
        sent = hook(url, timeout_s=60.0)
        for i in range(MOST + 20):
            sent.send({"text": str(i)})
        assert not hold.is_set() and len(posted) <= 1 and 18 <= sent.failed <= 20
        before = time.monotonic()
        sent.close(0.2)  # and so no end of a run
        assert time.monotonic() - before < 20
        hold.set()


@pytest.mark.parametrize("statuses", [[404] * 9, None])
def test_a_message_that_is_lost_is_reported_without_the_url(statuses: list[int] | None) -> None:
    lost, seen = list[str](), list[Event]()
    watch = Watch(
        config=AlertsConfig(eval_regression=EvalRegression(action="notify")),
        run="run-1",
        say=seen.append,
        ordered=lambda event: None,
        lost=lost.append,
    )

    def play(url: str) -> None:
        watch.webhook = hook(url)
        watch.write(1, {"eval/heldout/regression": 9.0})
        watch.close()

    if statuses is None:
        play(f"http://127.0.0.1:{free_port()}/hooks/s3cret")
    else:
        with served(statuses) as (url, posted):
            play(url)
        assert len(posted) == 3 and posted[0]["alert"] == "eval_regression" and posted[0]["run"] == "run-1"
    assert len(seen) == 1 and len(lost) == 1 and "s3cret" not in lost[0]
    assert ("HTTP 404" if statuses else "ConnectError") in lost[0] and "s3cret" not in repr(watch.webhook)


def test_only_alerts_with_another_action_than_log_are_posted_and_the_strongest_order_counts() -> None:
    orders: list[Event] = []
    rules = AlertsConfig(
        eval_regression=EvalRegression(action="stop"),
        dead_groups=AlertsConfig().dead_groups.model_copy(update={"action": "rollback", "window": 1}),
    )
    with served([]) as (url, posted):
        watch = Watch(
            config=rules,
            run="r",
            say=lambda event: None,
            ordered=orders.append,
            lost=lambda text: None,
            webhook=hook(url),
        )
        rows = {"eval/x/regression": 5.0, "rollout/zero_std_group_frac": 1.0, "async/staleness/mean": 99.0}
        for step in (1, 2, 3):
            watch.write(step, rows)
        watch.close()
    assert sorted(p["alert"] for p in posted) == ["dead_groups", "eval_regression"]
    assert [event.alert for event in orders] == ["dead_groups"]


def test_rows_before_a_resume_are_neither_posted_nor_ordered_again() -> None:
    seen: list[Event] = []
    watch = Watch(
        config=AlertsConfig(eval_regression=EvalRegression(action="stop")),
        run="r",
        say=seen.append,
        ordered=seen.append,
        lost=lambda text: None,
    )
    watch.restore([{"step": 1.0, "eval/x/regression": 5.0}])
    watch.write(2, {"eval/x/regression": 5.0})
    assert not seen
    watch.write(3, {"eval/x/regression": 0.0})
    watch.write(4, {"eval/x/regression": 5.0})
    assert [event.kind for event in seen] == ["over", "fired", "fired"]
