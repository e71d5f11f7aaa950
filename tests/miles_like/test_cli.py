"""What the command line says of a mistake. Each mistake end to end: tests/e2e."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from miles_like.cli import app
from miles_like.command_errors import LOG_BYTES, one_sentence, sentence
from miles_like.commands.train import train
from miles_like.hf.checkpoint import HFCheckpoint, write_hf
from miles_like.limits.memory_size import parse_bytes
from miles_like.stopping import Stopped
from tests.support import sglang_metadata, tiny_models
from tests.support.cli_runner import CliRunner
from tests.support.refusals import Facts, check_refusal, refuses
from tests.support.spawn import free_port


def test_of_a_system_error_the_file_and_the_words_are_said() -> None:
    assert sentence(OSError(28, "No space left on device", "/disk/a")) == "/disk/a: No space left on device"
    assert sentence(OSError(28, "disk full: free some")) == "disk full: free some"
    assert sentence(ValueError("two\n lines")) == "two lines"


def test_brackets_in_a_sentence_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    """rich would take them for markup: [128] would vanish and [/x] end in a traceback."""
    with pytest.raises(typer.Exit) as stopped, one_sentence():
        raise ValueError("shape [bold] is not [/x]")
    assert stopped.value.exit_code == 2
    assert capsys.readouterr().err == "error: shape [bold] is not [/x]\n"


@pytest.mark.parametrize(
    ("stages", "overrides", "facts"),
    [
        ("fetch,tain", [], ("tain", "train")),
        ("", [], ("--stages",)),
        ("train", ["rollout.max_new_tokens=8000"], (8511, 8192)),
        ("train", ["optimizer.lr=inf"], ("optimizer.lr",)),
        ("train", ["rollout.temperature=inf"], ("rollout.temperature",)),
        ("train", ["optimizer.beta2=1.5"], ("optimizer.beta2", 1, 1.5)),
    ],
)
def test_a_dry_run_refuses_what_the_run_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stages: str, overrides: list[str], facts: Facts
) -> None:
    """A plan of nothing, printed without a word, would be believed."""
    config = Path(__file__).parents[2] / "configs" / "tiny.toml"
    with pytest.raises(typer.Exit):
        train(config, tmp_path / "x", stages=stages, overrides=overrides, dry_run=True)
    check_refusal(capsys.readouterr().err, *facts)
    assert not list(tmp_path.iterdir())


def test_training_has_a_dry_run_of_its_own(tmp_path: Path) -> None:
    """As the script's: the plan, and the layout that cannot be, without a directory."""
    config = Path(__file__).parents[2] / "configs" / "tiny.toml"
    command = ["train", str(config), "--run-dir", str(tmp_path / "x"), "--dry-run"]
    assert "kernels: local modules" in CliRunner().invoke(app, command).output
    refused = CliRunner().invoke(app, [*command, "--set", "parallel.ep=3", "--set", "parallel.dp=3"])
    assert refused.exit_code == 2
    check_refusal(refused.stderr, 16, "parallel.ep", 3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("model", "flag"), [(tiny_models.tiny_qwen(), True), (tiny_models.tiny_dense(), False)])
def test_only_a_model_with_experts_is_asked_for_routes(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: dict[str, Any],
    flag: bool,
) -> None:
    """Stock SGLang sizes its buffers by `num_experts_per_tok` when the flag is given, and dies where there is none."""
    sglang_metadata.install(monkeypatch, tmp_path / "installed")
    (tmp_path / "model.json").write_text(json.dumps(model))
    config = Path(__file__).parents[2] / "configs" / "tiny.toml"
    changes = [f"model.make.config={tmp_path}/model.json", "rollout.engine=sglang", "parallel.ep=1"]
    train(config, tmp_path / "x", overrides=changes, dry_run=True)
    assert ("--enable-return-routed-experts" in capsys.readouterr().out) == flag


def test_a_command_ends_with_status_2(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["dequantize", str(tmp_path / "none"), str(tmp_path / "out")])
    assert done.exit_code == 2
    check_refusal(done.stderr, tmp_path / "none", "config.json")


def test_the_traceback_is_kept_where_the_run_keeps_its_logs(tmp_path: Path) -> None:
    """One sentence is for the user; the traceback is for a developer."""
    with pytest.raises(typer.Exit), one_sentence(tmp_path):
        raise ValueError("no such thing")
    assert "ValueError: no such thing" in (tmp_path / "driver.log").read_text()


def test_a_fault_of_the_program_says_so_and_names_the_log_with_its_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a user does, no traceback is the answer; RecursionError is a RuntimeError without words for a user."""
    for error in (
        KeyError("x"),
        AssertionError(),
        ZeroDivisionError("by zero"),
        RecursionError("too deep"),
        ValueError(),
    ):
        with pytest.raises(typer.Exit) as stopped, one_sentence(tmp_path):
            raise error
        message = capsys.readouterr().err
        assert stopped.value.exit_code == 2
        assert (
            f"internal error of miles-like ({type(error).__name__}" in message
            and str(tmp_path / "driver.log") in message
        )
        assert type(error).__name__ in (tmp_path / "driver.log").read_text().splitlines()[-1]
        with pytest.raises(typer.Exit), one_sentence():
            raise error
        log = Path(re.search(r"; (\S+) has the traceback", capsys.readouterr().err)[1])
        assert type(error).__name__ in log.read_text()
        log.unlink()


def test_an_interrupt_and_an_exit_are_no_errors(tmp_path: Path) -> None:
    for end in (KeyboardInterrupt(), typer.Exit(1)):
        with pytest.raises(type(end)) as stopped, one_sentence(tmp_path):
            raise end
        assert stopped.value is end
    assert not list(tmp_path.iterdir())


def test_the_drivers_log_is_bounded_and_no_link_is_written_through(tmp_path: Path) -> None:
    def fails(logs: Path) -> None:
        with pytest.raises(typer.Exit), one_sentence(logs):
            raise ValueError("no such thing")

    log = tmp_path / "driver.log"
    log.write_bytes(b"x" * (LOG_BYTES + 1))
    fails(tmp_path)
    assert log.stat().st_size < 10_000 and (tmp_path / "driver.log.1").stat().st_size == LOG_BYTES + 1
    other = tmp_path / "other"
    other.write_text("as it was")
    log.unlink()
    log.symlink_to(other)
    fails(tmp_path)
    assert other.read_text() == "as it was"


EVERYWHERE = ("0.0.0.0", "::", "")


@pytest.mark.parametrize("port", ["80000", "-1", "0", "port"])
def test_a_port_that_is_none_is_refused(port: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["serve", str(tmp_path), "--port", port])
    assert done.exit_code == 2 and "port" in done.stderr and port in done.stderr


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "256.1.1.1", "192.0.2.1", "a" * 64, "no host", "", "a\0b", "fe80::1%x"]
)
def test_a_host_that_cannot_be_listened_on_is_one_sentence(host: str, tmp_path: Path) -> None:
    """Before the model is read, which is not there."""
    done = CliRunner().invoke(app, ["serve", str(tmp_path), "--port", str(free_port()), "--host", host])
    assert done.exit_code == 2 and not isinstance(done.exception, ValueError | OSError), done.exception
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    facts = ("MILES_LIKE_SERVER_KEY",) if host in EVERYWHERE else ("cannot listen on", repr(host))
    words = "" if host in EVERYWHERE else "in the words of the machine's resolver"
    check_refusal(done.stderr, *facts, unrecorded=words)


def test_a_run_that_was_told_to_stop_ends_with_the_status_of_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit statuses distinguish a mistake (2) from a stop with everything saved."""

    def stopped(*_: Any, **__: Any) -> None:
        raise Stopped("SIGTERM: step 6 is saved, --resume continues from it", 143)

    monkeypatch.setattr("miles_like.run.pipeline.run_stages", stopped)
    result = CliRunner().invoke(app, ["train", "configs/tiny.toml", "--run-dir", "nowhere"])
    assert result.exit_code == 143, result.output
    assert "stopped: SIGTERM: step 6 is saved" in result.output and "error" not in result.output


def test_what_is_quantized_is_not_quantized_again(tmp_path: Path) -> None:
    """Its scales would be taken for tensors; the remedy is another command."""
    hf, once = tmp_path / "hf", tmp_path / "once"
    write_hf(hf, [("model.layers.0.mlp.up_proj.weight", torch.ones(4, 4, dtype=torch.bfloat16))], {"a": 1})
    run = CliRunner()
    assert run.invoke(app, ["quantize", str(hf), str(once), "--format", "fp8"]).exit_code == 0
    done = run.invoke(app, ["quantize", str(once), str(tmp_path / "x")])
    assert done.exit_code == 2
    check_refusal(done.stderr, once, "BF16", "dequantize")
    assert run.invoke(app, ["dequantize", str(once), str(tmp_path / "back")]).exit_code == 0
    assert torch.equal(
        HFCheckpoint(tmp_path / "back").read("model.layers.0.mlp.up_proj.weight"),
        torch.ones(4, 4, dtype=torch.bfloat16),
    )


def test_serving_on_a_used_port_is_an_error(tmp_path: Path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        done = CliRunner().invoke(app, ["serve", str(tmp_path), "--port", str(port)])
    assert done.exit_code == 2
    check_refusal(done.stderr, port)


@pytest.mark.parametrize(
    ("text", "want"),
    [("4GiB", 4 << 30), ("512 MiB", 512 << 20), ("1.5g", 3 << 29), ("1048576", 1 << 20), ("2 KB", 2048), ("7B", 7)],
)
def test_an_amount_of_memory_is_read_as_it_is_written(text: str, want: int) -> None:
    assert parse_bytes(text) == want


def test_more_memory_than_there_can_be_is_refused() -> None:
    for text in ("9" * 400, "1" + "0" * 20 + "GiB"):
        with refuses(ValueError, f"'{text[:40]}'", "4GiB", "512MiB"):
            parse_bytes(text)


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "4 GiB each", "GiB"])
def test_no_amount_of_memory_is_said(text: str) -> None:
    with refuses(ValueError, f"'{text}'", "4GiB", "512MiB"):
        parse_bytes(text)
