"""A run through Ray is killed four times, in mid-generation, mid-step, mid-publish and mid-save, and resumed each time:
it is then the run that was never killed, bit for bit.

Nothing in the run knows of the kills. From outside a process is stopped (SIGSTOP) while it seems to be at the point,
what proves it is read while it stands there, and only then is SIGKILL sent; otherwise it goes on. Not covered: all
victims at all points, synchronous runs (tests/laws/test_kills.py has them, without Ray); clusters of several nodes.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from miles_like.checkpoint.run_state import load_latest
from rollout.server_key import VARIABLE, ServerKey
from rollout.wire.endpoints import SERVER_INFO
from tests.e2e.conftest import SMALL
from tests.e2e.looked_at import descendants
from tests.e2e.test_faults import ended, named, started
from tests.support.local_run import OF_SERVERS, untimed
from tests.support.refusals import check_refusal

STEPS = 10
RUN = (
    *SMALL,
    *("--set", "rollout.restarts=0"),
    *("--set", "cluster.rebuilds=0"),
    *("--set", f"train.steps={STEPS}"),
    *("--set", "eval.every=4"),
    *("--set", "rollout.request_timeout_s=60.0"),
    *("--set", "rollout.max_new_tokens=16"),
    *("--set", "alignment.deterministic=true"),
    *("--set", "buffer.max_staleness=1"),
    *("--set", "checkpoint.every=1"),
    *("--set", "checkpoint.asynchronous=true"),
    *("--set", "publish.bucket_bytes=100000"),
)
Seen = dict[str, Any]


def key_of(driver: Any) -> ServerKey:
    """The run's key, from the environment of its server: the same user's processes can read it there."""
    for process in named(driver, "rollout.embedded.server"):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if (text := process.environ().get(VARIABLE)) is not None:
                return ServerKey.parse(text, "the server's environment")
    raise AssertionError("no process of the run has the server's key")


def server_of(driver: Any, run_dir: Path) -> Seen:
    """What the newest server says of itself."""
    log = max((run_dir / "logs").glob("embedded_*.log"), key=lambda p: p.stat().st_mtime)
    url = f"http://127.0.0.1:{log.stem.removeprefix('embedded_')}"
    headers = key_of(driver).headers(SERVER_INFO)
    reply = httpx.get(url + SERVER_INFO, headers=headers, timeout=30, trust_env=False)
    assert reply.status_code == 200, reply.text
    return dict(reply.json()["internal_states"][0])


def latest(run_dir: Path) -> int:
    name = run_dir / "checkpoints" / "latest"
    return int(name.read_text().strip().removeprefix("step_")) if name.exists() else 0


class Standing:
    """Stops a process for as long as it is looked at."""

    def __init__(self, process: psutil.Process) -> None:
        self.process = process

    def __enter__(self) -> psutil.Process:
        self.process.suspend()
        return self.process

    def __exit__(self, *_: object) -> None:
        if self.process.is_running():
            self.process.resume()


def in_generation(driver: Any, run_dir: Path) -> Seen | None:
    """Requests are running while the driver stands."""
    with Standing(psutil.Process(driver.pid)) as process:
        seen = server_of(driver, run_dir)
        if not seen["running"]:
            return None
        process.kill()
        return seen


def in_step(driver: Any, run_dir: Path) -> Seen | None:
    """Ray names a worker by the method that it runs."""
    for rank in named(driver, "ray::_Rank.train"):
        with Standing(rank):
            title = " ".join(rank.cmdline())
            if "ray::_Rank.train" in title:
                rank.kill()
                return {"title": title.strip()}
    return None


def in_publication(driver: Any, run_dir: Path) -> Seen | None:
    """The server is paused, and a rank that publishes stands."""
    for rank in named(driver, "ray::_Rank.publish"):
        with Standing(rank):
            seen = server_of(driver, run_dir)
            if "ray::_Rank.publish" in " ".join(rank.cmdline()) and seen["paused"]:
                module = "rollout.embedded.server"  # its guard has the same words, further on
                (server,) = [p for p in named(driver, module) if p.cmdline()[2] == module]
                server.kill()
                return seen
    return None


def in_save(driver: Any, run_dir: Path) -> Seen | None:
    """Files of a checkpoint are there that has no name yet, while the driver stands."""
    with Standing(psutil.Process(driver.pid)) as process:
        checkpoints = run_dir / "checkpoints"
        for folder in checkpoints.glob("step_*"):
            files = sorted(p.name for p in folder.iterdir())
            if "run_state.json" not in files and folder.name != f"step_{latest(run_dir)}" and files:
                process.kill()
                return {"files": files, "step": folder.name}
    return None


def caught(
    driver: Any, run_dir: Path, at: Callable[[Any, Path], Seen | None], after: int
) -> tuple[Seen, list[psutil.Process]]:
    """The witness of the kill, once a checkpoint later than `after` is there, and the run's processes until then."""
    deadline = time.monotonic() + 200
    family: list[psutil.Process] = []
    while time.monotonic() < deadline:
        assert driver.poll() is None, driver.communicate()[1]
        if latest(run_dir) > after:
            family = family or descendants(driver)
            if (seen := at(driver, run_dir)) is not None:
                return seen, family
        time.sleep(0.003)
    raise AssertionError(f"{at.__name__}: not caught within 200 s, at step {latest(run_dir)}")


def agents(family: list[psutil.Process]) -> list[psutil.Process]:
    """Ray's own, which take their time to see that their raylet was killed; they hold nothing of a run."""
    found = []
    for p in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            if p.name() in ("ray::RuntimeEnvAgent", "ray::DashboardAgent"):
                found.append(p)
    return found


@pytest.fixture(scope="module")
def whole(run: Any, home: Path) -> Path:
    """The run that is never killed."""
    done = run("--run-dir", str(home / "unkilled"), *RUN)
    assert done.returncode == 0, done.stderr[-3000:]
    return home / "unkilled"


@pytest.mark.long(beside="tests/laws/test_kills.py")
def test_a_run_killed_four_times_is_the_run_that_was_never_killed(whole: Path, run: Any, home: Path) -> None:
    run_dir = home / "killed"
    errors: dict[str, str] = {}
    for at in (in_generation, in_step, in_publication, in_save):
        after = latest(run_dir)
        with started(run_dir, *RUN, *(["--resume"] if run_dir.exists() else [])) as process:
            seen, family = caught(process, run_dir, at, after)
            if at in (in_step, in_publication):
                errors[at.__name__] = ended(process, family)
            else:
                process.wait(timeout=30)
            ours = [p for p in family if p not in agents(family)]
            _, alive = psutil.wait_procs(ours, timeout=60)
            assert not alive, [p.cmdline() for p in alive]
        print(json.dumps({at.__name__: seen, "latest": latest(run_dir)}))
        found = load_latest(run_dir / "checkpoints")
        assert found is not None and found[1].step >= after  # whole, or it would be refused
        assert not (run_dir / ".complete.json").exists()
    moment = "it depends on the moment"
    check_refusal(errors["in_step"], "a worker process died", "logs/", unrecorded=moment)
    facts = ("were not published", "restart the run with --resume")
    check_refusal(errors["in_publication"], *facts, unrecorded=moment)
    done = run("--run-dir", str(run_dir), *RUN, "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    for step in range(1, STEPS + 1):
        kept = [(where / "rollouts" / f"step_{step}.jsonl").read_bytes() for where in (run_dir, whole)]
        assert kept[0] == kept[1], f"samples of step {step}"
    assert (run_dir / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()
    assert untimed(run_dir / "metrics.jsonl") == untimed(whole / "metrics.jsonl")


@pytest.mark.long(beside="tests/laws/test_replaced_servers.py")
def test_a_run_whose_only_server_dies_in_a_publication_goes_on(whole: Path, home: Path) -> None:
    """Another is started in its slot; what was in flight on it waits, and is sampled again."""
    run_dir = home / "replaced"
    with started(run_dir, *RUN, "--set", "rollout.restarts=3") as process:
        seen, family = caught(process, run_dir, in_publication, 0)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
        _, alive = psutil.wait_procs([p for p in family if p not in agents(family)], timeout=60)
        assert not alive, [p.cmdline() for p in alive]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert seen["paused"] and sum(row.get("rollout/restarts", 0.0) for row in rows) == 1
    assert (run_dir / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()
    assert untimed(run_dir / "metrics.jsonl", *OF_SERVERS) == untimed(whole / "metrics.jsonl", *OF_SERVERS)
