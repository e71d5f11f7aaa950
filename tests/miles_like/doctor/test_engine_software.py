"""The engine's interpreter reports the packages of its environment, and one that cannot says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from miles_like.doctor.software import engine_software, software


def test_the_engine_s_environment_is_read_by_its_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "engine")], check=True)
    python = str(tmp_path / "engine" / "bin" / "python")
    (packages,) = (tmp_path / "engine").glob("lib/python3*/site-packages")
    for place, name, version in ((packages, "sglang", "0.5.23"), (tmp_path, "ray", "9.9")):
        info = place / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\nRequires-Dist: torch==2.14.1\n")
        (info / "WHEEL").write_text("Tag: cp311-cp311-manylinux_2_34_x86_64\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the trainer: it must not reach the engine
    found = engine_software(python)
    assert isinstance(found, dict)
    assert found["packages"] == {"python": software()["packages"]["python"], "sglang": "0.5.23"}
    assert found["requires"] == {"sglang": ["torch==2.14.1"]} and found["glibc_needed"] == {"sglang": "2.34"}


def test_an_interpreter_that_is_none_says_why(tmp_path: Path) -> None:
    assert "No such file" in str(engine_software(str(tmp_path / "python")))
    (broken := tmp_path / "broken").write_text("#!/bin/sh\necho no libpython >&2; exit 3\n")
    broken.chmod(0o755)
    assert engine_software(str(broken)) == "no libpython"
    assert engine_software(sys.executable) == software()
