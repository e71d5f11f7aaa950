"""Nothing that a checkpoint says is executed: not its `.metadata`, its objects, its tensors' archives or its common.pt,
on any way into a trainer or out of a directory; and no module of the packages has a reader that would.

The checkpoint is a trainer's save of one rank. Not covered: TransformerEngine's own extra state, which no load asks
for.
"""

from __future__ import annotations

import ast
import io
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

from megatron_bridge.convert.to_hf import to_hf
from megatron_bridge.weights.checkpoint_sums import SUMS
from tests.support import toy
from tests.support.chosen import chosen, later
from tests.support.layouts import ROUTED
from tests.support.spawn import run_ranks
from tests.test_architecture import FILES

WITHOUT_A_NAME = {"rollout.prompts.spool"}  # its file is unlinked: only the process that wrote it can read it
RAN = "ran"  # a file that planted code makes


class Planted:
    """Pickles as a call that makes a file."""

    def __init__(self, where: Path, call: str) -> None:
        self.command = f"touch {where / RAN}"
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        if self.call == "eval":
            return eval, (f"__import__('os').system({self.command!r})",)
        return os.system, (self.command,)


def _saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _metadata(path: Path) -> Any:
    return pickle.loads((path / ".metadata").read_bytes())  # of this test's own trainer


def _stored_elsewhere(path: Path, wanted: type, content: bytes) -> None:
    """All entries of a kind, objects or tensors, lie in a further file now."""
    listed = _metadata(path)
    for key, value in listed.state_dict_metadata.items():
        if isinstance(value, wanted):
            offset = None if wanted is BytesStorageMetadata else value.chunks[0].offsets
            index = MetadataIndex(key, offset)
            where = listed.storage_data[index]
            listed.storage_data[index] = replace(where, relative_path="__9_9.distcp", offset=0, length=len(content))
    (path / "__9_9.distcp").write_bytes(content)
    (path / ".metadata").write_bytes(pickle.dumps(listed))


def _in_metadata(path: Path, planted: Planted) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(planted))


def _beside_metadata(path: Path, planted: Planted) -> None:
    listed = _metadata(path)
    listed.mcore_data = planted
    (path / ".metadata").write_bytes(pickle.dumps(listed))


def _in_objects(path: Path, planted: Planted) -> None:
    _stored_elsewhere(path, BytesStorageMetadata, _saved(planted))


def _in_old_objects(path: Path, planted: Planted) -> None:
    """As torch.save wrote before it wrote zip archives."""
    out = io.BytesIO()
    torch.save(planted, out, _use_new_zipfile_serialization=False)
    _stored_elsewhere(path, BytesStorageMetadata, out.getvalue())


def _in_tensors(path: Path, planted: Planted) -> None:
    _stored_elsewhere(path, TensorStorageMetadata, _saved(planted))


def _in_common(path: Path, planted: Planted) -> None:
    torch.save({"step": 1, "x": planted}, path / "common.pt")


PLANTS: dict[str, Callable[[Path, Planted], None]] = {
    f.__name__.removeprefix("_"): f
    for f in (_in_metadata, _beside_metadata, _in_objects, _in_old_objects, _in_tensors, _in_common)
}
CALLS = ("system", "eval")
OF_CALLS = later(CALLS, ["eval"], beside="tests/laws/test_files_are_data.py")


@contextmanager
def _words(found: dict[str, str], key: str) -> Iterator[None]:
    try:
        yield
        found[key] = "read"
    except ValueError as e:
        found[key] = str(e)


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _link(file: Path) -> None:
    """To a file outside with the same bytes."""
    file.rename(file.parent.parent / f"{file.parent.name}-{file.name}")
    file.symlink_to(file.parent.parent / f"{file.parent.name}-{file.name}")


KINDS: dict[str, Callable[[Path], None]] = {"fifo": _fifo, "link": _link}
READ_FILES = ("metadata.json", "common.pt", ".metadata", "__0_0.distcp", "__0_1.distcp")


def _others(saved: Path, root: Path) -> Iterator[tuple[str, Path]]:
    """(name, directory) of copies in which one file is no regular file of the directory; with checksums and without."""
    for file in (*READ_FILES, SUMS):
        for kind, change in KINDS.items():
            for summed in (True, False):
                if file == SUMS and not summed:
                    continue
                path = root / f"{file} {kind} {summed}"
                shutil.copytree(saved, path)
                if not summed:
                    (path / SUMS).unlink()
                change(path / file)
                yield f"{file} {kind}{'' if summed else ' unsummed'}", path


def _reads(rank: int, world: int, port: int, root: Path, calls: list[str]) -> dict[str, str]:
    """Each plant and way -> "read", or the sentence, and so for files of another kind."""
    from megatron_bridge.weights.checkpoint import load_host_copy
    from miles_like.types import REFERENCE

    found: dict[str, str] = {}
    hf = toy.hf_dir(root / "hf", toy.hf_config() | ROUTED)
    with toy.trainer(toy.config(hf, reference=True, reference_every=1), rank, world, port) as t:
        t.copies.keep(REFERENCE)
        t.save(root / "saved")
        for name, path in _others(root / "saved", root):
            with _words(found, f"other {name} resume"):
                t.load(path)
            if not name.startswith(SUMS):  # which only a resumed run reads
                with _words(found, f"other {name} weights"):
                    t.load_weights(path)
        (root / "saved" / SUMS).unlink()  # as if the files had been rewritten together with their checksums
        for name, plant in [("nothing", None), *PLANTS.items()]:
            for call in calls:
                path = root / f"{name}-{call}"
                shutil.copytree(root / "saved", path)
                if plant is not None:
                    plant(path, Planted(path, call))
                ways: dict[str, Callable[[Path], Any]] = {
                    "resume": t.load,
                    "weights": t.load_weights,
                    "teacher": lambda path: t.load_copy("teacher", path),
                    "reference": lambda path: load_host_copy(path, REFERENCE, t.models, t.parallel),
                }
                for way, read in ways.items():
                    with _words(found, f"{name} {call} {way}"):
                        read(path)
    return found


@pytest.fixture(scope="module")
def read(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    root = tmp_path_factory.mktemp("planted")
    calls = dict.fromkeys(("eval", *chosen(request, "call", CALLS)))
    return root, run_ranks(_reads, 1, root, list(calls))[0]


@pytest.mark.parametrize("call", OF_CALLS)
def test_what_is_planted_does_not_run(read: tuple[Path, dict[str, str]], call: str) -> None:
    root, _ = read
    for name in PLANTS:
        with _words({}, ""):
            to_hf(root / f"{name}-{call}", root / f"hf-{name}-{call}", hf_config=root / "hf")
    assert not list(root.rglob(RAN))


def test_the_plants_work(tmp_path: Path) -> None:
    """A stock reader runs them: the law above is not of plants that do nothing."""
    for call in CALLS:
        (tmp_path / call).mkdir()
        pickle.loads(pickle.dumps(Planted(tmp_path / call, call)))
        assert (tmp_path / call / RAN).exists()


def test_what_is_needed_is_refused_in_a_sentence_and_the_rest_is_read(read: tuple[Path, dict[str, str]]) -> None:
    _, found = read
    assert {way for key, way in found.items() if key.startswith("nothing")} == {"read"}
    for key, words in found.items():
        name, *_ = key.split()
        if name == "other":
            reasons = ("is a FIFO, not a regular file", "is missing", "is a link to", "is not a complete")
            assert any(why in words for why in reasons), (key, words)
            assert len(words) < 500
        elif name in ("nothing", "beside_metadata"):
            assert words == "read", (key, words)
        else:
            assert words != "read" and "Re-running" not in words, (key, words)


def _calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


@pytest.mark.parametrize("module", FILES)
def test_no_reader_executes_what_it_reads(module: str) -> None:
    for call, name in _calls(ast.parse(FILES[module].read_text())):
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        where = f"{module}:{call.lineno}: {name}"
        assert name.split(".")[0] not in ("marshal", "shelve", "dill", "joblib"), where
        if module not in WITHOUT_A_NAME:
            assert name not in ("pickle.load", "pickle.loads", "pickle.Unpickler", "np.lib.format.read_array"), where
        assert given.get("weights_only") != "False" and given.get("allow_pickle") != "True", where
        if name in ("torch.load", "load"):
            assert name == "load" or given.get("weights_only") == "True", where
        assert not name.endswith(("dist_checkpointing.load_tensors_metadata", "load_sharded_metadata")), where
        if name == "dist_checkpointing.load":
            assert len(call.args) == 3, f"{where} without a strategy of our own"
