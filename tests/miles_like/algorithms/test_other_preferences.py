"""KTO, ORPO and SimPO, from rows to the gradient of a step: value and gradient are those of trl's own trainers.

A table of logits, one row for each preceding token, is the model, so that trl's code makes its own masks, means and
mismatched answers from the same tokens. What a device batch of trl has, a step has here. ORPO's NLL is a mean over
pairs, trl's over the tokens of the device batch: they are compared for a pair at a time and for pairs of one length.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import pickle
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_like.algorithms.kto import KtoLoss
from miles_like.algorithms.orpo import OrpoLoss
from miles_like.algorithms.simpo import SimpoLoss
from miles_like.batch.packer import Packer
from miles_like.config.sections.supervised import SupervisedConfig
from miles_like.protocols import LossFn
from miles_like.supervised.baseline import MismatchedKl, mismatched
from miles_like.supervised.data import ExampleReader
from miles_like.types import ANSWER, DESIRABLE, KL_BASELINE, Aggregation, LossInputs, SampleGroup, TrainBatch
from rollout.prompts.config import DataConfig
from tests.support.refusals import refuses

TESTS = Path(__file__).parents[2]
END, VOCABULARY = 11, 12
PAIRS = [("1234", "567", "89"), ("21", "3", "4567"), ("5", "66", "7"), ("908", "1", "2")]


class Digits:
    """A tokenizer: a digit's id is the digit."""

    eos_token_id = END

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [int(c) for c in text]


def rows_of(tmp_path: Path, algorithm: str, rows: Sequence[dict[str, Any]], **keys: Any) -> list[SampleGroup]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = ExampleReader(
        tokenizer=Digits(),  # type: ignore[arg-type]
        data=DataConfig(train=str(path)),
        keys=SupervisedConfig(**keys),
        algorithm=algorithm,
        max_tokens=30,
    )
    return reader.read(str(path))


def tables() -> tuple[Tensor, Tensor]:
    """(policy, reference), [VOCABULARY, VOCABULARY] logits by the preceding token."""
    g = torch.Generator().manual_seed(0)
    policy = torch.randn(VOCABULARY, VOCABULARY, generator=g, dtype=torch.float64)
    reference = policy + 0.5 * torch.randn(VOCABULARY, VOCABULARY, generator=g, dtype=torch.float64)
    return policy.requires_grad_(), reference


class TableTrainer:
    """`logprobs` of a `Trainer`."""

    def __init__(self, policy: Tensor, reference: Tensor) -> None:
        self.tables = {None: policy.detach(), "reference": reference}

    async def logprobs(self, batch: TrainBatch, *, weights: str | None = None) -> list[list[Tensor]]:
        table = self.tables[weights].log_softmax(-1)
        return [[table[m.tokens, m.labels] * m.loss_mask for m in row] for row in batch.grid]


def ours(loss: LossFn, groups: Sequence[SampleGroup], policy: Tensor, reference: Tensor) -> tuple[float, Tensor]:
    """Loss and gradient of a step in two rows of packs, as the trainer adds them up."""
    packer = Packer(dp_size=2, max_tokens=30, aggregation=Aggregation.SEQUENCE_MEAN)
    if isinstance(loss, KtoLoss):
        trainer: Any = TableTrainer(policy, reference)
        groups = asyncio.run(MismatchedKl(trainer=trainer, packer=packer).add(groups))
    batch = packer.examples(groups)
    total = torch.zeros((), dtype=torch.float64)
    for m in (m for row in batch.grid for m in row):
        zeros = dict.fromkeys(("entropy", "rollout_logprobs", "advantages"), torch.zeros(len(m.tokens)))
        per_token, _ = loss(
            LossInputs(
                logprobs=policy.log_softmax(-1)[m.tokens, m.labels],
                ref_logprobs=reference.log_softmax(-1)[m.tokens, m.labels],
                loss_mask=m.loss_mask,
                cu_seqlens=m.cu_seqlens,
                streams=m.streams,
                **zeros,
            )
        )
        assert m.weights is not None
        total = total + torch.where(m.loss_mask, per_token * m.weights, 0.0).sum()
    total = total / batch.loss_tokens
    return float(total.detach()), torch.autograd.grad(total, policy)[0]


@functools.cache
def trl() -> SimpleNamespace:
    with pytest.MonkeyPatch.context() as patch:  # tests/rollout, on the path of tests, has a folder named vllm
        patch.setattr(sys, "path", [p for p in sys.path if not p.startswith(str(TESTS))])
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        from trl.experimental.cpo import CPOTrainer
        from trl.experimental.orpo import ORPOTrainer
        from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference, KTOTrainer

    return SimpleNamespace(CPO=CPOTrainer, ORPO=ORPOTrainer, KTO=KTOTrainer, collator=DataCollatorForUnpairedPreference)


def bare(kind: Any, **own: Any) -> Any:
    """A trainer of trl that has only what its loss reads."""
    it = kind.__new__(kind)
    accelerator = SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x)
    for name, value in {"accelerator": accelerator, "aux_loss_enabled": False, **own}.items():
        setattr(it, name, value)
    return it


def their_kto(
    examples: Sequence[tuple[str, str, bool]], policy: Tensor, reference: Tensor, fn: KtoLoss
) -> tuple[float, Tensor]:
    """The answers before are those of one batch, as trl's preparation of data rotates them."""
    ids = [[*map(int, answer), END] for _, answer, _ in examples]
    batch = trl().collator(pad_token_id=0)(
        [
            {"prompt_ids": [*map(int, prompt)], "completion_ids": own, "KL_completion_ids": before, "label": label}
            for (prompt, _, label), own, before in zip(examples, ids, [ids[-1], *ids[:-1]], strict=True)
        ]
    )

    class Table(torch.nn.Module):
        is_gradient_checkpointing = False

        def __init__(self, table: Tensor) -> None:
            super().__init__()
            self.log = table.log_softmax(-1)

        def forward(self, *, input_ids: Tensor, labels: Tensor, **_: Any) -> Any:
            log = self.log[input_ids[:, :-1], labels[:, 1:].clamp(min=0)] * (labels[:, 1:] >= 0)
            return SimpleNamespace(log_probs=log, entropy=torch.zeros_like(log), mean_logits=torch.zeros_like(log))

    it = bare(
        trl().KTO,
        model=Table(policy),
        ref_model=Table(reference),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        calculate_KL=True,
        precompute_ref_logps=False,
        loss_type="kto",
        beta=fn.beta,
        desirable_weight=fn.desirable_weight,
        undesirable_weight=fn.undesirable_weight,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    loss = it._compute_loss(it.model, batch, False)
    assert it._metrics["train"]["kl"][0] > 0 or fn.beta == 0.5, "a baseline that is cut to 0 compares nothing"
    return float(loss.detach()), torch.autograd.grad(loss, policy)[0]


EXAMPLES = [
    ("1234", "567", True),
    ("21", "3", False),
    ("5", "6688", False),
    ("908", "1", True),
    ("77", "20", True),
]
KTO = {
    "even": KtoLoss(beta=0.3),
    "weighted": KtoLoss(beta=0.2, desirable_weight=1.3, undesirable_weight=0.6),
    "baseline cut to 0": KtoLoss(beta=0.5),
}


@pytest.mark.parametrize("name", KTO)
def test_kto_is_trl_s(name: str, tmp_path: Path) -> None:
    fn, (policy, reference) = KTO[name], tables()
    if name == "baseline cut to 0":  # the mean is below it with the two exchanged
        policy, reference = reference.clone().requires_grad_(), policy.detach()
    rows = [{"prompt": p, "answer": a, "label": label} for p, a, label in EXAMPLES]
    groups = rows_of(tmp_path, "kto", rows)
    want, of_want = their_kto(EXAMPLES, policy, reference, fn)
    got, of_got = ours(fn, groups, policy, reference)
    assert got == pytest.approx(want, rel=1e-6)
    torch.testing.assert_close(of_got, of_want, rtol=1e-6, atol=1e-9)


def test_a_pair_without_a_label_is_a_desirable_and_another_example(tmp_path: Path) -> None:
    rows = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in PAIRS[:2]]
    groups = rows_of(tmp_path, "kto", rows)
    assert [[float(s.streams[DESIRABLE][0]) for s in g.samples] for g in groups] == [[1.0, 0.0]] * 2
    texts = [[s.token_ids.tolist() for s in g.samples] for g in mismatched(groups, 99)]
    assert texts == [
        [[1, 2, 3, 4, 3, END], [1, 2, 3, 4, 4, 5, 6, 7, END]],
        [[2, 1, 5, 6, 7, END], [2, 1, 8, 9, END]],
    ]
    cut = mismatched(groups, 6)[0].samples[1]
    assert cut.token_ids.tolist() == [1, 2, 3, 4, 4, 5, 6] and int(cut.loss_mask.sum()) == 3


def test_a_label_that_is_none_is_refused(tmp_path: Path) -> None:
    with refuses(ValueError, "label", "good"):
        rows_of(tmp_path, "kto", [{"prompt": "1", "answer": "2", "label": "good"}])
    with refuses(ValueError, "supervised.label_key", "supervised.chosen_key"):
        rows_of(tmp_path, "kto", [{"prompt": "1", "answer": "2"}])


def their_pairs(kind: str, pairs: Sequence[tuple[str, str, str]], policy: Tensor, **own: Any) -> tuple[float, Tensor]:
    batch: dict[str, Tensor] = {}
    for at, side in ((1, "chosen"), (2, "rejected")):
        ids = [torch.tensor([*map(int, pair[0]), *map(int, pair[at]), END]) for pair in pairs]
        own_mask = [torch.arange(len(x)) >= len(pair[0]) for x, pair in zip(ids, pairs, strict=True)]
        labels = [x.masked_fill(~m, -100) for x, m in zip(ids, own_mask, strict=True)]
        fill: Any = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
        batch[f"{side}_input_ids"] = fill(ids)
        batch[f"{side}_attention_mask"] = fill([torch.ones_like(x) for x in ids])
        batch[f"{side}_labels"] = fill(labels, padding_value=-100)
    it = bare(getattr(trl(), kind), is_encoder_decoder=False, padding_value=0, pad_token_id=0, **own)
    loss, _ = it.get_batch_loss_metrics(lambda ids, **_: SimpleNamespace(logits=policy[ids]), batch)
    return float(loss.detach()), torch.autograd.grad(loss, policy)[0]


def pair_rows(pairs: Sequence[tuple[str, str, str]]) -> list[dict[str, Any]]:
    return [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in pairs]


def test_orpo_is_trl_s_of_a_pair_and_of_pairs_of_one_length(tmp_path: Path) -> None:
    policy, reference = tables()
    fn = OrpoLoss(beta=0.4)
    for pairs in (*([pair] for pair in PAIRS), [("123", "45", "6"), ("78", "901", "2345")]):
        want, of_want = their_pairs("ORPO", pairs, policy, beta=0.4)
        got, of_got = ours(fn, rows_of(tmp_path, "orpo", pair_rows(pairs)), policy, reference)
        assert got == pytest.approx(want, rel=1e-5)  # trl's odds are fp32
        torch.testing.assert_close(of_got, of_want, rtol=1e-5, atol=1e-7)
    answers, _ = ours(fn, rows_of(tmp_path, "orpo", pair_rows(PAIRS), nll_of="answer"), policy, reference)
    texts, _ = ours(fn, rows_of(tmp_path, "orpo", pair_rows(PAIRS)), policy, reference)
    nll = [-policy.detach().log_softmax(-1)[t[:-1], t[1:]] for t in (_tokens(p + c) for p, c, _ in PAIRS)]
    means = [(x.mean(), x[len(p) - 1 :].mean()) for x, (p, _, _) in zip(nll, PAIRS, strict=True)]
    assert texts - answers == pytest.approx(sum(float(a - b) for a, b in means) / len(PAIRS), rel=1e-5)


def _tokens(text: str) -> Tensor:
    return torch.tensor([*map(int, text), END])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_simpo_is_trl_s(smoothing: float, tmp_path: Path) -> None:
    policy, reference = tables()
    keys = {"beta": 2.0, "simpo_gamma": 0.7, "label_smoothing": smoothing}
    want, of_want = their_pairs("CPO", PAIRS, policy, loss_type="simpo", alpha=0.0, cpo_alpha=0, **keys)
    fn = SimpoLoss(beta=2.0, margin=0.7, label_smoothing=smoothing)
    got, of_got = ours(fn, rows_of(tmp_path, "simpo", pair_rows(PAIRS)), policy, reference)
    assert got == pytest.approx(want, rel=1e-6)
    torch.testing.assert_close(of_got, of_want, rtol=1e-6, atol=1e-9)


def one_sample(certain: bool = False) -> dict[str, Any]:
    """Two samples of one token each."""
    return {
        "logprobs": torch.tensor([0.0 if certain else -1.0, -2.0], requires_grad=True),
        "ref_logprobs": torch.tensor([-1.5, -1.75]),
        "loss_mask": torch.tensor([True, True]),
        "cu_seqlens": torch.tensor([0, 1, 2], dtype=torch.int32),
        "streams": {DESIRABLE: torch.tensor([1.0, 0.0]), KL_BASELINE: torch.full((2,), 0.25), ANSWER: torch.ones(2)},
        **dict.fromkeys(("entropy", "rollout_logprobs", "advantages"), torch.zeros(2)),
    }


def test_statistics_by_hand() -> None:
    _, kto = KtoLoss(beta=2.0)(LossInputs(**one_sample()))
    assert {k: float(s.total / s.count) for k, s in kto.items()} == pytest.approx(
        {
            "preference/accuracy": 1.0,
            "preference/reward_chosen": 1.0,
            "preference/reward_rejected": -0.5,
            "preference/logprob_chosen": -1.0,
            "preference/logprob_rejected": -2.0,
            "preference/kl_baseline": 0.25,
            "train/entropy": 0.0,
        }
    )
    _, orpo = OrpoLoss(beta=2.0)(LossInputs(**one_sample()))
    odds = math.log(math.exp(-1) / (1 - math.exp(-1))) - math.log(math.exp(-2) / (1 - math.exp(-2)))
    assert float(orpo["preference/log_odds_ratio"].total) == pytest.approx(odds)
    assert float(orpo["train/nll"].total / orpo["train/nll"].count) == 1.0
    assert float(orpo["preference/margin"].total) == 2.0


def test_a_certain_answer_has_a_finite_gradient() -> None:
    """fp32 log p of 0, whose odds are infinite: trl's gradient is nan."""
    given = one_sample(certain=True)
    loss, _ = OrpoLoss()(LossInputs(**given))
    loss.sum().backward()
    assert bool(given["logprobs"].grad.isfinite().all())


def test_padding_teaches_nothing_and_every_figure_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    given = one_sample()
    alone: dict[str, Any] = {k: v[:1] for k, v in given.items() if isinstance(v, Tensor) and k != "cu_seqlens"}
    alone |= {"loss_mask": torch.tensor([False]), "cu_seqlens": given["cu_seqlens"][:2]}
    alone["streams"] = {k: v[:1] for k, v in given["streams"].items()}
    for fn in (KtoLoss(), OrpoLoss(), SimpoLoss()):
        loss, stats = fn(LossInputs(**alone))
        assert loss.tolist() == [0.0] and all(float(s.count) == 0 for s in stats.values())
        loss.sum().backward()
        assert pickle.loads(pickle.dumps(fn)) == fn
        for key in stats:
            assert f"`{key}`" in page, key
    with refuses(ValueError, "KTO"):
        KtoLoss()(LossInputs(**one_sample() | {"ref_logprobs": None}))
