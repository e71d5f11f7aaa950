"""The trainer's model must be the published model: with the same weights, Megatron's logits are transformers', and
every token goes to the same experts in every layer.

One fp32 checkpoint goes through the project's converter and Megatron's stock loader on one side; transformers' own
model, which saved it, is the other. This holds the rotary convention, yarn's two mscales, the softmax scale, the order
of q / k / v inside the projections, group-limited routing with its bias, the gate normalization and scaling, the shared
experts. Weights are large enough, and biases and norms random, so that each of these moves the logits by 0.6 or more
(measured on transformers' side: yarn, mscale, interleaving, groups, bias, scaling), thousands of times the bound. For
Qwen3-MoE: the order of fused heads, their norms, the rotary base, gates normalized and not, dense layers among the
others, a tied head. For all: biases; for GLM-4.5: the turned part of a head. The example of docs/families.md is held to
the same. Of each family one model is cut into two pipeline stages of unequal size too, and read by the trainer itself.
Not covered: bf16, other layouts (test_parallel_invariance.py compares them with one rank), multi-token prediction,
TransformerEngine's kernels.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bridge.families.registry import family_of
from miles_like.types import MicroBatch
from tests.support import families_page, toy
from tests.support.chosen import chosen, later
from tests.support.layouts import agree_on_port
from tests.support.spawn import free_port, run_ranks
from tests.support.tiny_models import CONFIGS, KIMI, leave, load_converted, megatron_rank, transformers_model

LENGTHS = (96, 33, 128)  # packed for Megatron, one at a time for transformers
BOUND = 1e-4

MODELS = {**CONFIGS, **KIMI, "docs/families.md": families_page.MIXTRAL}
# model -> its two pipeline stages; where a model has experts, both stages have routers
STAGES: dict[str, tuple[dict[str, int], list[int]]] = {
    "one_group": ({"first_stage_layers": 3}, [3, 1]),
    "kimi_two_dense_no_yarn": ({"last_stage_layers": 1}, [3, 1]),
    "qwen_every_second_layer": ({"first_stage_layers": 3}, [3, 1]),
    "qwen_dense_tied": ({"first_stage_layers": 1}, [1, 2]),
    "glm_tied": ({"last_stage_layers": 1}, [3, 1]),
}
# of each family a model, and every model that is cut
FIRST = ("tiny", *STAGES, "docs/families.md")
HERE = "tests/laws/test_megatron_equals_transformers.py"
Answer = tuple[torch.Tensor, list[torch.Tensor]]  # logits, and per MoE layer which experts a token has


def _fp32(name: str) -> dict[str, Any]:
    return {**MODELS[name], "torch_dtype": "float32"}


def _tokens(vocab: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab, (n,), generator=g) for n in LENGTHS]


def _megatron_answers(rank: int, world_size: int, spare: int, jobs: list[tuple[str, str, int]]) -> list[Any]:
    """For each converted checkpoint: numpy logits [sum of LENGTHS, vocab] and, a layer, experts of each token [sum of
    LENGTHS, experts] bool."""
    with families_page.registered():
        return [_megatron_answer(rank, world_size, *job) for job in jobs]


def _megatron_answer(rank: int, world_size: int, name: str, path: str, port: int) -> Any:
    hf = _fp32(name)
    chunks, parallel = megatron_rank(hf, rank, world_size, port, dtype="float32")
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_bridge.model.build import routers, unwrap

    load_converted(chunks, parallel, Path(path))
    tokens = torch.cat(_tokens(hf["vocab_size"]))[None]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packed = PackedSeqParams("thd", cu, cu, cu, cu, max(LENGTHS), max(LENGTHS))
    model, maps = unwrap(chunks[0]).eval(), []
    for router in routers(chunks):
        router.register_forward_hook(lambda _, args, out: maps.append(out[1].numpy()))
    with torch.no_grad():
        logits = model(tokens, positions, None, packed_seq_params=packed)[0].numpy()
    leave()
    return logits, maps


def _reference(model: Any, vocab: int, experts: int) -> Answer:
    """transformers' logits and choices, one sequence at a time."""
    layers = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    chosen: list[list[torch.Tensor]] = [[] for _ in layers]
    for at, block in zip(chosen, layers, strict=True):
        block.experts.register_forward_pre_hook(lambda _, args, at=at: at.append(args[1]))  # hidden, indices, gates
    with torch.no_grad():
        logits = torch.cat([model(t[None]).logits[0] for t in _tokens(vocab)])
    maps = [torch.nn.functional.one_hot(torch.cat(ids), experts).sum(1).bool() for ids in chosen]
    return logits, maps


def _micro_batch(parts: list[torch.Tensor]) -> MicroBatch:
    """Sequences end to end; every token has a label under loss, the token after it."""
    tokens = torch.cat(parts)
    return MicroBatch(
        samples=tuple(f"text/{i}" for i in range(len(parts))),
        tokens=tokens,
        labels=tokens.roll(-1),
        positions=torch.cat([torch.arange(len(p)) for p in parts]),
        cu_seqlens=torch.tensor([0, *(len(p) for p in parts)]).cumsum(0).int(),
        loss_mask=torch.ones(len(tokens), dtype=torch.bool),
        advantages=torch.zeros(len(tokens)),
        rollout_logprobs=torch.zeros(len(tokens)),
        routing=None,
    )


def _row(vocab: int) -> list[MicroBatch]:
    """The same tokens in two micro-batches of different lengths."""
    first, second, third = _tokens(vocab)
    return [_micro_batch([first, second]), _micro_batch([third])]


def _in_stages(rank: int, world: int, spare: int, where: Path, roots: dict[str, Path]) -> dict[str, Any]:
    """name -> (layers here, numpy experts of each token [sum of LENGTHS, experts] bool of each MoE layer here, logits
    of the last stage as of one rank, log-probabilities of the labels [sum of LENGTHS])."""
    out = {}
    for i, (name, root) in enumerate(roots.items()):
        cfg = toy.config(str(root / "hf"), mode="off", pp=world, **STAGES[name][0])
        with toy.trainer(cfg, rank, world, agree_on_port(where / f"port-{i}", rank)) as t:
            t.load_weights(root / "megatron")
            out[name] = _stage_answer(t)
    return out


def _stage_answer(t: Any) -> Any:
    from megatron_bridge.model.build import routers

    row = _row(t.hf["vocab_size"])
    logprobs = torch.cat(t.logprobs(row)).numpy()
    maps: dict[int, list[torch.Tensor]] = {r.layer_number - 1: [] for r in routers(t.chunks)}
    for router in routers(t.chunks):
        at = maps[router.layer_number - 1]
        router.register_forward_hook(lambda _, args, out, at=at: at.append(out[1]))
    # the trainer's own schedule, but for labels: without them the last stage answers with logits
    shards = [replace(s, labels=None) for s in t._step._shards(row, forward_only=True, source="own")]
    logits = t._step._schedule(
        shards, lambda _, s, out: (out.sum(), out.new_ones((), dtype=torch.int), out[0]), forward_only=True
    )
    experts = {layer: torch.cat(found).numpy() for layer, found in maps.items()}
    return len(t.models[0].decoder.layers), experts, torch.cat(logits).numpy() if logits else None, logprobs


@pytest.fixture(scope="module")
def published(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, Answer]]:
    """name -> (where the checkpoint lies, in "hf" and converted in "megatron", transformers' answer)."""
    from megatron_bridge.convert.to_megatron import to_megatron

    out = {}
    with families_page.registered():
        for number, name in enumerate(chosen(request, "name", MODELS)):
            hf, root = _fp32(name), tmp_path_factory.mktemp(f"model-{number}")
            torch.manual_seed(7)
            model = transformers_model(hf).eval()
            with torch.no_grad():
                for key, value in model.state_dict().items():
                    value.add_(torch.randn(value.shape) * (0.3 if "norm" in key or "bias" in key else 0.05))
            out[name] = root, _reference(model, hf["vocab_size"], family_of(hf).num_experts(hf))
            model.save_pretrained(root / "hf")
            if hf["model_type"] == "kimi_k2":  # transformers has another name for it
                (root / "hf" / "config.json").write_text(json.dumps(hf))
            to_megatron(root / "hf", root / "megatron")
    return out


@pytest.fixture(scope="module")
def answers(published: dict[str, tuple[Path, Answer]]) -> dict[str, tuple[Answer, Answer]]:
    """name -> (transformers', Megatron's)."""
    jobs = [(name, str(root / "megatron"), free_port()) for name, (root, _) in published.items()]
    (found,) = run_ranks(_megatron_answers, 1, jobs, keep=True)
    ours = [(torch.from_numpy(logits), [torch.from_numpy(m) for m in maps]) for logits, maps in found]
    return {name: (theirs, own) for (name, (_, theirs)), own in zip(published.items(), ours, strict=True)}


@pytest.fixture(scope="module")
def staged(published: dict[str, tuple[Path, Answer]], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two stages answers."""
    roots = {name: published[name][0] for name in STAGES if name in published}
    return run_ranks(_in_stages, 2, tmp_path_factory.mktemp("ports"), roots, keep=True)


@pytest.mark.parametrize("name", later(MODELS, FIRST, beside=HERE))
def test_experts_are_the_same(name: str, answers: dict[str, tuple[Answer, Answer]]) -> None:
    (_, theirs), (_, ours) = answers[name]
    hf = MODELS[name]
    with families_page.registered():
        assert len(theirs) == len(family_of(hf).moe_layers(hf))
    for layer, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        assert a.shape == b.shape
        assert torch.equal(a, b), f"MoE layer {layer}: {int((a != b).any(1).sum())} tokens go elsewhere"


@pytest.mark.parametrize("name", later(MODELS, FIRST, beside=HERE))
def test_logits_are_equal(name: str, answers: dict[str, tuple[Answer, Answer]]) -> None:
    (theirs, _), (ours, _) = answers[name]
    assert theirs.shape == ours.shape
    assert float(theirs.std()) > 0.1, "the logits are nearly constant"
    assert float((theirs - ours).abs().max()) <= BOUND


@pytest.mark.parametrize("name", STAGES)
def test_uneven_stages_give_the_same(
    name: str, published: dict[str, tuple[Path, Answer]], staged: list[dict[str, Any]]
) -> None:
    """Logits of the last stage, log-probabilities on each, and each stage's own experts."""
    theirs, chosen = published[name][1]
    (first, upper, nothing, received), (last, lower, ours, own) = (rank[name] for rank in staged)
    hf = MODELS[name]
    assert [first, last] == STAGES[name][1]
    assert nothing is None
    assert ours.shape == theirs.shape
    assert float((theirs - torch.from_numpy(ours)).abs().max()) <= BOUND
    labels = torch.cat([batch.labels for batch in _row(hf["vocab_size"])])
    want = theirs.log_softmax(-1).gather(1, labels[:, None])[:, 0]
    for logprobs in (received, own):
        assert float((want - torch.from_numpy(logprobs)).abs().max()) <= BOUND
    layers = family_of(hf).moe_layers(hf)
    assert [*upper, *lower] == list(layers)
    assert not layers or (upper and lower), "a stage without routers chooses nothing"
    for layer, a in zip(layers, chosen, strict=True):
        assert torch.equal(a, torch.from_numpy((upper | lower)[layer])), f"layer {layer}: tokens go elsewhere"
