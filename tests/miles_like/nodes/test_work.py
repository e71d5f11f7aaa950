"""Work on a cluster's nodes is bounded by its progress: slow work ends well, a process that hangs or was stopped is
named, its stacks are kept, and the others are ended.

Not covered: several machines, a node that is lost.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from miles_like.nodes.members import living_nodes
from miles_like.nodes.session import start_ray, stop_ray
from miles_like.nodes.work import on_every_node, over_nodes
from tests.support.refusals import refuses
from tests.support.slow_work import Slow

LIMIT_S = 8.0


@pytest.fixture(scope="module", autouse=True)
def ray() -> Iterator[None]:
    start_ray(None)
    yield
    stop_ray()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.long(beside="tests/miles_like/nodes/test_work.py")
def test_work_that_takes_longer_than_the_limit_ends_well_while_it_makes_progress(tmp_path: Path) -> None:
    """Of both kinds, side by side."""

    def copies(progress: Callable[[], None]) -> dict[str, int]:
        for _ in range(4):
            time.sleep(LIMIT_S / 3)
            progress()
        return {"done": 1}

    began = time.monotonic()
    with ThreadPoolExecutor(max_workers=1) as pool:
        copied = pool.submit(on_every_node, copies, living_nodes(), timeout_s=LIMIT_S)
        over_nodes(Slow(tmp_path, each_s=3.5), range(6), nodes=living_nodes(), each=2, timeout_s=LIMIT_S)
        assert time.monotonic() - began > LIMIT_S
        assert copied.result() == [{"done": 1}]
    assert all((tmp_path / str(i)).is_file() for i in range(6))


@pytest.mark.parametrize(
    "how", [pytest.param("hangs", marks=pytest.mark.long(beside="tests/miles_like/nodes/test_work.py")), "stopped"]
)
def test_a_process_that_makes_no_progress_is_named_and_its_stacks_are_kept(tmp_path: Path, how: str) -> None:
    with refuses(RuntimeError, 8, "cluster.timeout_s") as e:
        over_nodes(Slow(tmp_path, how), range(40), nodes=living_nodes(), each=2, timeout_s=LIMIT_S)
    sentence = str(e.value)
    assert "\n" not in sentence
    found = re.search(r"(/\S+\.err)\b", sentence)  # a stopped one is let go on before it writes them
    assert found and "slow_work.py" in Path(found[1]).read_text().rpartition("the stacks of process")[2]
    until = time.monotonic() + 30
    pids = {int(p.read_text()) for p in tmp_path.glob("*.pid") if not (tmp_path / p.stem).exists()}
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.2)
    assert pids and not any(map(alive, pids))


def test_the_first_failure_is_raised_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere/\d\.pid"):  # of any of the four
        over_nodes(Slow(tmp_path / "nowhere"), range(4), nodes=living_nodes(), each=2, timeout_s=LIMIT_S)
