"""Whatever layout trains, what leaves it is the Hugging Face checkpoint: HF -> converted -> loaded by a trainer -> its
save -> HF is the input, bit for bit, for every family and layout.

Both optimizers' states lie beside the weights. Oracle: the tensors that were written. Not covered: virtual stages
together with expert parallelism, draft layers of tied models, checkpoints of TransformerEngine's spec, CUDA.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bridge.config import ParallelConfig
from megatron_bridge.convert.to_hf import to_hf
from megatron_bridge.families.registry import family_of
from megatron_bridge.plan.layout import check_layout
from miles_like.hf.checkpoint import HFCheckpoint
from tests.support import toy
from tests.support.chosen import chosen
from tests.support.converted import converted, differing
from tests.support.layouts import EXPERTS
from tests.support.refusals import refuses
from tests.support.spawn import free_port, run_ranks
from tests.support.tiny_models import CONFIGS, random_tensors

pytestmark = pytest.mark.long(beside="tests/laws/test_weight_round_trip.py")
WORLD = 4
LAYOUTS: dict[str, dict[str, int]] = {
    "TP2": {"tp": 2, "dp": 2},
    "PP2": {"pp": 2, "dp": 2},
    "EP2": {"ep": 2, "dp": 4},
    "ETP2": {"etp": 2, "dp": 4},
    "TP2 x PP2": {"tp": 2, "pp": 2},
    "uneven PP": {"pp": 2, "dp": 2, "first_stage_layers": 1},
    "PP2 x VPP2": {"pp": 2, "vpp": 2, "dp": 2},
}


def _models() -> dict[str, dict[str, Any]]:
    """Every config with 4 layers and few experts; each second one of those that may have draft layers has one."""
    models: dict[str, dict[str, Any]] = {}
    for i, (name, config) in enumerate(CONFIGS.items()):
        models[name] = {**config, "num_hidden_layers": 4}
        models[name] |= {key: EXPERTS for key in ("n_routed_experts", "num_experts") if key in config}
        may_draft = family_of(config).mtp_layers({**config, "num_nextn_predict_layers": 1})
        if i % 2 and may_draft and not config.get("tie_word_embeddings"):
            models[name]["num_nextn_predict_layers"] = 1
    return models


MODELS = _models()


def _takes(hf: dict[str, Any], layout: dict[str, int]) -> bool:
    try:
        check_layout(ParallelConfig(**layout), hf)
    except ValueError:
        return False
    return True


def _cases() -> list[tuple[str, str]]:
    """(model, layout): every layout that a family takes, its configs taking turns."""
    families: dict[str, list[str]] = {}
    for name, hf in MODELS.items():
        families.setdefault(family_of(hf).name, []).append(name)
    cases = []
    for names in families.values():
        for turn, (layout, sizes) in enumerate(LAYOUTS.items()):
            if "vpp" in sizes and any(LAYOUTS[x] == sizes for _, x in cases):
                continue  # once: it changes nothing but which rank holds which layer
            order = names[turn % len(names) :] + names[: turn % len(names)]
            model = next((name for name in order if _takes(MODELS[name], sizes)), None)
            if model is not None:
                cases.append((model, layout))
    return cases


CASES = _cases()
LORA = {"rank": 4, "alpha": 6.0, "targets": ["attention", "experts", "shared_experts", "mlp"]}
ADAPTED = {"TP2, ETP2, PP2": {"tp": 2, "etp": 2, "pp": 2}, "EP2": {"ep": 2, "dp": 4}}


def _case_dir(root: Path, case: tuple[str, str]) -> Path:
    return root / "saved" / "-".join(case).replace(" ", "")


def _load_and_save(
    rank: int,
    world: int,
    spare: int,
    root: Path,
    ports: list[int],
    asked: list[tuple[str, str]],
    adapted: list[str],
) -> dict[str, dict[str, Any]]:
    """What each adapted model publishes."""
    for i, (case, port) in enumerate(zip(CASES, ports, strict=False)):
        model, layout = case
        if case not in asked:
            continue
        hf = MODELS[model]
        drafts = {"mtp_coefficient": 0.1} if hf.get("num_nextn_predict_layers") else {}
        cfg = toy.config(
            str(root / model / "hf"),
            dtype="float32" if i % 5 == 0 else "bfloat16",
            distributed_optimizer=i % 2 == 0,
            **LAYOUTS[layout],
            **drafts,
        )
        with toy.trainer(cfg, rank, world, port) as t:
            t.load_weights(root / model / "megatron")
            t.save(_case_dir(root, case))
    published = {}
    for i, (layout, sizes) in enumerate(ADAPTED.items()):
        if layout not in adapted:
            continue
        cfg = toy.config(str(root / "tiny" / "hf"), dtype="bfloat16", lora=LORA, **sizes)
        with toy.trainer(cfg, rank, world, ports[len(CASES) + i]) as t:
            t.load_weights(root / "tiny" / "megatron")
            g = torch.Generator().manual_seed(rank)
            with torch.no_grad():
                for name, value in t.models[0].named_parameters():
                    if name.endswith("lora_b"):
                        value.copy_(torch.randn(value.shape, generator=g))
            t.save(root / "saved" / layout)
            # what other ranks hold of the same adapter may differ: what was saved counts
            t.load_weights(root / "saved" / layout)
            published[layout] = {name: value.clone() for name, value in t.export()}
    return published


@pytest.fixture(scope="module")
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hf_round_trip")
    (root / "saved").mkdir()
    asked = chosen(request, "case", CASES)
    for name in {"tiny", *(model for model, _ in asked)}:
        tensors = random_tensors(MODELS[name], mtp=bool(MODELS[name].get("num_nextn_predict_layers")))
        converted(root / name, MODELS[name], tensors)
    ports = [free_port() for _ in range(len(CASES) + len(ADAPTED))]
    adapted = chosen(request, "layout", ADAPTED)
    ranks = run_ranks(_load_and_save, WORLD, root, ports, asked, adapted, keep=True)
    torch.save(ranks[0], root / "published.pt")
    return root


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda case: "-".join(case) if isinstance(case, tuple) else case,
)
def test_what_a_trainer_saves_is_the_checkpoint_it_loaded(case: tuple[str, str], root: Path, tmp_path: Path) -> None:
    hf = root / case[0] / "hf"
    to_hf(_case_dir(root, case), tmp_path / "out", hf_config=hf)
    assert differing(dict(HFCheckpoint(tmp_path / "out").stream()), dict(HFCheckpoint(hf).stream())) == []
    assert (tmp_path / "out" / "tokenizer.json").exists()
    shutil.rmtree(_case_dir(root, case))


def test_every_family_meets_every_layout_it_can_take() -> None:
    """A dense model has no experts to divide."""
    met = {(family_of(MODELS[model]).name, layout) for model, layout in CASES}
    families = {family_of(hf).name for hf in MODELS.values()}
    assert len(families) >= 4
    missed = {(f, x) for f in families for x in LAYOUTS if "vpp" not in LAYOUTS[x]} - met
    assert missed == {("qwen_dense", "EP2"), ("qwen_dense", "ETP2")}


@pytest.mark.parametrize("layout", ADAPTED)
def test_adapters_are_merged_as_they_are_published(layout: str, root: Path, tmp_path: Path) -> None:
    """W + lora_alpha / rank B A, rounded once: what the trainer serves of the model it saved. Without lora_alpha it is
    refused, for the checkpoint does not say it."""
    saved, hf = root / "saved" / layout, root / "tiny" / "hf"
    with refuses(ValueError, saved, "LoRA", "lora_alpha"):
        to_hf(saved, tmp_path / "out", hf_config=hf)
    to_hf(saved, tmp_path / "out", hf_config=hf, lora_alpha=LORA["alpha"])
    published = torch.load(root / "published.pt")[layout]
    merged = dict(HFCheckpoint(tmp_path / "out").stream())
    assert differing(merged, published) == []
    assert len(differing(merged, dict(HFCheckpoint(hf).stream()))) > 50
