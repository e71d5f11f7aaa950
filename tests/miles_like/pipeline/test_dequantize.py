"""FP8 checkpoint to bf16 checkpoint: the numbers, the files, the refusals, the memory.

Letters: n rows, k columns.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from miles_like.hf.checkpoint import HFCheckpoint, write_hf
from miles_like.pipeline.dequantize import dequantize_checkpoint, dequantized_bytes
from quant.hf_config import spec_to_hf
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from tests.support.minifloat_rounding import e4m3_decode
from tests.support.refusals import refuses

MODEL = Path(__file__).parents[3] / "configs" / "tiny" / "model.json"
SPEC = QuantSpec(format=QuantFormat.FP8)


def fp8_model(path: Path, *, block: tuple[int, int] = (128, 128)) -> tuple[torch.nn.Module, Path]:
    """transformers' DeepSeek-V3 of the tiny config, random weights; its FP8 directory, scales in other files."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = json.loads(MODEL.read_text())
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**json.loads(MODEL.read_text()))).to(torch.bfloat16)
    model.save_pretrained(path / "bf16")
    spec = QuantSpec(format=QuantFormat.FP8, block=block)
    stored = list(quantize_stream(HFCheckpoint(path / "bf16").stream(), spec))
    stored.sort(key=lambda item: item[0].endswith("_scale_inv"))  # all scales after all codes, so in later files
    write_hf(path / "fp8", stored, {**config, "quantization_config": spec_to_hf(spec)}, shard_bytes=200_000)
    (path / "fp8" / "tokenizer.json").write_text("{}")
    return model, path / "fp8"


@pytest.mark.parametrize("block", [(128, 128), (48, 40)])
def test_every_weight_is_code_times_scale(tmp_path: Path, block: tuple[int, int]) -> None:
    """Against the definition, indexed element by element with our own e4m3 table; blocks of 48 x 40 leave ragged edges.

    What was not quantized must be bit-equal, names complete, the size foretold.
    """
    _, source = fp8_model(tmp_path, block=block)
    fp8 = HFCheckpoint(source)
    written = dequantize_checkpoint(source, tmp_path / "out", shard_bytes=300_000)
    out = HFCheckpoint(tmp_path / "out")
    assert written == out.nbytes == dequantized_bytes(fp8)
    assert out.names() == [n for n in fp8.names() if not n.endswith("_scale_inv")]
    quantized = 0
    for name, got in out.stream():
        stored = fp8.read(name)
        if stored.dtype is not torch.float8_e4m3fn:
            assert got.dtype is stored.dtype and torch.equal(got, stored)
            continue
        quantized += 1
        rows, columns = (torch.arange(size) // b for size, b in zip(stored.shape, block, strict=True))
        scale = fp8.read(name + "_scale_inv")[rows][:, columns]
        assert got.dtype is torch.bfloat16
        assert torch.equal(got, (e4m3_decode(stored.view(torch.uint8)) * scale).to(torch.bfloat16))
    assert quantized > 100


def test_config_index_and_tokenizer(tmp_path: Path) -> None:
    """A reader must not look for scales that are gone, and must find everything else."""
    _, source = fp8_model(tmp_path)
    dequantize_checkpoint(source, tmp_path / "out", shard_bytes=300_000)
    out = HFCheckpoint(tmp_path / "out")
    assert out.config == json.loads(MODEL.read_text())
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_transformers_loads_it(tmp_path: Path) -> None:
    """Every parameter arrives under its name: logits are near to those of the model that was quantized, and not equal.

    Not covered: transformers' own loading of the FP8 directory, which needs a package this project does not.
    """
    from transformers import DeepseekV3ForCausalLM

    model, source = fp8_model(tmp_path)
    dequantize_checkpoint(source, tmp_path / "out")
    loaded, info = DeepseekV3ForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(2, 34)[None]
    with torch.no_grad():
        want, got = model.eval().float()(ids).logits, loaded.eval().float()(ids).logits
    error = float((want - got).norm() / want.norm())
    assert 1e-4 < error < 0.2


def test_a_model_that_is_not_quantized_is_copied(tmp_path: Path) -> None:
    """The stage runs whatever checkpoint it is given."""
    write_hf(tmp_path / "in", [("a.weight", torch.ones(3, 2))], {"x": 1})
    assert dequantize_checkpoint(tmp_path / "in", tmp_path / "out") == 24
    assert HFCheckpoint(tmp_path / "out").config == {"x": 1}
    assert torch.equal(HFCheckpoint(tmp_path / "out").read("a.weight"), torch.ones(3, 2))


Q = "model.layers.0.self_attn.q_proj.weight"


def broken(case: str) -> list[tuple[str, Tensor]]:
    codes, scale = torch.ones(4, 4).to(torch.float8_e4m3fn), torch.ones(1, 1)
    norm = ("model.norm.weight", torch.tensor([1.0, float("inf")]))
    return {
        "without scale": [(Q, codes)],
        "without codes": [(Q + "_scale_inv", scale)],
        "wrong shape": [(Q, codes), (Q + "_scale_inv", torch.ones(2, 1))],
        "overflow": [(Q, codes), (Q + "_scale_inv", scale * 3.4e38)],
        "not finite": [norm],
    }[case]


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("without scale", Q),
        ("without codes", Q),
        ("wrong shape", Q + "_scale_inv"),
        ("overflow", Q),
        ("not finite", "model.norm.weight"),
    ],
)
def test_refusals_name_the_tensor_and_leave_nothing(tmp_path: Path, case: str, name: str) -> None:
    """A half-written directory would be taken for whole by the next stage."""
    write_hf(tmp_path / "in", broken(case), {"quantization_config": spec_to_hf(SPEC)})
    with refuses(ValueError, name):
        dequantize_checkpoint(tmp_path / "in", tmp_path / "out")
    assert [f.name for f in tmp_path.iterdir()] == ["in"]


MEASURE = """
import re, sys
from pathlib import Path
from miles_like.pipeline.dequantize import dequantize_checkpoint
def peak():  # getrusage's would begin at that of the process that started this one
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
dequantize_checkpoint(sys.argv[1], sys.argv[3])  # imports, allocator and thread pools come before the measurement
before = peak()
dequantize_checkpoint(sys.argv[2], sys.argv[4])
print(peak() - before)
"""


def test_memory_is_that_of_a_few_tensors(tmp_path: Path) -> None:
    """Peak growth of a process that dequantizes a model of 24 weights of 8 MB in bf16, scales after all codes.

    Bound: four such weights and the fp32 working band. Were the model held, it would be 96 MB as codes, 192 as bf16.
    """
    config = {"quantization_config": spec_to_hf(SPEC)}

    def model(count: int, n: int) -> list[tuple[str, Tensor]]:
        names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(count)]
        codes = torch.ones(n, 2048).to(torch.float8_e4m3fn)
        scale = torch.ones(-(-n // 128), 16)
        return [(x, codes) for x in names] + [(x + "_scale_inv", scale) for x in names]

    write_hf(tmp_path / "small", model(2, 256), config)
    write_hf(tmp_path / "large", model(24, 2048), config)
    command = [sys.executable, "-c", MEASURE, *(str(tmp_path / x) for x in ("small", "large", "s", "l"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    assert HFCheckpoint(tmp_path / "l").nbytes == 24 * 2048 * 2048 * 2
    assert int(done.stdout) < 70 << 10, f"peak grew by {int(done.stdout) >> 10} MB"
