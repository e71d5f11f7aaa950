"""`miles-like watch` serves a run to its user alone, reads only, and follows what is appended.

Requests go through the application itself, without a socket, except where a socket is what is tested. That a browser
follows: test_browser.py. Not covered: many users at once.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from miles_like.page.live_run import SENT_ROWS, LiveRun
from miles_like.page.server import app, host_name, listening, token_for, url_of
from tests.support.page_data import page_data, write_rows
from tests.support.refusals import refuses

ROW = {"rollout/reward/mean": 0.5, "tokens_total": 10.0}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_rows(tmp_path / "run", [(1, ROW)])
    return tmp_path / "run"


def client(run_dir: Path, token: str | None = None, host: str = "127.0.0.1:8765") -> TestClient:
    return TestClient(app(LiveRun(run_dir), token, poll_s=1.0), base_url=f"http://{host}", follow_redirects=False)


def test_a_page_asks_for_the_rows_after_its_last_one(run_dir: Path) -> None:
    asked = client(run_dir)
    page = page_data(asked.get("/").text)
    live = page["live"]
    assert page["runs"][0]["last"]["step"] == 1 and live["poll_s"] == 1
    path = f"/rows?generation={live['generation']}&events={live['events']}&after="
    assert asked.get(f"{path}1").json() == {"rows": [], "renew": False, "samples": 0, "events": live["events"]}
    write_rows(run_dir, [(2, ROW | {"rollout/reward/mean": 0.75, "tokens_total": 25.0})])
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "half')
    found = asked.get(f"{path}1").json()
    assert found["rows"] == [{"step": 2, "rollout/reward/mean": 0.75, "tokens_total": 25, "page/train_tokens": 15}]
    assert ["rollout/reward/mean", 0.5, 0.75, 0.75, True] in found["parts"]["figures"]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('": 1}\n')
    assert [row["step"] for row in asked.get(f"{path}2").json()["rows"]] == [3]


def test_new_samples_incidents_and_alerts_are_reported(run_dir: Path) -> None:
    asked = client(run_dir)
    live = page_data(asked.get("/").text)["live"]
    (run_dir / "rollouts").mkdir()
    (run_dir / "rollouts" / "step_1.jsonl").touch()
    (run_dir / "incidents").mkdir()
    (run_dir / "incidents" / "1.md").write_text("# fell")
    found = asked.get(f"/rows?generation=0&events={live['events']}&after=1").json()
    assert found["samples"] == 1 and found["rows"] == [] and found["parts"]["incidents"][0]["text"] == "# fell"
    write_rows(run_dir, [(step, {"mismatch/kl": kl}) for step, kl in ((2, 0.1), (3, 0.1), (4, 0.1), (5, 1.0))])
    found = asked.get(f"/rows?generation=0&events={found['events']}&after=1").json()
    assert [(one["step"], one["alert"]) for one in found["parts"]["alerts"]] == [(5, "kl_spike")]
    assert asked.get("/samples").json()[0]["steps"] == [1]


@pytest.mark.parametrize("how", ["an earlier step", "a shorter file", "another file"])
def test_a_run_that_goes_back_renews_its_pages(run_dir: Path, how: str) -> None:
    write_rows(run_dir, [(2, ROW), (3, ROW)])
    asked, path = client(run_dir), run_dir / "metrics.jsonl"
    live = page_data(asked.get("/").text)["live"]
    if how == "an earlier step":
        write_rows(run_dir, [(2, {"rollout/reward/mean": 0.125})])
    else:
        if how == "another file":
            path.rename(run_dir / "old")
        os.truncate(path, 0) if how == "a shorter file" else None
        write_rows(run_dir, [(1, {"rollout/reward/mean": 0.125})])
    found = asked.get(f"/rows?generation={live['generation']}&after=3").json()
    assert found["renew"] and found["rows"] == []
    whole = asked.get("/data").json()
    assert whole["generation"] != live["generation"] and 0.125 in whole["run"]["curves"]["rollout/reward/mean"][1]


def test_a_page_that_lacks_many_rows_asks_for_all(run_dir: Path) -> None:
    write_rows(run_dir, [(step, {"a": 1.0}) for step in range(2, SENT_ROWS + 3)])
    asked = client(run_dir)
    assert asked.get("/rows?generation=0&after=1").json()["renew"]
    assert len(asked.get("/rows?generation=0&after=2").json()["rows"]) == SENT_ROWS


def test_a_run_without_a_step_is_waited_for_and_a_damaged_one_is_a_sentence(tmp_path: Path) -> None:
    asked = client(tmp_path)
    assert "no step yet" in asked.get("/").text and asked.get("/data").status_code == 404
    write_rows(tmp_path, [(1, ROW)])
    assert page_data(asked.get("/").text)["runs"][0]["last"]["step"] == 1
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("{]\n")
    reply = asked.get("/rows?generation=0&after=1")
    assert reply.status_code == 503 and "metrics.jsonl line 2 is damaged" in reply.text
    with refuses(ValueError, "no/such"):
        LiveRun(Path("no/such"))


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("localhost:1", 200), ("127.0.0.1:8765", 200), ("[::1]:8765", 200), (f"{socket.gethostname()}:1", 200)),
        *(("evil.example", 403), ("evil.example:8765", 403), ("10.0.0.1", 403), ("localhost.evil.example", 403)),
        *(("", 403), ("127.0.0.1.evil.example:8765", 403)),
    ],
)
def test_another_site_s_name_is_refused(run_dir: Path, host: str, status: int) -> None:
    """A browser sends the name of the site that it believes to ask."""
    reply = client(run_dir).get("/data", headers={"host": host})
    assert reply.status_code == status and "Access-Control-Allow-Origin" not in reply.headers
    assert reply.headers["Cache-Control"] == "no-store" and reply.headers["X-Frame-Options"] == "DENY"


def test_elsewhere_than_on_loopback_a_token_is_needed(run_dir: Path) -> None:
    asked = client(run_dir, "secret", host="10.0.0.1:8765")
    for path in ("/", "/data", "/rows?generation=0&after=1", "/samples", "/?token=wrong", "/data?token=secret"):
        assert asked.get(path).status_code == 401, path
    for wrong in ("Bearer wrong", "Bearer ", "secret", "Basic secret"):
        assert asked.get("/data", headers={"Authorization": wrong}).status_code == 401
    assert asked.get("/data", headers={"Authorization": "Bearer secret"}).status_code == 200
    reply = asked.get("/?token=secret")
    assert reply.status_code == 303 and reply.headers["location"] == "/"
    cookie = reply.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie
    assert asked.get("/data").status_code == 200, "the client keeps the cookie"
    assert asked.get("/data", headers={"host": "evil.example"}).status_code == 403


def test_nothing_is_changed_by_a_request(run_dir: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in run_dir.parent.rglob("*")}
    asked = client(run_dir)
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert asked.request(method, "/data").status_code == 405
    assert [
        asked.get(path).status_code for path in ("/../x", "/config.toml", "/rows", "/rows?after=x&generation=0")
    ] == [*(404, 404, 400, 400)]
    asked.get("/")
    assert {p: p.stat().st_mtime_ns for p in run_dir.parent.rglob("*")} == before


def test_only_loopback_has_no_token() -> None:
    with listening("127.0.0.1", 0) as own, listening("0.0.0.0", 0) as every:
        assert token_for(own) is None and url_of(own, None) == f"http://127.0.0.1:{own.getsockname()[1]}/"
        token = token_for(every)
        assert token is not None and len(token) >= 32 and token_for(every) != token
        assert url_of(every, token).endswith(f":{every.getsockname()[1]}/?token={token}")
        with refuses(ValueError, "127.0.0.1"):
            listening("127.0.0.1", own.getsockname()[1])
    with refuses(ValueError, 65536, 65535):
        listening("127.0.0.1", 65536)


def test_the_name_of_a_host_is_without_its_port() -> None:
    assert [host_name(h) for h in ("A.b:1", "a.b", "[::1]:8", "[::1]", "a.:1", "")] == [
        "a.b",
        "a.b",
        "::1",
        "::1",
        "a",
        "",
    ]
