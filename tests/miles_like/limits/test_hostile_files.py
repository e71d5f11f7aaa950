"""Directories from an untrusted source: links that lead out, FIFOs, devices, absurd counts and forged manifests are
refused in a sentence, and nothing outside is read or written. Many more of each: tests/fuzz."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_like.checkpoint import run_state
from miles_like.checkpoint.run_state import RunState, load, save
from miles_like.cli import app
from miles_like.config.load import load_config
from miles_like.config.sections.reward import EndpointConfig
from miles_like.hf.checkpoint import HFCheckpoint, companions, generation_eos, read_config_file, write_hf
from miles_like.limits.regular_files import is_inner_name, read_regular, replace_bytes
from miles_like.rewards.judges.http import Endpoint
from miles_like.storage.appended_file import truncate_all
from miles_like.storage.checkpoint_files import json_sha256
from miles_like.storage.completion import file_sha256
from rollout.config import SGLangFlags
from rollout.embedded.openai.text import Text
from rollout.sglang.format_support import check_directory
from tests.fuzz.pool import watchdog
from tests.support.cli_runner import CliRunner
from tests.support.refusals import Facts, check_refusal, refuses

SECRET = "a secret of this machine"


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    path = tmp_path / "models--o--n" / "snapshots" / "abc"
    write_hf(path, [("a.weight", torch.arange(6.0).view(2, 3))], {"num_hidden_layers": 1})
    return path


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    path = tmp_path / "outside"
    path.write_text(SECRET)
    return path


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "device", "link", "loop"])
def test_a_file_of_another_kind_is_refused_at_once(name: str, kind: str, hf: Path, outside: Path) -> None:
    (hf / name).unlink()
    if kind == "fifo":
        os.mkfifo(hf / name)
    else:
        (hf / name).symlink_to({"device": "/dev/zero", "link": outside, "loop": hf / name}[kind])
    with watchdog(30), refuses(ValueError, hf, name):
        HFCheckpoint(hf)


READERS: dict[str, Callable[[Path], object]] = {
    "generation_config.json": generation_eos,
    "tokenizer.json": Text.of,
    "config.json": lambda hf: check_directory("embedded", hf, SGLangFlags()),
    "a.key": lambda hf: Endpoint(EndpointConfig(url="http://127.0.0.1:1", key_file=str(hf / "a.key"))),
    "data": lambda hf: file_sha256(hf / "data"),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_every_reader_of_a_small_file_refuses_what_never_ends(name: str, kind: str, hf: Path) -> None:
    (hf / name).unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(hf / name)
    else:
        (hf / name).symlink_to("/dev/zero")
    with watchdog(30), refuses(ValueError, hf / name):
        READERS[name](hf)


@pytest.mark.parametrize(
    "text", ["[1]", "{", '{"eos_token_id": "x"}', '{"eos_token_id": [-1]}', '{"eos_token_id": 1e3}']
)
def test_end_tokens_are_tokens(text: str, hf: Path) -> None:
    (hf / "generation_config.json").write_text(text)
    with refuses(ValueError, "generation_config.json"):
        generation_eos(hf)


def test_a_damaged_tokenizer_is_a_sentence(hf: Path) -> None:
    (hf / "tokenizer.json").write_text("{")
    with refuses(ValueError, "tokenizer.json"):
        Text.of(hf)


def test_companions_are_files_of_the_directory_or_of_the_hub_cache(hf: Path, outside: Path) -> None:
    blobs = hf.parent.parent / "blobs"
    blobs.mkdir()
    (blobs / "123").write_text("{}")
    (hf / "tokenizer.json").symlink_to("../../blobs/123")
    (hf / "tokenizer_config.json").symlink_to("tokenizer.json")
    assert [p.name for p in companions(hf)] == ["tokenizer.json", "tokenizer_config.json"]
    (hf / "special_tokens_map.json").symlink_to(outside)
    out = hf.parent / "out"
    with refuses(ValueError, "special_tokens_map.json"):
        write_hf(out, [], {}, copy_from=hf)
    assert not out.exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**6),
        ("vocab_size", 2**63),
        ("n_routed_experts", 10**9),
        ("intermediate_size", 0),
        ("num_attention_heads", -4),
        ("hidden_size", "64"),
        ("vocab_size", 128.0),
        ("num_hidden_layers", True),
    ],
)
def test_a_count_that_no_model_has_is_refused_before_a_table_is_made(key: str, value: Any, hf: Path) -> None:
    (hf / "config.json").write_text(json.dumps({key: value}))
    with refuses(ValueError, "config.json", key):
        HFCheckpoint(hf)
    with watchdog(30), refuses(ValueError, "config.json", key):
        read_config_file(hf / "config.json")  # of a plan


@pytest.mark.parametrize(
    "change",
    [{"shape": ["2", 3]}, {"shape": [2.0, 3]}, {"shape": [-2, -3]}, {"data_offsets": [0, 24.5]}, {"shape": [True, 6]}],
)
def test_numbers_of_a_header_are_whole_and_not_negative(change: dict[str, Any], hf: Path) -> None:
    file = hf / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["a.weight"] |= change
    raw = json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])
    with refuses(ValueError, 0, "model.safetensors", "a.weight"):
        HFCheckpoint(hf)


def test_deep_json_is_a_sentence(hf: Path) -> None:
    (hf / "config.json").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with refuses(ValueError, "config.json", "JSON"):
        HFCheckpoint(hf)


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../a", "a/../../b", "a\0b", "a\\b", 5, None, ".."])
def test_names_that_leave_a_directory(name: object) -> None:
    assert not is_inner_name(name)
    assert is_inner_name("a/b.bin")


def test_a_file_is_replaced_and_no_link_written_through(tmp_path: Path, outside: Path) -> None:
    link = tmp_path / "report.html"
    link.symlink_to(outside)
    replace_bytes(link, b"new")
    assert outside.read_text() == SECRET and link.read_bytes() == b"new" and not link.is_symlink()
    assert oct(link.stat().st_mode & 0o777) == oct(0o666 & ~_umask())
    with refuses(ValueError, 2, "report.html"):
        read_regular(link, 2)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def forged(checkpoints: Path, change: dict[str, Any]) -> Path:
    """A checkpoint of step 1 whose run_state.json says other things, with a right checksum."""
    save(checkpoints, RunState(step=1, weight_version=1, tokens_total=9, parts={"prompts": 4}), keep=1)
    path = checkpoints / "step_1" / run_state.STATE_FILE
    state = json.loads(path.read_text())
    state.pop("sum")
    state |= change
    path.write_text(json.dumps({**state, "sum": json_sha256(state)}))
    return path.parent


NOTHING = {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"parts": {"files": {"/etc/passwd": NOTHING}}}, "parts.files./etc/passwd"),
        ({"parts": {"files": {"../outside": NOTHING}}}, "parts.files"),
        ({"parts": {"files": {"metrics.jsonl": {"bytes": -1, "sha256": "0" * 64}}}}, "parts.files.metrics.jsonl.bytes"),
        ({"parts": {"files": [1]}}, "parts.files"),
        ({"parts": {"buffer": {"next_ticket": 2**63, "tickets": [], "dropped": {}}}}, "parts.buffer.next_ticket"),
        ({"parts": {"ledger": 5}}, "parts.ledger"),
        ({"parts": {"random": {"python": [3, [1], None]}}}, "parts.random.python.1"),
        ({"parts": {"keep_best": {"metric": "x", "step": "1", "value": 0.5}}}, "parts.keep_best.step"),
        ({"parts": {"prompts": "x"}}, "parts.prompts.constrained-int"),
        ({"parts": 5}, "parts"),
        ({"step": True}, "step"),
        ({"tokens_total": 1e300}, "tokens_total"),
        ({"more": 1}, "more"),
        ({"files": {"a": 5}}, "files.a"),
    ],
)
def test_a_forged_state_is_refused_by_name(change: dict[str, Any], key: str, tmp_path: Path) -> None:
    """Each was a traceback, or was believed."""
    folder = forged(tmp_path / "checkpoints", change)
    with refuses(ValueError, "run_state.json", key):
        load(folder)


def test_files_of_a_forged_state_stay_in_the_folder(tmp_path: Path, outside: Path) -> None:
    fact = {"bytes": len(SECRET), "sha256": hashlib.sha256(SECRET.encode()).hexdigest()}
    with refuses(ValueError, "../../outside"):
        load(forged(tmp_path / "checkpoints", {"files": {"../../outside": fact}}))
    with refuses(ValueError, "../outside"):
        truncate_all(tmp_path / "run", {"../outside": NOTHING})
    (tmp_path / "metrics.jsonl").symlink_to(outside)
    with refuses(ValueError, "metrics.jsonl"):
        truncate_all(tmp_path, {"metrics.jsonl": NOTHING})
    assert outside.read_text() == SECRET


@pytest.mark.parametrize(
    "name",
    [
        *("config.toml", "ledger.jsonl", "metrics.jsonl", "rollouts/step_1.jsonl", "starts.jsonl"),
        *("incidents/1.md", "evals/step_1.jsonl", "tokenizer.json"),
    ],
)
@pytest.mark.parametrize("to", ["outside", "/dev/zero"])
def test_a_report_shows_no_file_from_outside_and_never_ends_in_a_device(
    name: str, to: str, tmp_path: Path, outside: Path
) -> None:
    run = tmp_path / "run"
    for folder in ("rollouts", "incidents", "evals"):
        (run / folder).mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(outside if to == "outside" else to)
    with watchdog(60):
        done = CliRunner().invoke(app, ["report", str(run)])
    assert done.exit_code == 2 and not (run / "report.html").exists()
    check_refusal(done.stderr, run / name, outside if to == "outside" else to)


def test_a_report_is_not_written_through_links(tmp_path: Path, outside: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "rollout/reward/mean": 0.5}\n')
    (run / "report.html").symlink_to(outside)
    assert CliRunner().invoke(app, ["report", str(run)]).exit_code == 0
    assert outside.read_text() == SECRET and '"rollout/reward/mean":[[1],[0.5]]' in (run / "report.html").read_text()


@pytest.mark.parametrize(
    "value", ['"x"', "[1]", "1" + "0" * 400, "1e308", '{"a": 1}', '"' + "a" * 5000 + '"'], ids=lambda v: v[:8]
)
def test_a_metric_that_is_no_number_is_a_sentence(value: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "rollout/reward/mean": {value}}}\n')
    done = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 2
    check_refusal(done.stderr, "metrics.jsonl", 1, "rollout/reward/mean")
    assert "fault" not in done.stderr and len(done.stderr) < 1000


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("x = " + "[" * 50_000, ("TOML",)),
        (".".join("x" * 50_000) + " = 1", (32,)),
        ("[parallel]\nep = 9223372036854775808", ("parallel.ep", 64)),
        ("[precision]\nblock = [1" + "0" * 400 + "]", ("precision.block.0", 64)),
        ("[checkpoint]\ngrace_s = 1e308", ("checkpoint.grace_s", "1e+308", "1e+09")),
        ("[rollout.sglang]\ncontext_length = 100000000000000000000000", ("rollout.sglang.context_length", 64, 77)),
        ("x" * (1 << 20) + " = 1", ("1,048,576",)),
    ],
    ids=["deep", "key", "ep", "block", "grace", "context", "long"],
)
def test_a_configuration_beyond_any_bound_is_a_sentence(text: str, facts: Facts, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with watchdog(60), refuses(ValueError, "run.toml", *facts):
        load_config(path)
    os.unlink(path)
    os.mkfifo(path)
    with watchdog(60), refuses(ValueError, "run.toml", "FIFO"):
        load_config(path)
