"""A checkpoint that was encoded for the rollout is not encoded again, as long as all of it is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_like.config.load import load_config
from miles_like.pipeline import rollout_checkpoint
from miles_like.storage.completion import Output, file_fact, files_under
from tests.support.tiny_models import random_tensors, tiny_qwen, write_checkpoint

TINY = Path(__file__).parents[3] / "configs" / "tiny.toml"


def test_a_second_start_encodes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = tiny_qwen()
    root = write_checkpoint(tmp_path / "hf", hf, random_tensors(hf))
    fetched = Output(root, {p.name: file_fact(p) for p in files_under(root)})
    config, out = load_config(TINY), tmp_path / "stage" / "served"
    out.parent.mkdir()
    first = rollout_checkpoint.served_output(config, fetched, out)
    assert first.root == out and set(first.files) == {p.name for p in files_under(out)}
    sums, encoded = {n: f["sha256"] for n, f in first.files.items()}, list[Path]()
    store = rollout_checkpoint.store_served
    monkeypatch.setattr(rollout_checkpoint, "store_served", lambda *given: (encoded.append(given[1]), store(*given)))
    assert rollout_checkpoint.served_output(config, fetched, out) == first and not encoded
    (out / "config.json").write_text("{}")  # of another size
    again = rollout_checkpoint.served_output(config, fetched, out)
    assert encoded == [out] and {n: f["sha256"] for n, f in again.files.items()} == sums
