"""Law: a publication that goes wrong in the middle is named in one sentence, leaves no half-applied weights, and the
next try works.

A table of faults for each `publish.path`: a server that is killed, stopped, too slow, or out of memory; ranks whose
stream of weights breaks; files on disk that lose data; a version that goes back; a server of another model. Afterwards
every server that answers serves the version before, whole, and samples with it. Where a publication may go on without a
server (`goes_on`, as in a run that replaces servers), the others serve the version that was sent, and the server that
took the place of the lost one joins alone.

Embedded servers in processes, a publisher in another. Not covered: stock servers, whose weights change while they
arrive, so that they stay paused (tests/rollout/publish/test_publisher.py); whole runs (test_replaced_servers.py,
test_kills.py); other paths than those of PATHS.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import faulty_publications
from tests.support.faulty_publications import SHORT_S
from tests.support.forked import tail
from tests.support.local_run import shared_starter
from tests.support.refusals import check_refusal

PATHS = ("tensor", "disk", "distributed", "delta")
LONG = pytest.mark.long(beside="tests/laws/test_faults_of_a_publication.py")
PORT = "a free port"
Found = Mapping[str, Any]  # a faulty_publications.Found


@dataclass(frozen=True)
class Row:
    """A fault that leaves both servers alive. facts: of its sentence."""

    fault: str
    facts: tuple[object, ...]
    paths: tuple[str, ...] = PATHS


ALIVE = (
    Row("out of memory", ("version 2", "http://127.0.0.1", "1234", "--resume")),
    Row("cut off", ("Connection closed by peer",)),
    Row("back", ("version 2", "version 3", "http://127.0.0.1")),
    Row("truncated", ("version 5", "truncated"), paths=("disk",)),
    Row("truncated late", ("version 6", "truncated", "http://127.0.0.1"), paths=("disk",)),
)


def found(where: Path, path: str, case: str) -> dict[str, Found]:
    where.mkdir(exist_ok=True)
    assert shared_starter().call(where / "log", faulty_publications.run, where, path, case) == 0, tail(where / "log")
    out: dict[str, Found] = json.loads((where / "found.json").read_text())
    return out


def whole(one: Found, version: int, *numbers: str) -> None:
    """The publication succeeded, and these servers serve it."""
    assert not one["error"] and not one["failed"], one
    serves(one, version, *numbers)


def serves(one: Found, version: int, *numbers: str) -> str:
    """These servers hold the same weights and sample with this version; the weights' sum."""
    held = [one["served"][number] for number in numbers or ("0", "1")]
    assert all(x is not None and (x["version"], x["sampled"]) == (str(version), str(version)) for x in held), one
    (total,) = {x["sum"] for x in held}
    return str(total)


@pytest.mark.parametrize("path", [*PATHS[:2], *(pytest.param(path, marks=LONG) for path in PATHS[2:])])
def test_faults_that_a_server_survives(tmp_path: Path, path: str) -> None:
    them = found(tmp_path, path, "alive")
    whole(them["before"], 1)
    served, total = 1, serves(them["before"], 1)
    for row in (row for row in ALIVE if path in row.paths):
        one, again = them[row.fault], them[f"{row.fault}, again"]
        check_refusal(one["error"], *row.facts, unrecorded=PORT)
        assert serves(one, served) == total, row
        before, served = total, int(again["served"]["0"]["version"])
        whole(again, served)
        total = serves(again, served)
        assert total != before, row


FACTS: Mapping[str, tuple[object, ...]] = {
    "killed": ("died",),
    "stopped": (f"{SHORT_S:g}", "rollout.request_timeout_s"),
    "slow": (f"{SHORT_S:g}", "rollout.request_timeout_s"),
}
CASES = [
    pytest.param("killed", "tensor"),
    *(pytest.param("killed", path, marks=LONG) for path in PATHS[1:]),
    *(pytest.param("stopped", path, marks=LONG) for path in PATHS),
]
GOES_ON = [case for case in CASES if case.values[1] != "distributed"]  # a group loses the publication with a member
SLOW = [pytest.param("slow", path, marks=LONG) for path in PATHS]


@pytest.mark.parametrize(("fault", "path"), [*CASES, *SLOW])
def test_a_server_that_dies_or_hangs(tmp_path: Path, fault: str, path: str) -> None:
    them = found(tmp_path, path, fault)
    whole(them["before"], 1)
    check_refusal(them["broken"]["error"], "version 2", "http://127.0.0.1", *FACTS[fault], unrecorded=PORT)
    assert them["broken"]["served"].get("1") is None
    assert serves(them["broken"], 1, "0") == serves(them["before"], 1)
    whole(them["after"], 2)


@pytest.mark.parametrize(("fault", "path"), GOES_ON)
def test_a_publication_that_goes_on_without_a_server_that_dies_or_hangs(tmp_path: Path, fault: str, path: str) -> None:
    them = found(tmp_path, path, f"{fault}, goes on")
    whole(them["before"], 1)
    broken, joined = them["broken"], them["joined"]
    assert not broken["error"] and len(broken["failed"]) == 1 and broken["served"].get("1") is None
    total = serves(broken, 2, "0")
    assert total != serves(them["before"], 1)
    whole(joined, 2)
    assert serves(joined, 2) == total
    whole(them["after"], 3)


@pytest.mark.parametrize("path", [PATHS[0], *(pytest.param(path, marks=LONG) for path in PATHS[1:])])
def test_a_server_of_another_model(tmp_path: Path, path: str) -> None:
    them = found(tmp_path, path, "another model")
    check_refusal(them["broken"]["error"], "version 1", "http://127.0.0.1", unrecorded=PORT)
    first = [serves(them["broken"], 0, number) for number in ("0", "1")]  # from the directories of their start
    assert first[0] != first[1] and serves(them["after"], 1, "0") not in first
    whole(them["after"], 1, "0")
