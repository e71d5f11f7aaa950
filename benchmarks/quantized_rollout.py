"""What quantized weights cost the embedded engine: seconds a generated token and resident bytes, beside BF16's.

One random model (configs/tiny/model.json), stored in BF16 and in each format over its usual modules, is served side by
side, quantized weights decoded once ("decoded") and decoded at every use ("codes"). All have the same prompts, lengths
and threads and are timed in turn, round by round; a ratio is the median over the rounds of one round's two times.
Resident bytes are those of stored weights, of what is multiplied with where that is a copy, and of the buffer that
codes are decoded into.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from figures import add_write, finish
from rollout_throughput import SAMPLES, equal_work, make_model, time_engine
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from quant.hf_config import quantized_config
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from rollout.embedded.engine.engine import EngineLimits
from rollout.embedded.server.service import Service

GOALS = {"seconds_over_bf16": 1.3, "bytes_over_bf16": 1.0}  # of codes, at most, in FP8 and INT4, at every batch
OF_GOALS = (QuantFormat.FP8, QuantFormat.INT4)
BF16 = ("bf16", "decoded")
Key = tuple[str, str]  # format, what is kept


def store(plain: Path, out: Path, spec: QuantSpec | None) -> Path:
    """The model directory `plain` in BF16 or quantized."""
    tensors = load_file(plain / "model.safetensors")
    stored = ((n, t if n.endswith("bias") else t.to(torch.bfloat16)) for n, t in tensors.items())
    out.mkdir()
    config = quantized_config(json.loads((plain / "config.json").read_text()), spec, list(tensors))
    (out / "config.json").write_text(json.dumps(config))
    save_file(dict(quantize_stream(stored, spec)), out / "model.safetensors")
    return out


def serve(path: Path, formats: list[QuantFormat], samples: int) -> dict[Key, Service]:
    make_model(path / "plain")
    limits = EngineLimits(max_running=samples, max_total_tokens=samples * 64)
    out = {BF16: Service(store(path / "plain", path / "bf16", None), limits)}
    for format in formats:
        where = store(path / "plain", path / format, QuantSpec.of(format))
        for kept in ("decoded", "codes"):
            out[format.value, kept] = Service(where, limits, weights=kept)
    return out


def measure(services: dict[Key, Service], batches: list[int], length: int, rounds: int) -> dict[int, dict[Key, float]]:
    """running samples -> service -> seconds over BF16's."""
    out: dict[int, dict[Key, float]] = {}
    for samples in batches:
        work = equal_work(samples // SAMPLES, length)
        for service in services.values():
            time_engine(service, equal_work(samples // SAMPLES, 2))
        turns = [{key: time_engine(s, work) for key, s in services.items()} for _ in range(rounds)]
        out[samples] = {key: statistics.median(t[key] / t[BF16] for t in turns) for key in services}
        print(f"{samples} samples: BF16 {work.tokens / statistics.median(t[BF16] for t in turns):.0f} tokens/s")
    return out


def report(services: dict[Key, Service], ratios: dict[int, dict[Key, float]], threads: int) -> bool:
    """The table, then the line of JSON."""
    figures: dict[str, float] = {"threads": threads, "weights_bytes_bf16": services[BF16].weights_bytes}
    heads = "".join(f"{f'{n} samples':>14}" for n in ratios)
    print(f"{'':24}{'bytes':>12}{'/ BF16':>9}{heads}   seconds over BF16's")
    worst = dict.fromkeys(GOALS, 0.0)
    for key, service in services.items():
        format, kept = key
        name, size = f"{format}_{kept}", service.weights_bytes / services[BF16].weights_bytes
        columns = "".join(f"{r[key]:14.2f}" for r in ratios.values())
        print(f"{format:>12} {kept:11}{service.weights_bytes:12}{size:9.2f}{columns}")
        if key == BF16:
            continue
        figures[f"weights_bytes_{name}"] = service.weights_bytes
        figures |= {f"seconds_over_bf16_{name}_{n}": round(r[key], 3) for n, r in ratios.items()}
        if kept == "codes" and format in OF_GOALS:
            worst["bytes_over_bf16"] = max(worst["bytes_over_bf16"], round(size, 3))
            slowest = max(r[key] for r in ratios.values())
            worst["seconds_over_bf16"] = max(worst["seconds_over_bf16"], round(slowest, 3))
    figures |= worst
    holds = all(worst[k] <= goal for k, goal in GOALS.items())
    finish("quantized_rollout", figures, GOALS, holds)
    return holds


def main() -> int:
    """0 when the goals hold."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(p)
    p.add_argument("--quick", action="store_true", help="the formats of the goals, within a minute")
    p.add_argument("--threads", type=int, default=1, help="of each engine")
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    batches = [256, 512]
    formats: list[QuantFormat] = list(OF_GOALS) if args.quick else [f for f in QuantFormat if f is not QuantFormat.BF16]
    with tempfile.TemporaryDirectory() as path, torch.inference_mode():
        services = serve(Path(path), formats, batches[-1])
        ratios = measure(services, batches, 8 if args.quick else 24, 5 if args.quick else 9)
        holds = report(services, ratios, args.threads)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
