"""The page in a browser, Debian's headless chromium: it loads, draws, searches, follows, and no text of a run runs.

Every test ends without an error or a warning on the browser's console, a violation of the page's policy among them.
Not covered: other browsers; how it looks.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from playwright.sync_api import Browser, Page, sync_playwright

from miles_like.page.live_run import LiveRun
from miles_like.page.run_data import run_data, sample_data
from miles_like.page.server import app, listening
from miles_like.page.write import page_text, write_page, write_report
from miles_like.report.metrics import write_rollouts
from tests.support.debian import need_programs
from tests.support.made_samples import group, sample
from tests.support.page_data import write_rows

pytestmark = pytest.mark.slow

STEPS = 10_000
LOAD_CPU_S = 2.0  # of the page's process, whatever else the machine does
KEYS = (
    *("rollout/reward/mean", "rollout/tokens", "async/staleness/mean", "async/staleness/max", "mismatch/kl", "wall_s"),
    *("train/kl_old", "perf/publish_s", "perf/pause_s", "ledger/in_flight", "ledger/trained", "tokens_total"),
    *(f"routing/expert_agreement/{layer}" for layer in range(20)),
    *(f"train/made_{i}" for i in range(40)),
)
HOSTILE = '<a href="https://e.example"><b></script><img src="x" onerror="document.title=1">%{x}<script>document.title=1'


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    need_programs("chromium")
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    made, wrong = browser.new_page(viewport={"width": 1400, "height": 900}), list[str]()
    made.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    made.on("pageerror", lambda e: wrong.append(str(e)))
    made.on(
        "request",
        lambda r: None if r.url.startswith(("file:", "data:", "blob:", "http://127.0.0.1:")) else wrong.append(r.url),
    )
    yield made
    made.close()
    assert not wrong


def long_run() -> list[dict[str, float]]:
    values = np.abs(np.random.default_rng(0).normal(size=(STEPS, len(KEYS)))).cumsum(axis=0) / 1000
    return [{"step": float(s), **dict(zip(KEYS, of, strict=True))} for s, of in enumerate(values.tolist(), 1)]


def test_a_run_of_ten_thousand_steps_loads_at_once(page: Page, tmp_path: Path) -> None:
    """In under two seconds of processor time, with the plots in view drawn; of other tabs nothing is made."""
    (tmp_path / "rollouts").mkdir()
    for step in (1, 5000, STEPS):
        groups = [group([sample(f"p{i}", text=f"answer {i}", reward=i / 300, response_len=40)]) for i in range(300)]
        write_rollouts(tmp_path / "rollouts" / f"step_{step}.jsonl", groups)
    made = tmp_path / "long.html"
    made.write_text(page_text([run_data(tmp_path, long_run())], [sample_data(tmp_path)]))
    assert made.stat().st_size < 8 << 20
    seconds = []
    for _ in range(3):
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        before = task_s(session)
        page.goto(made.as_uri())
        page.wait_for_selector("#panel-reward .main-svg")
        seconds.append(task_s(session) - before)
        if seconds[-1] < LOAD_CPU_S:
            break
    assert min(seconds) < LOAD_CPU_S, seconds
    assert page.locator("#title").inner_text() == tmp_path.name and "step 10,000" in page.locator("#state").inner_text()
    assert page.locator("#panel-gantt").count() == 0
    points = page.evaluate("document.querySelector('#panel-reward .plot').data.map((t) => t.x.length)")
    assert points and max(points) <= 1000


def task_s(session: Any) -> float:
    """Processor time of the page's main thread."""
    found = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
    return float(found["TaskDuration"])


def hostile_run(run_dir: Path) -> Path:
    row = {
        "rollout/reward/mean": 0.5,
        f"rollout/reward/{HOSTILE}/mean": 0.5,
        f"eval/{HOSTILE}/avg@1": 0.5,
        f"routing/expert_agreement/{HOSTILE}": 0.5,
        "perf/train_s": 1.0,
        "perf/step_s": 1.0,
        "wall_s": 1.0,
    }
    write_rows(run_dir, [(1, row), (2, row | {"wall_s": 3.0})])
    texts = [f"plain words {i}" for i in range(5)] + [HOSTILE]
    groups = [group([sample(f"p{i}", text=text, reward=i / 10)], answer=HOSTILE) for i, text in enumerate(texts)]
    write_rollouts(run_dir / "rollouts" / "step_2.jsonl", groups)
    (run_dir / "config.toml").write_text(f"# {HOSTILE}\n[alerts]\n{json.dumps(HOSTILE)} = 1\n")
    (run_dir / "incidents").mkdir()
    (run_dir / "incidents" / "1.md").write_text(f"# {HOSTILE}")
    return run_dir


def test_hostile_text_stays_text_in_every_tab_and_samples_are_found(page: Page, tmp_path: Path) -> None:
    page.goto(write_report(hostile_run(tmp_path / "<img src=x>")).as_uri())
    title = page.title()
    tabs = page.locator("#tabs button")
    for i in range(tabs.count()):
        tabs.nth(i).click()
        page.evaluate("document.querySelectorAll('.panel').forEach((p) => p.scrollIntoView())")
    page.click("#tab-learning")
    page.wait_for_selector("#panel-parts .main-svg")
    page.click("#tab-alignment")
    page.wait_for_selector("#panel-layers .main-svg")
    drawn = page.evaluate("[...document.querySelectorAll('#panel-layers .ytick text')].map((t) => t.textContent)")
    assert drawn == [HOSTILE[:60]]
    assert page.title() == title and page.locator("img, svg a, a[href], b").count() == 0
    page.click("#tab-events")
    assert f"alerts.{HOSTILE}: " in page.locator(".alert").last.inner_text()
    assert page.locator("details pre").inner_text() == f"# {HOSTILE}"
    assert "[object" not in page.content().split("</script>")[-1]
    page.click("#tab-samples")
    assert page.locator("#list button").count() == 6
    page.fill("#search", "PLAIN 3")
    assert page.locator("#list button").count() == 1 and page.locator("#count").inner_text().startswith("1 sample of 6")
    page.click("#list button")
    assert page.locator("#response").inner_text() == "plain words 3"
    page.fill("#search", "onerror")
    page.get_by_label("reward from").fill("0.45")
    assert page.locator("#list button").count() == 1
    page.click("#list button")
    assert page.locator("#response").inner_text() == HOSTILE
    page.get_by_label("to", exact=True).fill("0.46")
    assert page.locator("#list button").count() == 0


def test_tokens_are_coloured_and_turns_folded(page: Page, tmp_path: Path) -> None:
    row = {
        "prompt": "p", "response": "r", "answer": None, "reward": 1.0, "index": 0, "finish": "stop", "tokens": 3,
        "versions": [[0, 0, 1], [1, 1, 3]], "token_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 1, 0, 1],
        "logprobs": [-0.5, -1.0, -0.25], "trainer_logprobs": [-1.5, -1.0, 0.0], "advantages": [1.0, -1.0, 0.0],
    }  # fmt: skip
    write_rows(tmp_path, [(2, {"a": 1.0})])
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_2.jsonl").write_text(json.dumps(row) + "\n")
    page.goto(write_report(tmp_path).as_uri())
    page.click("#tab-samples")
    turns = page.locator("#detail details")
    assert turns.locator("summary").all_inner_texts() == [
        *("prompt: 1 token", "turn 1 of 2: 2 tokens", "environment: 1 token", "turn 2 of 2: 1 token")
    ]
    assert [turns.nth(i).evaluate("d => d.open") for i in range(4)] == [False] * 4
    turns.nth(1).locator("summary").click()
    shades = {}
    for name in ("log-prob gap", "advantage", "staleness"):
        page.get_by_label("coloured by").select_option(label=name)
        shades[name] = turns.nth(1).locator(".tokens span").evaluate_all("s => s.map((e) => e.style.background)")
    assert shades["log-prob gap"] == ["rgba(0, 114, 178, 0.75)", "rgba(213, 94, 0, 0)"]
    assert shades["advantage"] == ["rgba(213, 94, 0, 0.75)", "rgba(0, 114, 178, 0.75)"]
    assert shades["staleness"] == ["rgba(213, 94, 0, 0.75)", "rgba(213, 94, 0, 0)"]
    assert "log-prob gap -1" in str(turns.nth(1).locator(".tokens span").first.get_attribute("title"))


def test_runs_are_drawn_over_each_other(page: Page, tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_rows(tmp_path / name, [(s, {"rollout/reward/mean": s / 10, f"only/{name}": 1.0}) for s in (1, 2, 3)])
    page.goto(write_page([tmp_path / "first", tmp_path / "second"], tmp_path / "both.html").as_uri())
    page.wait_for_selector("#panel-reward .main-svg")
    names = page.evaluate("document.querySelector('#panel-reward .plot').data.map((t) => t.name)")
    assert names == ["first", "second"] and page.locator("#title").inner_text() == "first · second"
    page.locator("#panel-publish").scroll_into_view_if_needed()
    assert page.locator("#panel-publish .missing").inner_text().startswith("No data: ")
    page.click("#tab-figures")
    assert page.locator("th").all_inner_texts()[1:4] == ["first: first", "first: last", "first: best"]
    page.locator("main input").fill("only/")
    assert page.locator("tbody tr").count() == 2


def wait_for(page: Page, expression: str) -> None:
    """playwright's `wait_for_function` evaluates inside the page, whose policy forbids it."""
    for _ in range(600):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(expression)


def test_a_served_page_follows_the_run(page: Page, tmp_path: Path) -> None:
    write_rows(tmp_path, [(1, {"rollout/reward/mean": 0.25})])
    with listening("127.0.0.1", 0) as listener:
        config = uvicorn.Config(app(LiveRun(tmp_path), None, poll_s=0.05), log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            page.goto(f"http://127.0.0.1:{listener.getsockname()[1]}/")
            page.wait_for_selector("#panel-reward .main-svg")
            write_rows(tmp_path, [(2, {"rollout/reward/mean": 0.75})])
            write_rollouts(tmp_path / "rollouts" / "step_2.jsonl", [group([sample(text="new", reward=1.0)])])
            wait_for(page, "document.querySelector('#panel-reward .plot').data.at(-1).y.at(-1) === 0.75")
            wait_for(page, "document.getElementById('state').textContent.startsWith('step 2')")
            page.click("#tab-samples")
            wait_for(page, "document.getElementById('response')?.textContent === 'new'")
            write_rows(tmp_path, [(1, {"rollout/reward/mean": 0.125})])
            page.click("#tab-overview")
            wait_for(page, "document.querySelector('#panel-reward .plot').data[0].y[0] === 0.125")
        finally:
            page.goto("about:blank")  # no question is open when the server ends
            server.should_exit = True
            thread.join(30)
