"""As test_run_nodes.py, on as many nodes as the large shipped configurations have: 32, which take minutes to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.placed import CONFIGS, PLACED, RAYLET, check_light, check_seen, probe, reserved, shipped
from tests.support.pretended import PretendedCluster, pretended_cluster

LARGE = [path for path in CONFIGS if path.stem in PLACED and PLACED[path.stem].nodes > 2]
HOSTS = range(11, 43)  # in the order of the run

pytestmark = pytest.mark.long(beside="tests/miles_like/cluster/test_run_nodes.py")


@pytest.fixture(scope="module")
def cluster() -> Iterator[PretendedCluster]:
    with pretended_cluster(HOSTS[::-1], RAYLET) as made:
        yield made


@pytest.mark.parametrize("path", LARGE, ids=lambda p: p.stem)
def test_every_process_of_a_large_configuration_has_its_node_and_devices(
    cluster: PretendedCluster, tmp_path: Path, path: Path
) -> None:
    config, plan, wanted = shipped(path)
    with reserved(config.cluster.nodes) as held:
        seen = probe(config, plan, held, tmp_path)
    assert seen.keys() == wanted.processes().keys()
    check_light(seen)
    check_seen(seen, wanted, HOSTS)
