"""What `quantize --report` says of a model, computed here from the written directory by its definition."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from miles_like.hf.checkpoint import HFCheckpoint, write_hf
from miles_like.pipeline.dequantize import dequantize_checkpoint
from miles_like.pipeline.quant_report import QuantReport, place_of
from miles_like.pipeline.quantize import quantize_checkpoint
from quant.registry import CODECS, make_codec
from quant.spec import QuantFormat, QuantSpec
from tests.miles_like.pipeline.test_quantize import AT, CONFIG, Q, model

TOPS = {QuantFormat.INT4: 7.0, QuantFormat.MXFP4: 6.0, QuantFormat.NVFP4: 6.0}  # of the others 448


@pytest.mark.parametrize("fmt", CODECS)
def test_every_figure_is_its_definition(fmt: QuantFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels are those of `decode` where all scales are one: here they are taken from codes and scales apart."""
    tensors, spec = model(), QuantSpec.of(fmt, "all")
    if fmt is QuantFormat.NVFP4:
        spec = replace(spec, ignore=("self_attn",))
    write_hf(tmp_path / "in", tensors.items(), CONFIG)
    report = QuantReport(spec)
    monkeypatch.setattr("miles_like.pipeline.quant_plots.write_quant_plots", lambda *_: None)
    monkeypatch.setattr("miles_like.pipeline.quant_report._CHUNK", 1000)
    quantize_checkpoint(tmp_path / "in", tmp_path / "out", spec, report=report)
    dequantize_checkpoint(tmp_path / "out", tmp_path / "back")
    back, codec = HFCheckpoint(tmp_path / "back"), make_codec(spec)
    written = json.loads((tmp_path / "out" / "quant_report.json").read_text())
    layers = {(r["layer"], r["kind"], r["projection"]): r for r in written["layers"]}
    covered = [n for n, t in tensors.items() if spec.covers(n, t.shape)]
    assert set(layers) == {tuple(place_of(n)) for n in covered}
    encoded = codec.encode({n: tensors[n] for n in covered})
    for place, row in layers.items():
        names = [n for n in covered if tuple(place_of(n)) == place]
        was = torch.cat([tensors[n].flatten() for n in names]).double()
        now = torch.cat([back.read(n).flatten() for n in names]).double()
        levels = torch.cat([codec._unpack(next(iter(encoded[n].stored.values()))[None]).flatten() for n in names])
        assert row["weights"] == len(names) and row["elements"] == was.numel()
        snr = 10 * math.log10(float((was**2).sum() / ((was - now) ** 2).sum()))
        assert row["snr_db"] == pytest.approx(snr, abs=1e-6)
        top = levels.float().abs() == TOPS.get(fmt, 448.0)
        assert row["saturated"] == pytest.approx(float(top.float().mean()), abs=1e-7)
        lost = (levels == 0) & (was != 0)
        assert row["zero"] == pytest.approx(float(lost.sum() / (was != 0).sum()), abs=1e-7)
        assert row["bytes_before"] == 2 * was.numel()
        assert row["bytes_after"] == sum(encoded[n].nbytes for n in names)
    assert (
        written["total"]["elements"]
        == sum(r["elements"] for r in written["kinds"])
        == sum(tensors[n].numel() for n in covered)
    )
    rest = [t for n, t in tensors.items() if n not in covered]
    assert written["not_quantized"] == {"tensors": len(rest), "bytes": sum(t.nbytes for t in rest)}
    console = Console(record=True, width=150, file=io.StringIO())
    console.print(report.table())
    assert f"{written['total']['snr_db']:.2f}" in console.export_text()


@pytest.mark.slow
def test_there_is_a_picture_of_every_layer(tmp_path: Path) -> None:
    spec = QuantSpec(format=QuantFormat.NVFP4, ignore=("layers.0.self_attn",))
    write_hf(tmp_path / "in", model().items(), CONFIG)
    quantize_checkpoint(tmp_path / "in", tmp_path / "out", spec, report=QuantReport(spec))
    plots = {p.name: p.read_bytes()[:4] for p in (tmp_path / "out" / "quant_report").iterdir()}
    assert plots == dict.fromkeys(("snr_by_layer.png", "layer_000.png", "layer_001.png"), b"\x89PNG")
    HFCheckpoint(tmp_path / "out")  # a reader is not disturbed


def test_weights_that_lose_nothing_have_no_ratio(tmp_path: Path) -> None:
    """Of zeros, and of powers of two in FP8 with such scales: JSON has no infinity."""
    exact = torch.full((128, 128), 0.5, dtype=torch.bfloat16)
    write_hf(tmp_path / "in", [(Q, exact), (Q.replace("q_", "k_"), exact * 0)], CONFIG)
    spec = QuantSpec(format=QuantFormat.FP8_UE8M0)
    quantize_checkpoint(tmp_path / "in", tmp_path / "out", spec, report=QuantReport(spec))
    written = json.loads((tmp_path / "out" / "quant_report.json").read_text())
    assert [r["snr_db"] for r in written["kinds"]] == [None, None]
    assert [r["zero"] for r in written["kinds"]] == [0, 0]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        (Q, (0, "attention", "q_proj")),
        (f"{AT}.61.mlp.experts.255.up_proj.weight", (61, "routed experts", "up_proj")),
        (f"{AT}.7.mlp.shared_experts.down_proj.weight", (7, "shared experts", "down_proj")),
        (f"{AT}.7.mlp.shared_expert.down_proj.weight", (7, "shared experts", "down_proj")),
        ("model.language_model.layers.2.mlp.gate_proj.weight", (2, "dense MLP", "gate_proj")),
    ],
)
def test_where_a_weight_is(name: str, place: tuple[int, str, str]) -> None:
    assert tuple(place_of(name)) == place
