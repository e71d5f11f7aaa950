"""An upload leaves the directory's files on the hub, and no weights of an earlier one; what the hub refuses is one
sentence.

The hub is tests/support/fake_hub.py, the client is huggingface_hub's own. Not covered: Xet, which the real hub prefers;
what an export writes (tests/miles_like/run/test_export_run.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from miles_like.hf.push import check_push, push
from tests.support.fake_hub import FakeHub
from tests.support.refusals import refuses
from tests.support.spawn import free_port


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with FakeHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.setenv("HF_TOKEN", hub.token)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield hub


def directory(path: Path, **files: bytes) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / name.replace("__", "-").replace("_", ".")).write_bytes(content)
    return path


def on(hub: FakeHub, repo: str) -> dict[str, bytes]:
    return dict(hub.files(repo, str(hub.at(repo, "main"))))


def test_the_files_are_on_the_hub_and_earlier_weights_are_not(hub: FakeHub, tmp_path: Path) -> None:
    """A loader takes model.safetensors, if it is there, before the shards of an index."""
    check_push("me/new")
    one = directory(tmp_path / "one", config_json=b"{}", model_safetensors=b"1" * 1000)
    url = push(one, "me/new", "first")
    assert url == f"{hub.url}/me/new/commit/{hub.at('me/new', 'main')}" and hub.private == {"me/new"}
    assert on(hub, "me/new") == {"config.json": b"{}", "model.safetensors": b"1" * 1000}
    shards = {"model__1_safetensors": b"2", "model__2_safetensors": b"3", "model_safetensors_index_json": b"{}"}
    two = directory(tmp_path / "two", **shards)
    push(two, "me/new", "second")
    assert on(hub, "me/new") == {p.name: p.read_bytes() for p in two.iterdir()} | {"config.json": b"{}"}


def test_what_cannot_be_uploaded_is_one_sentence(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refuses(ValueError, "--push a/b/c", "OWNER/NAME"):
        check_push("a/b/c")
    one = directory(tmp_path / "one", model_safetensors=b"1")
    hub.full = True
    with refuses(ValueError, "me/new", one, "hf upload me/new", unrecorded="a port and a request's id"):
        push(one, "me/new", "first")
    assert on(hub, "me/new") == {}
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with refuses(ValueError, "--push me/new", "HF_TOKEN", unrecorded="the hub's client has its part in it"):
        check_push("me/new")
    monkeypatch.delenv("HF_TOKEN")
    with refuses(ValueError, "--push me/new", "hf auth login", unrecorded="the hub's client has its part in it"):
        check_push("me/new")
    monkeypatch.setenv("HF_TOKEN", hub.token)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with refuses(ValueError, "--push me/new", "HF_TOKEN", unrecorded="the hub's client has its part in it"):
        check_push("me/new")
