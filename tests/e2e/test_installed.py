"""What `pip install` leaves on a machine without the checkout: every module, the files of the demo and of `init`, and
what an index shows of the package.

Why it must hold: each node of a cluster installs the package; a module that is left out fails at import there, and
nowhere that the package is installed as editable. The demo itself runs in test_pipeline.py. Not covered: that the
dependencies resolve (make resolve).
"""

from __future__ import annotations

import email
import re
import zipfile
from pathlib import Path

import pytest
import yaml

from setup import repository
from tests.support.installed import PACKAGES, ROOT, without_checkout

IMPORT = """
import importlib, pkgutil, sys
import megatron_bridge.trainer  # prepares the device, before anything imports megatron
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(package.__path__, name + "."):
        importlib.import_module(found.name)
        print(found.name)
"""
IMPORT_ALONE = """
import importlib, os, pkgutil, sys
from megatron_bridge.device.device import init_device
init_device()  # before anything imports megatron
import megatron.core.dist_checkpointing, megatron.core.distributed, megatron.core.models.gpt, megatron.core.optimizer
import matplotlib.pyplot, ray, rich.console, safetensors, torch, transformers, typer  # libraries: once for all children
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for found in pkgutil.walk_packages(package.__path__, name + "."):
        child = os.fork()  # so that no module is there because another one imported it
        if child == 0:
            importlib.import_module(found.name)
            print(found.name, flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            sys.exit(f"{found.name} cannot be imported alone")
"""


BESIDE = re.compile(r'"\./(tiny/[\w./]+)"')  # files that the demo's configurations name


def modules() -> set[str]:
    files = [f.relative_to(ROOT) for package in PACKAGES for f in (ROOT / package).rglob("*.py")]
    return {".".join(f.with_suffix("").parts).removesuffix(".__init__") for f in files} - set(PACKAGES)


def test_every_module_of_the_checkout_is_installed_and_imported(python: Path, tmp_path: Path) -> None:
    done = without_checkout([str(python), "-c", IMPORT, *PACKAGES], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert modules() == set(done.stdout.split())


@pytest.mark.long(beside="tests/e2e/test_installed.py")
def test_every_module_is_imported_before_all_others(python: Path, tmp_path: Path) -> None:
    """Each in a process that has libraries and none of our modules but the device's."""
    done = without_checkout([str(python), "-c", IMPORT_ALONE, *PACKAGES], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert modules() == set(done.stdout.split())


def test_the_wheel_has_the_demo_the_templates_and_its_types_and_no_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"miles_like/demo_files/tiny/train.jsonl", "miles_like/py.typed"} <= set(names)
    package = ROOT / "miles_like"
    data = [
        *(package / "templates").glob("*/*"),
        *(package / "demo_files").glob("*.toml"),
        package / "rewards" / "counter_examples.jsonl",
    ]
    data += {package / "demo_files" / path for file in data for path in BESIDE.findall(file.read_text())}
    assert {str(f.relative_to(ROOT)) for f in data} <= set(names)
    tops = {n.split("/")[0] for n in names if ".dist-info/" not in n}
    assert tops == set(PACKAGES)


def test_the_metadata_is_what_an_index_shows(wheel: Path) -> None:
    """The description has no link that needs the repository beside it; what CITATION.cff also has is the same."""
    with zipfile.ZipFile(wheel) as files:
        (name,) = [n for n in files.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(files.read(name))
        licence = files.read(name.replace("METADATA", "licenses/LICENSE"))
    page = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown" and "# miles-like" in page
    assert [one for one in re.findall(r"\]\(([^)]*)\)", page) if not one.startswith("https://")] == []
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert metadata["Name"] == cited["title"] and metadata["Version"] == cited["version"]
    assert metadata["Author"] == cited["authors"][0]["name"] and metadata["Keywords"].split(",") == cited["keywords"]
    assert metadata["License-Expression"] == cited["license"] and licence == (ROOT / "LICENSE").read_bytes()
    assert metadata["Summary"] == cited["abstract"].removesuffix(".")
    urls = dict(one.split(", ", 1) for one in metadata.get_all("Project-URL", []))
    assert urls.get("Repository", "").rstrip("/") == repository() == cited.get("repository-code", "").rstrip("/")
    classifiers = metadata.get_all("Classifier")
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(classifiers)
    assert not [one for one in classifiers if one.startswith("License ::")], "the expression takes its place"
    assert metadata["Requires-Python"] == ">=3.11" and "Programming Language :: Python :: 3.11" in classifiers
