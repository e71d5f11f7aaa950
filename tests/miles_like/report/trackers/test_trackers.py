"""Rows, configuration and samples of a run in W&B, MLflow and Trackio: by their own clients, offline, over a resume and
a step back; and what is left of a run whose tracker hangs.

The trackers' stores are read by their own code, W&B's file by the format of its log (that of LevelDB's log files).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from miles_like.config.sections.watched.trackers import TrackersConfig
from miles_like.report.trackers.beside import Trackers
from miles_like.report.trackers.process import Forwarder
from miles_like.report.trackers.run_files import Rows, samples_of, unsent
from miles_like.report.trackers.secrets_in_text import without_secrets
from miles_like.report.trackers.sent import ReplacedError, read_sent

pytestmark = pytest.mark.slow
LONG = pytest.mark.long(
    beside="tests/miles_like/report/trackers/test_trackers.py"
)  # its database is made by 60 migrations
PLANTED = "planted-key-7e1f"


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def row(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "wall_s": 1.5 * step, "train/loss": loss, "train/grad_norm": None}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of three steps."""
    where = tmp_path / "demo"
    (where / "rollouts").mkdir(parents=True)
    (where / "config.toml").write_text('seed = 3\n\n[optimizer]\nname = "muon"\n')
    start = {"started": "2026-11-27T10:00:00+00:00", "host": "n0", "commit": "c0ffee", "versions": {"torch": "2.13"}}
    (where / "starts.jsonl").write_text(lines(start))
    (where / "metrics.jsonl").write_text(lines(*(row(step, 1 / (step + 1)) for step in range(4))))
    texts = [{"prompt_id": f"p{i}", "index": i, "prompt": "2+2=", "response": str(i), "answer": "4"} for i in range(8)]
    shared = {"reward_parts": {}, "finish": "stop", "tokens": 1, "token_ids": [1]}
    samples = lines(*({**text, "reward": text["index"] / 8, **shared} for text in texts))
    (where / "rollouts" / "step_2.jsonl").write_text(samples)
    return where


def settings(name: str, **keys: Any) -> TrackersConfig:
    given = {"offline": True, "samples_every": 2, "samples": 4, "exit_s": 240} | keys
    return TrackersConfig.model_validate({"use": [name], **given})


def forwarded(run_dir: Path, config: TrackersConfig) -> list[str]:
    """The sentences for the user when the processes of the trackers have sent what there is."""
    said: list[str] = []
    trackers = Trackers(config, run_dir, said.append)
    trackers.start()
    trackers.end()
    return said


# ---- what each tracker has


def wandb_records(run_dir: Path) -> Iterator[Any]:
    """The records of all transaction logs, in order: blocks of 32 KiB of chunks (checksum, length, kind)."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted((run_dir / "trackers" / "wandb").rglob("*.wandb")):
        data, at, record = path.read_bytes(), 7, b""  # after the file's header
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            _, length, kind = struct.unpack_from("<IHB", data, at)
            record, at = record + data[at + 7 : at + 7 + length], at + 7 + length
            if kind in (1, 4):  # whole, or the last part
                yield Record.FromString(record)
                record = b""


def of_wandb(run_dir: Path, project: str) -> dict[str, Any]:
    losses, tables, tags, found = [], [], list[str](), dict[str, Any]()
    for record in wandb_records(run_dir):
        if record.HasField("run"):
            found |= {"project": record.run.project, "id": record.run.run_id}
            tags = list(record.run.tags)
            found |= {
                "/".join([*([i.key] if i.key else []), *i.nested_key]): json.loads(i.value_json)
                for i in record.run.config.update
            }
        items = {"/".join([*([i.key] if i.key else []), *i.nested_key]): i.value_json for i in record.history.item}
        if "train/loss" in items:
            losses.append((int(record.history.step.num), json.loads(items["train/loss"])))
        if any(key.startswith("samples") for key in items):
            tables.append(items)
    text = "".join(p.read_text() for p in (run_dir / "trackers" / "wandb").rglob("*.table.json"))
    config = {"seed": found["seed"], "optimizer": found["optimizer"]["name"]} | found["run"]
    config["back"] = [found[k] for k in found if k.startswith("rolled_back")] if tags == ["rolled back"] else []
    assert found["project"] == project and found["id"] == read_sent(run_dir, "wandb").run_id
    return {"losses": losses, "tables": len(tables), "samples": text, **config}


def of_mlflow(run_dir: Path, project: str) -> dict[str, Any]:
    from mlflow import MlflowClient

    client, run = MlflowClient(f"sqlite:///{run_dir}/trackers/mlflow/mlflow.db"), read_sent(run_dir, "mlflow").run_id
    found = client.get_run(run)
    experiment = client.get_experiment_by_name(project)
    assert experiment is not None and found.info.experiment_id == experiment.experiment_id
    files = sorted((run_dir / "trackers" / "mlflow").rglob("samples/*.json"))
    return {
        "losses": [(m.step, m.value) for m in client.get_metric_history(run, "train/loss")],
        "tables": len(files),
        "samples": "".join(path.read_text() for path in files),
        "seed": int(found.data.params["seed"]),
        "optimizer": found.data.params["optimizer.name"],
        "commit": found.data.tags["mlflow.source.git.commit"],
        "versions": {"torch": found.data.tags["run.versions.torch"]},
        "back": [text for key, text in found.data.tags.items() if key.startswith("rolled_back.")],
    }


def of_trackio(run_dir: Path, project: str) -> dict[str, Any]:
    (database,) = (run_dir / "trackers" / "trackio").glob(f"{project}*.db")
    with contextlib.closing(sqlite3.connect(database)) as opened:
        metrics = [(s, json.loads(m)) for s, m in opened.execute("SELECT step, metrics FROM metrics ORDER BY id")]
        names = {name for (name,) in opened.execute("SELECT run_name FROM metrics")}
        ((config,),) = opened.execute("SELECT config FROM configs").fetchall()
        back = [text for (text,) in opened.execute("SELECT text FROM alerts WHERE step = 5")]
    assert names == {f"demo-{read_sent(run_dir, 'trackio').run_id}"}
    tables = [m["samples"] for _, m in metrics if "samples" in m]
    found = json.loads(config)
    return {
        "losses": [(s, m["train/loss"]) for s, m in metrics if "train/loss" in m],
        "tables": len(tables),
        "samples": json.dumps(tables),
        "seed": int(found["seed"]),
        "optimizer": found["optimizer.name"],
        "commit": found["run.commit"],
        "versions": {"torch": found["run.versions.torch"]},
        "back": back,
    }


STORES: dict[str, Callable[[Path, str], dict[str, Any]]] = {
    "wandb": of_wandb,
    "mlflow": of_mlflow,
    "trackio": of_trackio,
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=LONG if n == "mlflow" else ()) for n in STORES])
def test_a_resumed_run_goes_on_in_the_same_tracker_run(
    name: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is resumed at step 1 of 3: steps 2 and 3 are there already, with other losses, and are not sent twice.
    Then it goes back with step 5 to step 3: the rows stay, and the run is marked."""
    secrets = {"WANDB_API_KEY": PLANTED * 3, "HF_TOKEN": PLANTED, "MLFLOW_TRACKING_PASSWORD": PLANTED}
    for key, value in secrets.items():
        monkeypatch.setenv(key, value)
    assert forwarded(run_dir, settings(name)) == []
    first = read_sent(run_dir, name)
    kept = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)[:2]
    (run_dir / "metrics.jsonl").unlink()
    later = [row(step, 10.0 + step) for step in range(2, 5)] + [{"step": 5, "wall_s": 7.0, "rollback/to": 3}]
    (run_dir / "metrics.jsonl").write_text("".join(kept) + lines(*later, row(6, 16.0)))
    assert forwarded(run_dir, settings(name)) == []
    found = STORES[name](run_dir, "miles-like")
    assert found["losses"] == [(0, 1.0), (1, 0.5), (2, pytest.approx(1 / 3)), (3, 0.25), (4, 14.0), (6, 16.0)]
    about = (found["seed"], found["optimizer"], found["commit"], found["versions"])
    assert about == (3, "muon", "c0ffee", {"torch": "2.13"})
    (back,) = found["back"]
    assert back.startswith("step 5 has the weights of step 3 again")
    assert found["tables"] == 1 and all(f"p{i}" in found["samples"] for i in (0, 1, 6, 7))
    state = read_sent(run_dir, name)
    assert (state.run_id, state.step, state.table, state.finished) == (first.run_id, 6, 6, True)
    assert state.owner != first.owner
    for path in run_dir.rglob("*"):
        assert not path.is_file() or PLANTED.encode() not in path.read_bytes(), path


# ---- a tracker that is down


@pytest.fixture
def hanging() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    held.append(server.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        for one in held:
            one.close()


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_server_that_hangs_holds_no_run(
    name: str, run_dir: Path, hanging: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process and those that its client has started are gone when `end` returns."""
    monkeypatch.setenv("WANDB_BASE_URL", hanging)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    keys: dict[str, Any] = {"mlflow_uri": hanging} if name == "mlflow" else {}
    said: list[str] = []
    trackers = Trackers(settings(name, offline=False, exit_s=3, **keys), run_dir, said.append)
    trackers.start()
    (process,) = trackers._processes.values()
    trackers.write(4, {})
    assert said == []
    if name == "mlflow":
        os.killpg(process.pid, signal.SIGSTOP)  # it cannot end itself either
    trackers.end()
    assert said == [
        f"{name}: 4 of 4 rows were not sent within trackers.exit_s = 3 s; `miles-like track {run_dir}` sends what is "
        "left"
    ]
    assert process.returncode is not None and not _of_group(process.pid)
    assert unsent(run_dir, read_sent(run_dir, name).step) == (4, 4)


def _of_group(group: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, of = stat.read_text().rpartition(")")[2].split()[:3]
            if int(of) == group and state not in "ZX":
                found.append(int(stat.parent.name))
    return found


class Flaky:
    """A client whose first attempts fail."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.got: list[int] = []

    def open(self, run: Any, settings: TrackersConfig, run_id: str) -> str:
        return "theirs"

    def log(self, step: int, metrics: Any, at: float) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError(f"https://me:secret@host refused {PLANTED}")
        self.got.append(step)

    def rolled_back(self, step: int, to: int) -> None: ...
    def table(self, step: int, rows: Any) -> None: ...
    def close(self) -> None: ...


def test_rows_are_sent_once_a_tracker_answers_again(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is reported without keys, in the log, in the state, and once on the console."""
    monkeypatch.setenv("MY_API_KEY", PLANTED)
    client, log, said, looks = Flaky(2), list[str](), list[str](), iter([False, False, True])
    watching = Trackers(settings("wandb"), run_dir, said.append)

    def ended(wait_s: float) -> bool:
        watching._processes = {"wandb": _Running()}  # type: ignore[dict-item]
        watching.write(1, {})
        return next(looks)

    (run_dir / "logs").mkdir()
    Forwarder(
        name="wandb", run_dir=run_dir, settings=settings("wandb"), ended=ended, say=log.append, make=lambda _: client
    ).run()
    assert client.got == [0, 1, 2, 3]
    assert log == ["ConnectionError: https://***@host refused ***"]
    assert said == [f"wandb: {log[0]}; the run goes on, and the rows are sent once it answers"]
    assert read_sent(run_dir, "wandb").run_id == "theirs" and read_sent(run_dir, "wandb").error == ""


class _Running:
    def poll(self) -> None: ...


def test_a_process_of_an_earlier_start_sends_nothing_more(run_dir: Path) -> None:
    client, looks = Flaky(0), iter([False, True])

    def ended(wait_s: float) -> bool:
        read_sent(run_dir, "wandb").claim(run_dir, "wandb")  # by a later start
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(lines(row(4, 0.1)))
        return next(looks)

    forwarder = Forwarder(
        name="wandb", run_dir=run_dir, settings=settings("wandb"), ended=ended, say=print, make=lambda _: client
    )
    with pytest.raises(ReplacedError):
        forwarder.run()
    assert client.got == [0, 1, 2, 3]


# ---- what is read


def test_a_row_that_is_half_written_or_not_passed_comes_again(run_dir: Path) -> None:
    rows, path = Rows(run_dir), run_dir / "metrics.jsonl"
    for step, metrics in rows.new():
        assert set(metrics) == {"wall_s", "train/loss"}
        if step == 1:
            break
    with path.open("a") as file:
        file.write('{"step": 4, "train')
    assert [step for step, _ in rows.new()] == [1, 2, 3]
    with path.open("a") as file:
        file.write('/loss": 0.5}\n')
    assert [*rows.new()] == [(4, {"train/loss": 0.5})]
    new = path.with_suffix(".new")
    new.write_text(lines(row(0, 1.0)))
    new.replace(path)
    assert [step for step, _ in rows.new()] == [0]


def test_a_table_has_the_lowest_and_the_highest_rewards(run_dir: Path) -> None:
    assert [s["prompt_id"] for s in samples_of(run_dir, 2, 4)] == ["p0", "p1", "p6", "p7"]
    assert [s["prompt_id"] for s in samples_of(run_dir, 2, 3)] == ["p0", "p1", "p7"]
    assert len(samples_of(run_dir, 2, 50)) == 8 and samples_of(run_dir, 1, 4) == []
    assert "token_ids" not in samples_of(run_dir, 2, 1)[0]


def test_secrets_are_kept_out_of_texts() -> None:
    environment = {"HF_TOKEN": "hf_abcdef", "TOKENIZERS_PARALLELISM": "falsely", "X_KEY": "ab"}
    text = "hf_abcdef falsely ab https://user:pass@host/path a@b"
    assert without_secrets(text, environment) == "*** falsely ab https://***@host/path a@b"


def test_the_process_beside_a_run_needs_no_torch() -> None:
    """It starts within the run's own start, on the cores of the driver."""
    import subprocess

    code = "import miles_like.report.trackers.process, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
