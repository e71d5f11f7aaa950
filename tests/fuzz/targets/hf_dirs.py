"""Hugging Face directories that are converted, quantized and decoded: damaged files, forged headers and counts, links,
FIFOs and devices.

What an accepted directory is read as must be what the `safetensors` library reads; after a refusal nothing is left of
the output; no text of a file outside the directory may be in it.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from miles_like.hf.checkpoint import HFCheckpoint, write_hf
from tests.fuzz.commands import command, outcome_of, together
from tests.fuzz.mutate import NUMBERS, TEXTS, changed, spoiled
from tests.fuzz.pool import Case, Outcome, long_tier
from tests.support.tiny_models import random_tensors, tiny

CASES = 500
SECRET = "a secret of this machine"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
FILES = ("config.json", "model.safetensors.index.json", *SHARDS, "tokenizer.json", "generation_config.json")
COMMANDS = (("quantize",), ("dequantize",), ("convert", "to-megatron"))
COUNTS = ("num_hidden_layers", "n_routed_experts", "vocab_size", "intermediate_size", "n_group", "num_attention_heads")


@functools.cache
def base() -> Path:
    """A tiny model in two shards with companions."""
    path = Path(tempfile.mkdtemp(prefix="fuzz-hf-")) / "hf"
    hf = tiny(num_hidden_layers=2)
    tensors = random_tensors(hf)
    half = sum(x.nbytes for x in tensors.values()) * 6 // 10
    write_hf(path, tensors.items(), hf, shard_bytes=half)
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    (path / "generation_config.json").write_text('{"eos_token_id": 1}')
    assert all((path / name).exists() for name in FILES), sorted(p.name for p in path.iterdir())
    return path


def draw(rng: random.Random) -> Case:
    kind = rng.choice(("spoil", "forge", "forge", "count", "count", "header", "header", "link", "fifo", "remove"))
    case: Case = {"kind": kind, "file": rng.choice(FILES), "seed": rng.randrange(2**32)}
    case["command"] = rng.randrange(len(COMMANDS))
    if kind == "forge":
        case["file"] = rng.choice(("config.json", "config.json", "model.safetensors.index.json"))
    elif kind == "count":
        case |= {"file": "config.json", "key": rng.choice(COUNTS), "to": rng.choice((*NUMBERS, *TEXTS[:6]))}
    elif kind == "header":
        case["file"] = rng.choice(SHARDS)
    elif kind == "link":
        case["to"] = rng.choice(("outside", "/dev/zero", "/dev/null", "/", "itself", "config.json"))
    return case


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def change(path: Path, case: Case) -> None:
    file, rng, kind = path / case["file"], random.Random(case["seed"]), case["kind"]
    if kind == "spoil":
        file.write_bytes(spoiled(rng, file.read_bytes()))
    elif kind == "forge":
        file.write_text(json.dumps(changed(rng, json.loads(file.read_text()))))
    elif kind == "count":
        file.write_text(json.dumps(json.loads(file.read_text()) | {case["key"]: case["to"]}))
    elif kind == "header":
        header, data = header_of(file.read_bytes())
        name = rng.choice([n for n in header if n != "__metadata__"])
        entry = header[name]
        odd = rng.choice(("3", 3.0, -1, 2**63, 10**30, 0.5, None, True))
        where = rng.choice(("shape", "begin", "end", "dtype", "any"))
        if where == "shape" and entry["shape"]:
            entry["shape"][rng.randrange(len(entry["shape"]))] = odd
        elif where in ("begin", "end"):
            entry["data_offsets"][where == "end"] = odd
        elif where == "dtype":
            entry["dtype"] = rng.choice(("F32", "I64", "F4", "BOOL", odd))
        else:
            header = changed(rng, header)
        raw = json.dumps(header).encode()
        file.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    else:
        file.unlink()
        if kind == "fifo":
            os.mkfifo(file)
        elif kind == "link":
            known = {"outside": path.parent / "outside", "itself": file}
            file.symlink_to(known.get(case["to"], case["to"]))


def play(case: Case, folder: Path) -> Outcome:
    path, out, outside = folder / "hf", folder / "out", folder / "outside"
    shutil.copytree(base(), path)
    outside.write_text(json.dumps({"eos_token_id": 2, "secret": SECRET}))
    change(path, case)
    read = outcome_of(lambda: HFCheckpoint(path))
    done = command(*COMMANDS[case["command"]], str(path), str(out))
    if done.kind != "accepted" and (out.exists() or len(list(folder.iterdir())) != 2):
        left = sorted(p.name for p in folder.iterdir())
        if left != ["hf", "out.partial", "outside"]:  # units of a conversion, which goes on where it stopped
            return Outcome(kind="unsound", words=f"refused ({done.words[:200]}), and left {left}")
    if out.exists() and any(SECRET.encode() in p.read_bytes() for p in out.rglob("*") if p.is_file()):
        return Outcome(kind="unsound", words="the output holds a file from outside the directory")
    if read.kind == "accepted" and (wrong := differing(path)):
        return Outcome(kind="unsound", words=f"{wrong} is read as another than safetensors reads")
    return together((read, done))


def differing(path: Path) -> str | None:
    """A tensor that is not read as the safetensors library reads it."""
    checkpoint = HFCheckpoint(path)
    files = sorted({checkpoint.info(name).file for name in checkpoint.names()})
    theirs = {name: x for file in files for name, x in load_file(file).items()}
    if theirs.keys() != set(checkpoint.names()):
        return str(min(theirs.keys() ^ set(checkpoint.names())))
    for name, want in theirs.items():
        have = checkpoint.read(name)
        same = have.dtype == want.dtype and have.shape == want.shape
        if not same or not torch.equal(have.view(torch.uint8), want.contiguous().view(torch.uint8)):
            return name
    return None


def run(cases: int, seed: int) -> dict[str, float | int | str]:
    return long_tier("hf_dirs", cases, seed)
