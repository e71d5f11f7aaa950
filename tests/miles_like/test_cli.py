"""What the command line says of a mistake. Each mistake end to end: tests/e2e."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from miles_like.cli import app, one_sentence, pipeline, sentence


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


@pytest.mark.parametrize(("stages", "said"), [("fetch,tain", "no stage called 'tain'"), ("", "--stages names none")])
def test_a_dry_run_refuses_what_the_run_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stages: str, said: str
) -> None:
    """A plan of nothing, printed without a word, would be believed."""
    config = Path(__file__).parents[2] / "configs" / "tiny.toml"
    with pytest.raises(typer.Exit):
        pipeline(config, tmp_path / "x", stages=stages, overrides=[], dry_run=True)
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_command_ends_with_status_2(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["dequantize", str(tmp_path / "none"), str(tmp_path / "out")])
    assert done.exit_code == 2 and "config.json is missing" in done.stderr
