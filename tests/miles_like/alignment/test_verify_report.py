"""What `verify` says and how it ends: status, JSON, the table; saved samples read back; which gap a precision explains.

Not covered: whether the verdicts are right (tests/laws/test_verify_names_faults.py).
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from megatron_bridge.config import PrecisionConfig
from miles_like.algorithms.terms.bounds import Bounds
from miles_like.alignment.allowance import allowance, of_steps, rounding_units
from miles_like.alignment.attribution import _bad_rows, _beyond
from miles_like.alignment.evidence import SampleTokens
from miles_like.alignment.gate import check_before_start
from miles_like.alignment.layers.compare import LayerComparison, PartDifference
from miles_like.alignment.logprob_convention import explains
from miles_like.alignment.report import Cause, Finding, Profile, Report, gap_of, rho_histogram
from miles_like.alignment.tokens import compare_prompts, compare_tokens, shifted
from miles_like.cli import app
from miles_like.config.load import load_config
from miles_like.loop.step_bounds import StepBounds
from miles_like.report.metrics import write_rollouts
from miles_like.run.verify import VerifyOptions, read_rollouts
from tests.support.cli_runner import CliRunner
from tests.support.made_samples import group, sample
from tests.support.refusals import check_refusal, refuses

TINY = Path(__file__).parents[3] / "configs" / "tiny.toml"


def report(*causes: tuple[Cause, str], delta: float = 0.1, bounds: Bounds | None = None) -> Report:
    """Two tokens; `causes` found in the weights, which cannot be set right."""
    mask = torch.tensor([False, True, True])
    logprobs, gone = torch.tensor([0.0, -1.0, -2.0]), torch.tensor([0.0, delta, -delta])
    gap = gap_of([logprobs + gone], [logprobs], [mask])
    steps = [
        Finding(step="tokens", compared="3 tokens", before=gap, after=gap),
        Finding(step="weights", compared="hashes", before=gap, after=None if causes else gap, causes=causes),
    ]
    profile = Profile(
        position=torch.arange(2), delta=gone[mask], layers=(1, 2), agreement=torch.tensor([1.0, 0.5]).double()
    )
    return Report(findings=tuple(steps), profile=profile, bounds=bounds or Bounds(), extra={"routing/agreement": 0.75})


def test_a_gap_is_that_of_the_metrics() -> None:
    gap = report().initial_gap
    assert gap.tokens == 2 and gap.mean == pytest.approx(0.1) and gap.largest == pytest.approx(0.1)
    want = (math.expm1(0.1) - 0.1 + math.expm1(-0.1) + 0.1) / 2
    assert gap.kl == pytest.approx(want, rel=1e-4)
    with refuses(ValueError, 0, 1):
        gap_of([torch.zeros(2)], [torch.zeros(2)], [torch.zeros(2, dtype=torch.bool)])


@pytest.mark.parametrize(
    ("made", "status", "says"),
    [
        (report(), 0, ""),
        (report((Cause.STALE, "a.weight is the one of an earlier version")), 1, "weights: stale weights (a.weight"),
        (report(bounds=Bounds(kl_max=1e-6)), 1, "above mismatch.kl_max = 1e-06"),
    ],
)
def test_the_status_is_the_verdict(
    made: Report, status: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def verify(*args: Any) -> tuple[Report, list[Path]]:
        asked.append(args[-1])
        return made, [tmp_path / "verify_steps.png"]

    monkeypatch.setattr("miles_like.run.assemble.verify", verify)
    out = tmp_path / "figures.json"
    command = ["verify", "--config", str(TINY), "--json", str(out), "--run-dir", str(tmp_path), "--rollouts", "x.jsonl"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == status and says in done.stderr
    assert "verify_steps.png" in done.output and "after" in done.output
    figures = json.loads(out.read_text())
    assert len(figures["verdicts"]) == len(made.causes) and figures["routing/agreement"] == 0.75
    assert ("verify/weights/kl_after" in figures) == (not made.causes)
    assert asked == [VerifyOptions(rollouts=Path("x.jsonl"))]
    assert (done.stderr if status else done.stdout).endswith(made.conclusion() + "\n")
    assert (figures["ok"], figures["conclusion"]) == (not status, made.conclusion())


def test_the_conclusion_is_one_sentence() -> None:
    """With the remaining KL and its bound; a step that compared nothing does not count as agreement."""
    made = replace(report(), allowed=Bounds(kl_max=1e-2))
    assert made.conclusion() == "Trainer and rollout agree: KL 5.0e-03, bound 0.01."
    assert report().conclusion() == "Trainer and rollout agree: KL 5.0e-03, no bound."
    gap = made.findings[0].before
    skipped = Finding(step="weights", compared="no server is used", before=gap, after=gap, skipped=True)
    partly = replace(made, findings=(skipped, made.findings[0]))
    assert partly.ok and partly.conclusion() == (
        "Trainer and rollout agree: KL 5.0e-03, bound 0.01; not compared: weights (no server is used)."
    )
    assert partly.to_json()["verify/weights/verdict"] == "not compared"
    assert partly.to_json()["verify/tokens/verdict"] == "agrees"
    less = replace(made.findings[1], uncompared="2 tensors (a.weight, ...)")
    assert (
        replace(made, findings=(made.findings[0], less))
        .conclusion()
        .endswith("bound 0.01; not compared: 2 tensors (a.weight, ...) of weights.")
    )
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(partly.table())
    row = next(line for line in console.export_text().splitlines() if "weights" in line)
    assert "not compared" in row and "agrees" not in row
    wrong = replace(report((Cause.STALE, "a.weight is the one of an earlier version")), allowed=Bounds(kl_max=1e-2))
    assert wrong.conclusion().startswith("Trainer and rollout differ: weights: stale weights (a.weight")
    assert wrong.to_json()["verify/weights/verdict"] == "differs"


def test_a_server_without_a_scheme_is_refused_before_the_checkpoint_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles_like.run.assemble.verify", lambda *_, **how: pytest.fail("the job was begun"))
    command = ["verify", "--config", str(TINY), "--run-dir", str(tmp_path)]
    done = CliRunner().invoke(app, [*command, "--server", "http://a:1", "--server", "10.0.0.7:30000"])
    assert done.exit_code == 2
    check_refusal(" ".join(done.stderr.split()), "10.0.0.7:30000", "http://10.0.0.7:30000")


def test_ratios_are_counted_in_bins_of_equal_width_around_one() -> None:
    """Each in the bin between whose edges it lies; those beyond are counted at the ends, and nan in no bin."""
    delta = torch.tensor([0.0, 0.01, -0.01, math.log(2), math.log(2), -math.log(2), 9.0, -9.0, math.inf, -math.inf])
    found = rho_histogram(torch.cat([delta, torch.tensor([math.nan])]))
    assert len(found.counts) == len(found.edges) + 1 and sum(found.counts) == len(delta) and found.nan == 1
    middle = len(found.counts) // 2
    assert found.edges[middle - 1] < 1 < found.edges[middle] and found.counts[middle] == 3
    for ratio, n in ((2.0, 2), (0.5, 1)):
        place = next(i for i, (a, b) in enumerate(itertools.pairwise(found.edges)) if a <= ratio < b)
        assert found.counts[place + 1] == n
    assert found.counts[0] == found.counts[-1] == 2
    ratios = [b / a for a, b in itertools.pairwise(found.edges)]
    assert max(ratios) == pytest.approx(min(ratios)) and found.edges[0] * found.edges[-1] == pytest.approx(1)
    figures = report().to_json()
    assert sum(figures["rho_counts"]) == 2  # type: ignore[arg-type]


def test_the_first_layer_that_differs_is_a_cause() -> None:
    """Of the server that has one, though the gap is explained; the figures of every part are in the JSON."""

    def compared(url: str, *differences: float) -> LayerComparison:
        parts = [PartDifference(state=i, difference=d, explained=0.1, stream=d) for i, d in enumerate(differences)]
        return LayerComparison(url=url, tokens=5, parts=parts)

    made = report().with_layers([compared("http://a", 0.0, 0.01, 0.02), compared("http://b", 0.0, 0.2, 0.3)])
    assert [(step, cause) for step, cause, _ in made.causes] == [("layers", Cause.LAYER)] and not made.ok
    assert "the attention of layer 0 is the first that differs on server http://b" in made.conclusion()
    figures = made.to_json()
    assert figures["verify/layers/first/http://a"] is None
    assert figures["verify/layers/first/http://b"] == "the attention of layer 0"
    assert figures["verify/layers/the MLP of layer 0/http://b"] == pytest.approx(3.0)
    assert report().with_layers([compared("http://a", 0.0, 0.01)]).ok


def test_json_has_no_nan(tmp_path: Path) -> None:
    report(delta=math.nan).write_json(tmp_path / "a.json")
    figures = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert figures["mismatch/nan_count"] == 2.0


def test_a_run_starts_on_a_gap_that_is_explained_alone() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    check_before_start(report(), console, 1.5)
    assert "over 2 tokens" in console.export_text()
    with refuses(ValueError, "mismatch.check_prompts", 0):
        check_before_start(report((Cause.STALE, "w")), console, 1.5)


def test_what_a_precision_explains() -> None:
    """None in a deterministic run; kernels where both multiply the same numbers; rounding where one alone does."""
    fp8, qat, bf16 = PrecisionConfig(), PrecisionConfig(qat=True), PrecisionConfig(format="bf16")

    def of(p: PrecisionConfig, engine: Any = "embedded", exact: bool = False, b: Bounds | None = None) -> float | None:
        return allowance(b or Bounds(), p, engine=engine, exact=exact).kl_max

    kernels, one_side = of(bf16), of(fp8)
    assert kernels is not None and one_side is not None
    assert of(qat, exact=True) == of(bf16, exact=True) == 0.0
    assert kernels == of(qat) == of(bf16, "sglang") < one_side == of(qat, "sglang")
    assert of(PrecisionConfig(format="int4", qat=True), "sglang") == of(bf16)
    assert of(fp8, b=Bounds(kl_max=0.5)) == 0.5
    units = {p.format: rounding_units(p, engine="sglang", exact=False, more=False) for p in (bf16, fp8)}
    assert units[bf16.format] == (2**-8, 2**-8) and units[fp8.format] == (2**-4, 2**-8)
    assert rounding_units(bf16, engine="sglang", exact=False, more=True) == units[fp8.format]
    assert rounding_units(qat, engine="embedded", exact=True, more=False) == (0.0, 0.0)
    own = allowance(Bounds(), bf16, engine="sglang", exact=False, routed=False).kl_max
    assert own is not None and 1.5e-3 < own < one_side, "a published model without replay: docs/r3.md"


@pytest.mark.parametrize(
    ("settings", "rounds"),
    [
        ([], False),
        (["rollout.sglang.kv_cache_dtype=bf16"], False),
        (["rollout.sglang.kv_cache_dtype=fp8_e4m3"], True),
        (["kernels.fp8=blockwise"], True),
    ],
)
def test_a_run_that_rounds_more_than_weights_may_differ_more(settings: list[str], rounds: bool) -> None:
    """Else it would be refused before its first step, healthy as it is."""
    config = load_config(TINY.parent / "qwen3_30b_a3b.toml", settings)
    assert config.one_side_rounds == rounds
    allowed = allowance(Bounds(), config.precision, engine="sglang", exact=False, more=rounds)
    assert allowed.kl_max == (0.09 if rounds else 0.001)


def test_a_step_of_a_deterministic_run_is_held_to_no_gap_at_all() -> None:
    """By whatever mismatch.on_breach does. Not where its samples may be of older weights."""
    none = Bounds(kl_max=0.0, logprob_abs_diff_max=0.0, extreme_frac_max=0.0)
    on, stale = "alignment.deterministic=true", "buffer.max_staleness=1"
    assert load_config(TINY, [on]).exact_steps
    for settings in ([], [on, stale], [on, "cluster.gpus_per_node=2"]):
        assert not load_config(TINY, settings).exact_steps
    configured = Bounds(kl_max=0.5)
    assert of_steps(configured, exact=True) == none and of_steps(configured, exact=False) == configured
    figures = {"mismatch/kl": 1e-12, "mismatch/logprob_abs_diff_max": 1e-6, "mismatch/extreme_frac": 0.0}
    console = Console(width=200, record=True, file=io.StringIO())
    StepBounds(bounds=none, on_breach="warn", console=console).check(3, figures)
    assert "warning: step 3: mismatch/kl = 1e-12 is above" in console.export_text()


def test_kept_samples_are_read_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "step_1.jsonl"
    samples = [sample("p", i, reward=1.0, first_token=3 * i) for i in range(2)]
    write_rollouts(path, [group(samples)])
    for back, s in zip(read_rollouts(path, 0), samples, strict=True):
        (got,) = back.samples
        assert torch.equal(got.token_ids, s.token_ids) and torch.equal(got.loss_mask, s.loss_mask)
        assert torch.equal(got.logprobs, s.logprobs) and got.name == s.name
    with refuses(ValueError, "[0]", 3):
        read_rollouts(path, 3)
    path.write_text('{"prompt_id": "p"}\n')
    with refuses(ValueError, 1, "token_ids"):
        read_rollouts(path, 0)
    write_rollouts(path, [group(samples)])
    whole = path.read_text()
    for key in ("prompt_id", "index", "versions", "finish", "response"):
        path.write_text(json.dumps({k: v for k, v in json.loads(whole.splitlines()[0]).items() if k != key}))
        with refuses(ValueError, 1, key):
            read_rollouts(path, 0)
    for text, facts in ((whole[:-20], (2, "JSON")), ("3\n", (1, "JSON"))):
        path.write_text(text)
        with refuses(ValueError, *facts):
            read_rollouts(path, 0)
    write_rollouts(path, [group(samples[:1])])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"logprobs": [-0.1]}))
    with refuses(ValueError, 5, "token_ids", "loss_mask", 5, 3, 1):
        read_rollouts(path, 0)
    path.write_text("\n")
    with refuses(ValueError, 0, "step_1.jsonl", "rollouts/step_N.jsonl"):
        read_rollouts(path, 0)


def test_tokens_that_differ_are_said_to_by_kind() -> None:
    own_ids = torch.tensor([7, 8, 9, 1, 2, 3])
    mask = torch.tensor([False, False, False, True, True, True])
    ours = SampleTokens(ids=(own_ids,), masks=(mask,))
    for tokens, cause, says in (
        (own_ids[:-2], Cause.TOKENS_TRUNCATED, "2 are cut off"),
        (own_ids[1:], Cause.TEMPLATE, "from position 0 on"),
        (torch.tensor([7, 5, 8, 9, 1, 2, 3]), Cause.TEMPLATE, "from position 1 on"),
        (own_ids.roll(1), Cause.TOKENS_SHIFTED, "token i-1"),
        (torch.tensor([7, 8, 9, 1, 5, 3]), Cause.TOKENS, "from position 4 on"),
    ):
        ((got, what),) = compare_tokens(ours, SampleTokens(ids=(tokens,), masks=(mask[: len(tokens)],)), ["a/0"])
        assert got is cause and says in what, what
    for other, cause in ((mask.roll(-1), Cause.TOKENS_SHIFTED), (mask | True, Cause.TOKENS)):
        ((got, what),) = compare_tokens(ours, SampleTokens(ids=(own_ids,), masks=(other,)), ["a/0"])
        assert got is cause and "from position 3 on" in what
    both = SampleTokens(ids=(own_ids, own_ids), masks=(mask, mask))
    two = compare_tokens(
        both, SampleTokens(ids=(own_ids[:-2], own_ids[1:]), masks=(mask[:-2], mask[1:])), ["a/0", "a/1"]
    )
    assert [cause for cause, _ in two] == [Cause.TOKENS_TRUNCATED, Cause.TEMPLATE]
    assert compare_tokens(ours, ours, ["a/0"]) == []
    assert compare_prompts(ours, [(7, 8, 9)], ["a/0"]) is None
    for wanted, cause in (
        ((7, 8), Cause.TEMPLATE),
        ((1, 7, 8, 9), Cause.TEMPLATE),
        ((4, 5, 6, 7, 8, 9), Cause.TOKENS_TRUNCATED),
    ):
        found = compare_prompts(ours, [wanted], ["a/0"])
        assert found is not None and found[0] is cause and "3 prompt tokens" in found[1]
    values = torch.tensor([0.0, 0.0, 0.0, -1.0, -2.0, -3.0])
    assert shifted(values, mask, 1).tolist()[3:5] == [-2.0, -3.0] and shifted(values, mask, -1)[4:].tolist() == [-1, -2]


def test_a_correction_is_held_to_chance() -> None:
    """One that halves the mean but helps few tokens, or was fitted to as many numbers as there are tokens, is none."""
    many = torch.full((20,), 1.0)
    assert explains(many / 10, many) and not explains(many * 0.6, many)
    outlier = torch.tensor([30.0] + [1.0] * 19)
    assert not explains(torch.tensor([0.0] + [1.1] * 19), outlier)
    few = torch.full((4,), 1.0)
    assert explains(few / 100, few) and not explains(few / 10, few) and not explains(few / 100, few, fitted=2)
    nan = torch.tensor([math.nan])
    assert not explains(torch.cat([nan, few[:2] / 100]), torch.cat([nan, few[:2]]))


def test_a_mean_of_few_tokens_is_more_than_allowed_by_more_than_chance() -> None:
    """One flipped token of forty makes a mean that forty such tokens would not have; a user's bounds ask no such thing,
    nor does a run that may differ in nothing."""
    mask = torch.ones(40, dtype=torch.bool)
    one, all_of_them = torch.zeros(40), torch.full((40,), 0.2)
    one[7] = 0.6
    for delta, beyond in ((one, False), (all_of_them, True)):
        gap = gap_of([delta], [torch.zeros(40)], [mask])
        assert gap.kl > 1e-3 and bool(_beyond(Bounds(kl_max=1e-3), gap)) == beyond
        assert _beyond(Bounds(kl_max=0.0), gap) and Bounds(kl_max=1e-3).broken(gap.figures)
    values = (math.expm1(0.6) - 0.6) * torch.eye(40)[7].double()
    assert gap_of([one], [torch.zeros(40)], [mask]).kl_error == pytest.approx(float(values.std()) / math.sqrt(40))
    one[8], one[9] = 0.8, -0.8
    few = gap_of([one], [torch.zeros(40)], [mask])
    assert _beyond(Bounds(extreme_frac_max=0.01), few) == [], "two of them"
    one[7] = 0.8
    assert _beyond(Bounds(extreme_frac_max=0.01), gap_of([one], [torch.zeros(40)], [mask]))


@pytest.mark.parametrize(("corrected", "found"), [(0.9, []), (0.4, [7])])
def test_a_row_like_a_near_tie_is_bad_where_it_makes_half_of_the_gap(corrected: float, found: list[int]) -> None:
    """In a model of one MoE layer. Where one side alone rounds its weights a healthy row may look so, and another
    choice in it brings the sample nearer as often as not."""
    own = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(i))[:4] for i in range(40)])[:, None]
    recorded = own.clone()
    recorded[7, 0] = torch.tensor([e for e in range(16) if e not in own[7, 0]][:4])
    mask = torch.arange(41) > 20

    async def score(tokens: SampleTokens, *, temperature: float, routes: Any) -> Any:
        gap = 1.0 if torch.equal(routes[0], recorded) else corrected
        return SimpleNamespace(logprobs=[torch.where(torch.arange(41) == 30, gap, 0.0)])

    tokens = SampleTokens(ids=(torch.arange(41),), masks=(mask,))
    evidence: Any = SimpleNamespace(trainer=SimpleNamespace(score=score), temperature=1.0)
    state: Any = SimpleNamespace(
        sampled=SimpleNamespace(tokens=tokens),
        routes=(recorded,),
        own=SimpleNamespace(routes=(own,)),
        logprobs=[torch.zeros(41)],
    )
    assert [row.row for row in asyncio.run(_bad_rows(evidence, state, exact=False))] == found
