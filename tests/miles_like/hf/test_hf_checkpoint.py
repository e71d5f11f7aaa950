"""Model directories: read and written as the safetensors library does, and refused when they are not whole."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from miles_like.hf import checkpoint as hf_checkpoint
from miles_like.hf.checkpoint import HFCheckpoint, write_hf
from tests.support.refusals import Facts, refuses

CONFIG = {"model_type": "deepseek_v3", "hidden_size": 8}


def tensors() -> dict[str, Tensor]:
    """One of each dtype, an odd number of bytes, no elements, no axes, and memory that is not contiguous."""
    g = torch.Generator().manual_seed(0)
    return {
        "z.weight": torch.randn(7, 5, generator=g).to(torch.bfloat16),
        "codes": torch.randn(3, 5, generator=g).to(torch.float8_e4m3fn),
        "scale": torch.randn(2, 3, generator=g),
        "half": torch.randn(4, 2, generator=g).to(torch.float16),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "ids": torch.arange(6, dtype=torch.int64).view(2, 3),
        "small": torch.arange(6, dtype=torch.int32),
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(3.5),
        "turned": torch.randn(6, 4, generator=g).T,
    }


def same(a: Tensor, b: Tensor) -> bool:
    """dtype, shape and bits."""
    bits = [t.contiguous().flatten().view(torch.uint8) for t in (a, b)]
    return a.dtype is b.dtype and a.shape == b.shape and torch.equal(*bits)


def write(path: Path, **kwargs: int) -> Path:
    write_hf(path, tensors().items(), CONFIG, **kwargs)
    return path


def damaged(path: Path, *, drop: int) -> Path:
    """The last file of a directory without its last bytes."""
    file = sorted(path.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-drop])
    return file


@pytest.mark.parametrize("shard_bytes", [1 << 30, 60, 1])
def test_the_safetensors_library_reads_what_we_write(tmp_path: Path, shard_bytes: int) -> None:
    """In one file, in several, and in one for each tensor; the index must name the file of each."""
    path = write(tmp_path / "m", shard_bytes=shard_bytes)
    files = sorted(path.glob("*.safetensors"))
    found = {name: (t, f.name) for f in files for name, t in load_file(f).items()}
    assert set(found) == set(tensors()) and all(same(found[n][0], t) for n, t in tensors().items())
    index = path / "model.safetensors.index.json"
    assert index.exists() is (len(files) > 1)
    if len(files) > 1:
        assert json.loads(index.read_text())["weight_map"] == {n: f for n, (_, f) in found.items()}
        assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert json.loads((path / "config.json").read_text()) == CONFIG


def test_we_read_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    """Its header has the exact length of its JSON, ours has blanks after it; it also sorts tensors by dtype."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({n: t.contiguous() for n, t in tensors().items()}, tmp_path / "model.safetensors", {"format": "pt"})
    hf = HFCheckpoint(tmp_path)
    assert hf.config == CONFIG and set(hf.names()) == set(tensors())
    assert all(same(hf.read(n), t) for n, t in tensors().items())


@pytest.mark.parametrize("shard_bytes", [1 << 30, 60])
def test_reading_back(tmp_path: Path, shard_bytes: int) -> None:
    """The stream has the order in which tensors were written, and infos tell of them without reading."""
    hf = HFCheckpoint(write(tmp_path / "m", shard_bytes=shard_bytes))
    assert [n for n, _ in hf.stream()] == hf.names() == list(tensors())
    for name, t in hf.stream():
        want = tensors()[name]
        assert same(t, want)
        assert hf.info(name)[:3] == (want.dtype, tuple(want.shape), want.nbytes)
        assert hf.info(name).file.parent == tmp_path / "m"
    assert hf.nbytes == sum(t.nbytes for t in tensors().values())
    assert "codes" in hf and "other" not in hf


def test_written_bytes_are_returned(tmp_path: Path) -> None:
    """Of the data, which is what the pipeline reports."""
    assert write_hf(tmp_path / "m", tensors().items(), CONFIG) == sum(t.nbytes for t in tensors().values())
    assert write_hf(tmp_path / "empty", [], CONFIG) == 0
    assert HFCheckpoint(tmp_path / "empty").names() == []


def test_rows_have_storage_of_their_own(tmp_path: Path) -> None:
    """A slice that shared storage would be pickled with the whole tensor."""
    hf = HFCheckpoint(write(tmp_path / "m"))
    rows = hf.read_rows("z.weight", 2, 5)
    assert same(rows, tensors()["z.weight"][2:5])
    assert rows.untyped_storage().nbytes() == rows.nbytes == 3 * 5 * 2
    saved = io.BytesIO()
    torch.save(hf.read_rows("z.weight", 0, 1), saved)
    assert saved.tell() < 2000
    assert hf.read_rows("ids", 1, 1).shape == (0, 3)
    for name, a, b in (("z.weight", 5, 8), ("z.weight", 3, 2), ("scalar", 0, 1)):
        with refuses(ValueError, name, a, b):
            hf.read_rows(name, a, b)


def test_many_tensors_get_another_file_when_the_header_is_full(tmp_path: Path) -> None:
    """Room for the header is set aside before it is known; a shard ends when it would not fit, whatever its bytes."""
    many = {f"model.layers.{i}.{'x' * 300}": torch.tensor([i]) for i in range(1000)}
    write_hf(tmp_path / "m", many.items(), CONFIG)
    hf = HFCheckpoint(tmp_path / "m")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == 4  # 1000 x 430 bytes in rooms of 128 KiB
    assert all(int(hf.read(n)) == int(t) for n, t in many.items())


def test_tokenizer_files_are_taken_over(tmp_path: Path) -> None:
    """Everything small that belongs to a model, but no weights, no index of the old weights, not the old config."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja", "modeling_x.py", "LICENSE"):
        (source / name).write_text(name)
    for name in ("config.json", "model.safetensors.index.json", "model-1.safetensors", "pytorch_model.bin"):
        (source / name).write_text("{}")
    (source / "folder.json").mkdir()
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "rag.jinja").write_text("rag")
    write_hf(tmp_path / "m", tensors().items(), CONFIG, copy_from=source)
    assert {f.name for f in (tmp_path / "m").iterdir()} == {
        "config.json", "model.safetensors",
        "tokenizer.json", "generation_config.json", "chat_template.jinja", "modeling_x.py", "LICENSE",
        "additional_chat_templates",
    }  # fmt: skip
    assert (tmp_path / "m" / "additional_chat_templates" / "rag.jinja").read_text() == "rag"
    assert json.loads((tmp_path / "m" / "config.json").read_text()) == CONFIG
    with refuses(ValueError, "nowhere"):
        write_hf(tmp_path / "n", [], CONFIG, copy_from=tmp_path / "nowhere")


@pytest.mark.parametrize("shard_bytes", [1 << 30, 60])
def test_a_truncated_file_says_how_much_is_missing(tmp_path: Path, shard_bytes: int) -> None:
    """The commonest fault of a download; found when the directory is opened, not after an hour of reading."""
    file = damaged(write(tmp_path / "m", shard_bytes=shard_bytes), drop=5)
    with refuses(ValueError, file.name, 5):
        HFCheckpoint(tmp_path / "m")


def test_a_file_cut_within_its_header(tmp_path: Path) -> None:
    """Then there is no JSON to read lengths from."""
    file = write(tmp_path / "m") / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 5, 100):
        file.write_bytes(whole[:size])
        with refuses(ValueError, "model.safetensors"):
            HFCheckpoint(tmp_path / "m")


def test_a_file_cut_after_it_was_opened(tmp_path: Path) -> None:
    """A mapped file would kill the process; a read says what happened."""
    hf = HFCheckpoint(write(tmp_path / "m"))
    damaged(tmp_path / "m", drop=10)
    with refuses(ValueError, 10, "model.safetensors"):
        hf.read("turned")


def test_a_file_with_more_than_its_header_tells_of(tmp_path: Path) -> None:
    """Two downloads into one file."""
    with (write(tmp_path / "m") / "model.safetensors").open("ab") as f:
        f.write(b"xyz")
    with refuses(ValueError, 3, "model.safetensors", 131379):
        HFCheckpoint(tmp_path / "m")


@pytest.mark.parametrize(
    ("header", "facts"),
    [
        (b"<html>not found</html>", ()),
        (b'{"a":{"dtype":"F32","shape":[2]}}', ()),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', ("[2]", "F32", "0..4")),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', ("4..8",)),
        (b'{"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}}', ("F64",)),
        (b'{"a":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}}', ("['F32']", "F8_E4M3")),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}}', ()),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}}', ()),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,Infinity]}}', ()),
        (
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
            (),
        ),
    ],
)
def test_broken_headers_are_refused(tmp_path: Path, header: bytes, facts: Facts) -> None:
    """Each would otherwise give wrong numbers, or an error that names no file."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with refuses(ValueError, "model.safetensors", *facts):
        HFCheckpoint(tmp_path)


def test_a_file_that_is_not_safetensors(tmp_path: Path) -> None:
    """Its first eight bytes are no length."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"PK\x03\x04 a zip file it is")
    with refuses(ValueError, "model.safetensors", 21):
        HFCheckpoint(tmp_path)


def test_files_of_the_index_must_be_there(tmp_path: Path) -> None:
    """A download that was stopped between two files."""
    path = write(tmp_path / "m", shard_bytes=60)
    file = sorted(path.glob("*.safetensors"))[1]
    file.unlink()
    with refuses(ValueError, file.name):
        HFCheckpoint(path)


def edit_index(path: Path, **changes: str | None) -> Path:
    index = path / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    for name, file in changes.items():
        if file is None:
            del value["weight_map"][name]
        else:
            value["weight_map"][name] = file
    index.write_text(json.dumps(value))
    return path


def test_index_and_files_must_agree(tmp_path: Path) -> None:
    """A tensor only the index has, only a file has, in another file than the index says, or in two files."""
    path = write(tmp_path / "m", shard_bytes=60)
    first, second, *_ = sorted(f.name for f in path.glob("*.safetensors"))
    with refuses(ValueError, first):
        HFCheckpoint(edit_index(path, lost=first))
    with refuses(ValueError, "model-00004-of-00005.safetensors", "model.safetensors.index.json"):
        HFCheckpoint(edit_index(path, lost=None, scalar=None))
    home = HFCheckpoint(write(tmp_path / "n", shard_bytes=60)).info("scalar").file.name
    with refuses(ValueError, first):
        HFCheckpoint(edit_index(path, scalar=first))
    edit_index(path, scalar=home)
    (path / second).write_bytes((path / first).read_bytes())
    with refuses(ValueError, "z.weight"):
        HFCheckpoint(path)


def test_directories_that_hold_no_model(tmp_path: Path) -> None:
    """Say what is missing."""
    with refuses(ValueError, "config.json"):
        HFCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with refuses(ValueError, "config.json", "JSON"):
        HFCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with refuses(ValueError, "config.json", "JSON"):
        HFCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with refuses(ValueError, "model.safetensors"):
        HFCheckpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with refuses(ValueError, "weight_map"):
        HFCheckpoint(tmp_path)


def test_an_unknown_tensor(tmp_path: Path) -> None:
    """The message names the tensor and the directory."""
    with refuses(ValueError, "other.weight"):
        HFCheckpoint(write(tmp_path / "m")).read("other.weight")


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """And nothing is left behind."""
    with refuses(ValueError, "a"):
        write_hf(tmp_path / "m", [("a", torch.ones(1)), ("a", torch.ones(1))], CONFIG)
    with refuses(ValueError, "torch.float64"):
        write_hf(tmp_path / "m", [("a", torch.ones(1, dtype=torch.float64))], CONFIG)
    assert list(tmp_path.iterdir()) == []
    path = write(tmp_path / "m")
    with refuses(ValueError, path):
        write(path)
    assert HFCheckpoint(path).names() == list(tensors())


def test_a_stream_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """A directory that is there is whole: a later run takes it so."""

    def failing() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.ones(4)
        assert (tmp_path / "m.partial").is_dir() and not (tmp_path / "m").exists()
        raise RuntimeError("the source died")

    with refuses(RuntimeError, "the source died"):
        write_hf(tmp_path / "m", failing(), CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_replaced(tmp_path: Path) -> None:
    """Its .partial must not find its way into the new directory."""
    (tmp_path / "m.partial").mkdir()
    (tmp_path / "m.partial" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "m.partial" / "stale.json").write_text("{}")
    path = write(tmp_path / "m")
    assert {f.name for f in path.iterdir()} == {"config.json", "model.safetensors"}
    assert [f.name for f in tmp_path.iterdir()] == ["m"]


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system call's refusal is made up here: a small file system would need root. Its errno must stay."""

    def refuse(self: object, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hf_checkpoint._ShardWriter, "_write", refuse)
    facts = ("disk full", tmp_path / "m", "was not written", "0 bytes were written")
    with refuses(OSError, 28, *facts, unrecorded="it names the free space of the disk") as e:
        write(tmp_path / "m")
    assert e.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_disk_too_small_is_noticed_before_the_first_byte(tmp_path: Path) -> None:
    """Half a terabyte of writing can be spared where the size is known."""

    def untouched() -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("the stream was drawn")
        yield "a", torch.ones(1)

    facts = ("disk full", f"it needs {1 << 60} bytes", "0 bytes were written")
    with refuses(OSError, *facts, unrecorded="it names the free space of the disk"):
        write_hf(tmp_path / "m", untouched(), CONFIG, nbytes=1 << 60)
    assert list(tmp_path.iterdir()) == []
