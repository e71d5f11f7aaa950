"""The fetch stage against a hub on loopback: what is downloaded, what is kept of a broken download, what is refused.

The hub is tests/support/fake_hub.py, the client is huggingface_hub's own, the command is the user's; every law is read
from the exit status, stderr, the files left and the requests that the hub saw. Most of the time is the command's
imports, so the stories of this file run two at a time, each from its own directory and hub, and the tests look at what
came of them. Not covered: Xet, which the real hub prefers for large files; tokens; gated models; files above one chunk
of the client.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli_w

from miles_like.hf.checkpoint import HFCheckpoint
from tests.support.chosen import chosen
from tests.support.fake_hub import Asked, FakeHub, Files
from tests.support.refusals import check_refusal
from tests.support.spawn import free_port
from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

ROOT = Path(__file__).parents[2]
LONG = pytest.mark.long(beside="tests/e2e/test_fetch_hub.py")
NAME = "owner/tiny"
LAST = "model-00003-of-00003.safetensors"
SECOND = "model-00002-of-00003.safetensors"
MARKER = ".complete.json"
FOREIGN = ("HF_", "HUGGING", "TRANSFORMERS_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


class Site:
    """A directory to run from, with a configuration whose model is a hub name."""

    def __init__(self, home: Path) -> None:
        home.mkdir()
        self.home, self.run_dir = home, home / "runs" / "x"
        values = tomllib.loads((ROOT / "configs" / "tiny.toml").read_text(encoding="utf-8"))
        del values["extends"]  # which makes a model
        values["model"] = {"path": NAME}
        values["data"] = {k: str(ROOT / "configs" / path) for k, path in values["data"].items()}
        (home / "hub.toml").write_text(tomli_w.dumps(values), encoding="utf-8")

    def start(self, endpoint: str, *arguments: str) -> subprocess.Popen[str]:
        kept = {k: v for k, v in os.environ.items() if not k.upper().startswith(FOREIGN)}
        ours = {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(self.home / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": "5",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }
        script = str(ROOT / "scripts" / "run_deepseek.py")
        where = ("--config", str(self.home / "hub.toml"), "--run-dir", str(self.run_dir))
        return subprocess.Popen(
            [sys.executable, script, *where, *(arguments or ("--stages", "fetch"))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.home,
            env=kept | ours,
        )

    def run(self, endpoint: str, *arguments: str) -> SimpleNamespace:
        """Exit status and output; killed after two minutes."""
        process = self.start(endpoint, *arguments)
        try:
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
        return SimpleNamespace(status=process.returncode, out=out, err=err, marked=self.marked())

    @property
    def stage(self) -> Path:
        (found,) = self.home.glob("runs/cache/fetch-*")
        return found

    def marked(self) -> bool:
        return bool(list(self.home.glob(f"runs/cache/*/{MARKER}")))

    def files(self) -> dict[str, bytes]:
        """What later stages read, the client's own records included where they were left."""
        data = self.stage / "data"
        return {str(p.relative_to(data)): p.read_bytes() for p in sorted(data.rglob("*")) if p.is_file()}


def unserved_url() -> str:
    return f"http://127.0.0.1:{free_port()}"


def interrupted(home: Path, files: Files) -> SimpleNamespace:
    """The last shard breaks off, the branch moves, the download goes on; then the hub is gone."""
    site = Site(home)
    with FakeHub() as hub:
        commit = hub.push(NAME, files)
        hub.cut[LAST] = 5000
        broken = site.run(hub.url)
        revision = (site.stage / "revision").read_text()
        hub.cut.clear()
        hub.push(NAME, {**files, LAST: files[LAST][:-1] + b"\1", "config.json": files["config.json"] + b"\n"})
        before = len(hub.asked)
        whole = site.run(hub.url)
        asked = hub.asked[before:]
    return SimpleNamespace(
        site=site,
        commit=commit,
        revision=revision,
        broken=broken,
        whole=whole,
        asked=asked,
        skipped=site.run(unserved_url()),
    )


def killed(home: Path, files: Files) -> SimpleNamespace:
    """SIGKILL in the middle of a file, a second run; then a file is damaged while the hub is gone."""
    site = Site(home)
    with FakeHub() as hub:
        hub.push(NAME, files)
        hub.stall[SECOND] = 5000
        process = site.start(hub.url)
        try:
            stalled = hub.stalled.wait(timeout=60)
        finally:
            process.kill()
            process.communicate(timeout=20)
        partial = list(site.stage.rglob("*.incomplete"))
        marked = site.marked()
        hub.stall.clear()
        whole = site.run(hub.url)
    after = site.files()
    listed = set(json.loads((site.stage / MARKER).read_text())["files"])
    config = site.stage / "data" / "config.json"
    config.write_bytes(config.read_bytes().replace(b"true", b"null", 1))
    marker = (site.stage / MARKER).read_text()
    damaged = site.run(unserved_url())
    return SimpleNamespace(
        stalled=stalled,
        partial=partial,
        marked=marked,
        whole=whole,
        after=after,
        listed=listed,
        damaged=damaged,
        blessed=(site.stage / MARKER).read_text() != marker,
    )


def single(home: Path, files: Files | None, *arguments: str, up: bool = True) -> SimpleNamespace:
    """One run against a hub that has `files`, or no such repository."""
    site = Site(home)
    with FakeHub() as hub:
        commit = hub.push(NAME if files is not None else "owner/another", files or {"config.json": b"{}"})
        done = site.run(hub.url if up else unserved_url(), *arguments)
    return SimpleNamespace(site=site, commit=commit, done=done, asked=hub.asked)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A DeepSeek-V3 checkpoint of random weights, in three shards of about 1 MB."""
    hf = tiny()
    path = write_checkpoint(tmp_path_factory.mktemp("source") / "m", hf, random_tensors(hf), shard_bytes=1 << 20)
    found = {p.name: p.read_bytes() for p in sorted(path.iterdir())} | {"extra/notes.txt": b"not a weight\n"}
    assert {LAST, SECOND} < set(found)
    return found


@pytest.fixture(scope="module")
def stories(
    request: pytest.FixtureRequest, files: Files, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[SimpleNamespace]]]:
    home = tmp_path_factory.mktemp("sites")
    cut = {**files, SECOND: files[SECOND][:-100]}
    first = ("--stages", "fetch", "--set", "model.first_layers=1")
    makes: dict[str, Callable[[Path], SimpleNamespace]] = {
        "interrupted": lambda where: interrupted(where, files),
        "killed": lambda where: killed(where, files),
        "unknown": lambda where: single(where, None),
        "gone": lambda where: single(where, files, up=False),
        "truncated": lambda where: single(where, cut),
        "first layers": lambda where: single(where, files, *first),
        "dry": lambda where: single(where, files, "--dry-run"),
    }
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {name: pool.submit(makes[name], home / name) for name in chosen(request, "story", makes)}


@pytest.fixture
def story(request: pytest.FixtureRequest, stories: dict[str, Future[SimpleNamespace]]) -> SimpleNamespace:
    return stories[request.param].result(timeout=400)


def of(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("story", [name], indirect=True)


def assert_one_sentence(done: SimpleNamespace, *facts: object) -> None:
    """Status 2, no traceback, one line that says what and where; lines of the client's own logger may stand before."""
    *before, last = done.err.strip().splitlines()
    assert done.status == 2, done.err
    assert last.startswith("error: "), done.err
    assert "Traceback" not in done.err
    assert not [line for line in before if "error: " in line]
    check_refusal(last, *facts, unrecorded="the hub's client has its part in it")


def file_gets(asked: list[Asked]) -> list[str]:
    return [a.file for a in asked if a.method == "GET" and a.file is not None]


@of("interrupted")
def test_a_broken_connection_is_one_sentence_and_nothing_is_marked(story: SimpleNamespace) -> None:
    """The message must state that the download can be continued, and no later stage may take a part for the whole."""
    assert_one_sentence(story.broken, NAME, "downloaded files are kept")
    assert not story.broken.marked


@of("interrupted")
def test_a_continued_download_fetches_only_what_is_missing(story: SimpleNamespace) -> None:
    """At 700 GB, files that are whole are not downloaded twice. The bytes of the broken file are: the client downloads
    it again from its first byte in a new process."""
    assert story.whole.status == 0, story.whole.err
    assert file_gets(story.asked) == [LAST]
    assert story.whole.marked


@of("interrupted")
def test_the_commit_of_the_first_try_is_the_commit_of_every_file(story: SimpleNamespace, files: Files) -> None:
    """The branch moved between the two tries; shards of two commits would load and be nonsense."""
    assert story.revision == story.commit
    assert {a.commit for a in story.asked if a.commit is not None} == {story.commit}
    assert not [a.path for a in story.asked if NAME in a.path and story.commit not in a.path]
    assert story.site.files() == files
    assert (story.site.stage / "revision").read_text() == story.commit


@of("interrupted")
def test_a_whole_download_is_skipped_without_the_hub(story: SimpleNamespace) -> None:
    """The last run's hub was a closed port: nothing was asked."""
    assert story.skipped.status == 0, story.skipped.err
    assert story.skipped.out.count("complete, skipped") == 1


@of("killed")
def test_a_killed_download_is_continued_and_leaves_no_litter(story: SimpleNamespace, files: Files) -> None:
    """The half file that the kill left would be hashed, marked and copied to every node, were it not removed."""
    assert story.stalled
    assert story.partial, "the kill came too late to prove anything"
    assert not story.marked
    assert story.whole.status == 0, story.whole.err
    assert story.after == files
    assert story.listed == set(files)


@of("killed")
def test_a_damaged_file_is_not_taken_for_whole_when_the_hub_is_gone(story: SimpleNamespace) -> None:
    """The client, left to itself, falls back to whatever lies there; a marker would make that final."""
    assert_one_sentence(story.damaged, NAME, "could not download")
    assert "config.json was changed" in story.damaged.out
    assert not story.blessed


@LONG
@of("unknown")
def test_an_unknown_repository_is_one_sentence_and_leaves_nothing(story: SimpleNamespace) -> None:
    """A mistyped name is the likeliest mistake of all."""
    assert_one_sentence(story.done, NAME, "Repository Not Found", "check the name")
    assert not list((story.site.home / "runs").rglob(".complete.json"))


@LONG
@of("gone")
def test_no_hub_at_all_is_one_sentence_and_leaves_nothing(story: SimpleNamespace) -> None:
    """Machines with accelerators often have no way out."""
    assert_one_sentence(story.done, NAME, "refused", "the network")
    assert not list((story.site.home / "runs").rglob(".complete.json"))


@LONG
@of("truncated")
def test_a_truncated_file_is_refused_by_name(story: SimpleNamespace, files: Files) -> None:
    """The hub serves it in full, as it was pushed: only the file's own header shows it. Another download would give the
    same commit, so the message has the way out."""
    total = len(files[SECOND])
    assert_one_sentence(story.done, f"{SECOND} is truncated: {total - 100} of {total} bytes")
    assert_one_sentence(story.done, story.commit, "model.revision", str(story.site.stage))
    assert not story.done.marked


@of("first layers")
def test_of_a_model_s_first_layers_only_their_files_are_downloaded(story: SimpleNamespace, files: Files) -> None:
    """What is left is the checkpoint of these layers, and nothing of the files that it was cut from."""
    assert story.done.status == 0, story.done.err
    weight_map = json.loads(files["model.safetensors.index.json"])["weight_map"]
    needed = {f for name, f in weight_map.items() if "layers." not in name or ".layers.0." in name}
    assert needed < {name for name in files if name.endswith(".safetensors")}
    assert {f for f in file_gets(story.asked) if f.endswith(".safetensors")} == needed
    assert sorted(p.name for p in story.site.stage.iterdir()) == [MARKER, "data", "revision"]
    kept = HFCheckpoint(story.site.stage / "data")
    assert kept.config["num_hidden_layers"] == 1
    assert set(kept.names()) == {name for name in weight_map if "layers." not in name or ".layers.0." in name}


@pytest.mark.long(beside="tests/miles_like/preflight/test_dry_run.py")
@of("dry")
def test_a_dry_run_asks_nobody(story: SimpleNamespace) -> None:
    """It is what people run on a machine without network, before they book the one with."""
    assert story.done.status == 0, story.done.err
    assert "is not fetched yet" in story.done.out
    assert story.asked == []
    assert not (story.site.home / "runs").exists()
