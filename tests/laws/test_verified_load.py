"""A rank reads its own part of a converted checkpoint, every chunk of it verified; and a checkpoint that is damaged
anywhere is refused by every rank in one sentence, with the model as it was. Stock loading takes a flipped byte for a
weight, and leaves half a model behind when a file is short.

Not covered: more than two ranks, CUDA.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bridge.convert.directory.manifest import Manifest
from megatron_bridge.convert.to_megatron import to_megatron
from tests.support import toy
from tests.support.chosen import chosen, later
from tests.support.converted import converted, cut, edit_manifest, flip
from tests.support.layouts import ROUTED
from tests.support.spawn import free_port, run_ranks
from tests.support.tiny_models import random_tensors, tiny

# wide, so that weights are most of what is read, and not the 1.5 kB of framing of each chunk
SIZES = {"hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 512, "vocab_size": 2048}
HF = tiny(**SIZES, **ROUTED, num_hidden_layers=4)
LAYOUTS: dict[str, dict[str, int]] = {
    "TP2": {"tp": 2},
    "PP2": {"pp": 2},
    "EP2": {"dp": 2, "ep": 2},
    "ETP2": {"dp": 2, "etp": 2},
    "TP2, ETP2": {"tp": 2, "etp": 2},
}
LAST = "decoder.layers.3.mlp.experts.experts.linear_fc2.weight"  # read by the last rank alone in PP2


def _piece(path: Path) -> Any:
    return Manifest.read(path).tensors[LAST].pieces[-1]


def _flipped(path: Path) -> str:
    flip(path / _piece(path).file, _piece(path))
    return f"the bytes of {LAST} at"


def _truncated(path: Path) -> str:
    file = _piece(path).file
    cut(path / file, (path / file).stat().st_size - _piece(path).start - 10)
    return f"{file} is truncated"


def _missing(path: Path) -> str:
    (path / _piece(path).file).unlink()
    return f"{_piece(path).file} is missing"


def _other_sum(path: Path) -> str:
    tensors = dict(Manifest.read(path).tensors)
    pieces = tensors[LAST].pieces
    tensors[LAST] = replace(tensors[LAST], pieces=(*pieces[:-1], replace(pieces[-1], sum="0" * 32)))
    edit_manifest(path, tensors=tensors)
    return f"the bytes of {LAST} at"


def _other_common(path: Path) -> str:
    (path / "common.pt").write_bytes(b"")
    return "common.pt differs from the file that its manifest lists"


def _other_kind(path: Path) -> str:
    (path / "metadata.json").write_text("{")
    return "metadata.json differs from the file that its manifest lists"


def _no_common(path: Path) -> str:
    (path / "common.pt").unlink()
    return "common.pt is missing"


def _no_match(path: Path) -> str:
    tensors = dict(Manifest.read(path).tensors)
    del tensors[LAST]
    edit_manifest(path, tensors=tensors)
    return f"its manifest does not match: {LAST}"


def _other_vocabulary(path: Path) -> str:
    """Rows more than the model has: stock loading takes what fits."""
    hf = {**HF, "vocab_size": 2304}
    shutil.rmtree(path)
    converted(path.parent / "larger", hf, random_tensors(hf)).rename(path)
    return "does not fit this model: Global shape mismatch for loaded (torch.Size([2304, 512]))"


DAMAGES: dict[str, Callable[[Path], str]] = {
    f.__name__: f
    for f in (
        *(_flipped, _truncated, _missing, _other_sum, _no_match, _other_vocabulary),
        *(_other_common, _other_kind, _no_common),
    )
}


def _weights(t: Any) -> list[torch.Tensor]:
    return [x.detach().clone() for model in t.models for x in model.state_dict().values() if torch.is_tensor(x)]


def _loads(rank: int, world: int, spare: int, root: Path, ports: dict[str, int]) -> dict[str, Any]:
    """Layout -> (bytes read, bytes held) of this rank; damage -> (the message, whether the weights stayed)."""
    from megatron_bridge.trainer import load_weights  # it prepares the process before megatron is imported

    out: dict[str, Any] = {}
    for layout, port in ports.items():
        cfg = toy.config(str(root / "hf"), dtype="bfloat16", **LAYOUTS[layout])
        with toy.trainer(cfg, rank, world, port) as t:
            path = root / ("gridded" if "TP2" in layout else "megatron")
            read = load_weights(path, t.models, t.optimizer, t.parallel)
            out[layout] = (read, sum(x.nbytes for x in _weights(t)))
            if layout != "PP2":
                continue
            before = _weights(t)
            for name in DAMAGES:
                try:
                    load_weights(root / name, t.models, t.optimizer, t.parallel)
                    message = "no error"
                except ValueError as e:
                    message = str(e)
                with torch.no_grad():
                    same = all(torch.equal(a, b) for a, b in zip(before, _weights(t), strict=True))
                out[name] = (message, same)
    return out


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    root = tmp_path_factory.mktemp("verified")
    path = converted(root, HF, random_tensors(HF))
    to_megatron(root / "hf", root / "gridded", tp=2, etp=2)
    other = random_tensors(HF, seed=1)  # what is loaded by mistake would show
    good = converted(root / "other", HF, other)
    broken = {name: damage(Path(shutil.copytree(good, root / name))) for name, damage in DAMAGES.items()}
    assert path == root / "megatron"
    ports = {layout: free_port() for layout in dict.fromkeys(("PP2", *chosen(request, "layout", LAYOUTS)))}
    return run_ranks(_loads, 2, root, ports, keep=True), broken


@pytest.mark.parametrize("layout", later(LAYOUTS, ("PP2", "TP2, ETP2"), beside="tests/laws/test_verified_load.py"))
def test_a_rank_reads_about_what_it_holds(layout: str, found: tuple[list[dict[str, Any]], dict[str, str]]) -> None:
    """With the framing of chunks, and with the objects that megatron keeps beside each linear."""
    for ranks in found[0]:
        read, held = ranks[layout]
        assert held <= read < 1.1 * held, (layout, read, held)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_sentence_on_every_rank(damage: str, found: tuple[list[dict[str, Any]], dict[str, str]]) -> None:
    """Also on the rank whose own bytes are fine."""
    words = {ranks[damage][0] for ranks in found[0]}
    assert len(words) == 1
    (message,) = words
    assert found[1][damage] in message and "\n" not in message
    assert all(ranks[damage][1] for ranks in found[0])
