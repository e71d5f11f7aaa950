"""What a search reports runs by every check and fits; nothing that it passed over is faster.

Not covered: predictions, which tests/miles_like/timing holds to published figures.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_like.config.load import load_config
from miles_like.config.run import RunConfig
from miles_like.device_table import device
from miles_like.layout_search.report import chosen_toml, lines_of, search_json
from miles_like.layout_search.search import SPARE, Searched, _Search, in_format, search
from miles_like.planning.compose import plan_run
from miles_like.planning.nearby import changed
from miles_like.planning.plan import Plan
from miles_like.run.setup.model_plan import planned_model
from miles_like.timing.of_run import Facts, step_setup
from miles_like.timing.shape import model_shape
from miles_like.timing.step import step_time
from quant.spec import QuantFormat
from tests.support.refusals import refuses

ROOT = Path(__file__).parents[3]
H100 = device("H100")


def loaded(name: str, *overrides: str) -> tuple[RunConfig, dict[str, object]]:
    run = load_config(ROOT / "configs" / f"{name}.toml", overrides)
    assert run.model.config is not None
    return run, json.loads(Path(run.model.config).read_text())


def searched(run: RunConfig, hf: dict[str, object], **more: object) -> Searched:
    def plan_of(other: RunConfig) -> Plan:
        return plan_run(other, planned_model(other, hf, Path()).hf, on=H100)

    return search(run, planned_model(run, hf, Path()).hf, Facts(device=H100), plan_of, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def small() -> tuple[RunConfig, dict[str, object], Searched]:
    run, hf = loaded("qwen3_30b_a3b_node")
    return run, hf, searched(run, hf, kept=4)


def test_what_is_reported_runs_and_fits(small: tuple[RunConfig, dict[str, object], Searched]) -> None:
    run, hf, found = small
    assert len(found.found) == 4
    speeds = [one.time.tokens_per_s for one in found.found]
    assert speeds == sorted(speeds, reverse=True)
    for one in found.found:
        config = changed(run, one.change)
        assert config == one.config and config.cluster.nodes == run.cluster.nodes
        plan = plan_run(config, planned_model(config, hf, Path()).hf, on=H100)
        assert plan.fits and plan.spare >= SPARE
        assert plan.engine is not None
        facts = Facts(device=H100, cache_tokens=float(plan.engine.tokens))
        assert one.time.seconds == pytest.approx(step_time(model_shape(hf), step_setup(config, hf, facts)).seconds)
        assert one.gpu_hours == pytest.approx(8 * 1e9 / one.time.tokens_per_s / 3600)


def test_the_given_layout_is_no_faster(small: tuple[RunConfig, dict[str, object], Searched]) -> None:
    run, hf, found = small
    plan = plan_run(run, planned_model(run, hf, Path()).hf, on=H100)
    assert plan.engine is not None and plan.fits
    facts = Facts(device=H100, cache_tokens=float(plan.engine.tokens))
    given = step_time(model_shape(hf), step_setup(run, hf, facts))
    assert found.found[0].time.seconds <= given.seconds


def test_refusals_are_counted_with_an_example(small: tuple[RunConfig, dict[str, object], Searched]) -> None:
    found = small[2]
    reasons = found.refusals.counts
    assert {"the model's sizes", "the least that a rank holds", "the memory of a trainer rank"} <= reasons.keys()
    assert sum(reasons.values()) < found.considered + 100 and found.planned >= 4
    text = "\n".join(lines_of(found))
    assert all(sentence in text for sentence in found.refusals.sentences.values())
    assert len(search_json(found)["layouts"]) == 4 and json.dumps(search_json(found))


@pytest.mark.slow
def test_a_written_layout_is_the_configuration_that_was_found(
    small: tuple[RunConfig, dict[str, object], Searched], tmp_path: Path
) -> None:
    run, _, found = small
    given = ROOT / "configs" / "qwen3_30b_a3b_node.toml"
    for number, one in enumerate(found.found):
        path = tmp_path / f"{number}.toml"
        path.write_text(chosen_toml(one, given, path))
        assert load_config(path) == one.config
        assert "extends" in path.read_text()
    # a key that has to go cannot be removed by a file that extends another: then all of it is written
    narrow = changed(
        run, {"parallel.tp": 1, "parallel.pp": 2, "parallel.dp": 4, "parallel.ep": 4, "parallel.first_stage_layers": 25}
    )
    hf = json.loads(Path(str(run.model.config)).read_text())
    whole = searched(narrow, hf, kept=1, nodes=[1]).found[0]
    path = tmp_path / "whole.toml"
    path.write_text(chosen_toml(whole, given, path))
    assert load_config(path) == whole.config


@pytest.mark.slow  # six searches
@pytest.mark.long(beside="tests/miles_like/layout_search/test_search.py")
def test_nodes_devices_and_formats_are_searched() -> None:
    run, hf = loaded("qwen3_4b")
    two = searched(run, hf, kept=2, nodes=[2])
    assert all(one.config.cluster.nodes == 2 and one.time.gpus == 16 for one in two.found)
    fast, cheap = (searched(run, hf, kept=2, nodes=[1, 2], by=by).found for by in ("speed", "cost"))
    assert fast[0].time == two.found[0].time and fast[0].time.seconds < cheap[0].time.seconds
    assert cheap[0].config.cluster.nodes == 1 and cheap[0].gpu_hours < fast[0].gpu_hours
    both = searched(run, hf, kept=6, formats=(QuantFormat.BF16, QuantFormat.FP8))
    assert {one.config.precision.format for one in both.found} >= {QuantFormat.FP8}
    assert both.considered > searched(run, hf, kept=1).considered
    quarter = in_format(run, QuantFormat.INT4)
    assert quarter["precision.qat"] is True and changed(run, quarter).precision.format is QuantFormat.INT4


@pytest.mark.slow
def test_separate_servers_are_ranked_where_samples_may_be_stale() -> None:
    run, hf = loaded(
        "qwen3_4b", "buffer.max_staleness=2", "publish.pause_mode=in_place", "publish.path=disk", "cluster.nodes=2"
    )
    found = searched(run, hf, kept=12)
    assert {one.config.takes_turns for one in found.found} == {True, False}
    paths = {(one.config.takes_turns, one.config.publish.path) for one in found.found}
    assert (False, "distributed") in paths and (True, "distributed") not in paths
    assert all(one.time.overlap == ("partial" if one.config.takes_turns else "beside") for one in found.found)


def test_a_model_that_no_layout_holds_has_none() -> None:
    run, hf = loaded("qwen3_235b_a22b")
    found = searched(run, hf, nodes=[1])
    assert not found.found and any("no layout fits" in line for line in lines_of(found))


def test_a_run_without_gpus_has_no_layouts() -> None:
    run, hf = load_config(ROOT / "configs" / "tiny.toml"), loaded("qwen3_4b")[1]
    with refuses(ValueError, "cluster.gpus_per_node", "rollout.engine"):
        search(run, hf, Facts(device=H100), lambda other: plan_run(other, hf))


def test_a_planted_error_changes_the_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the memory of activations nothing would be recomputed."""
    run, hf = loaded("qwen3_4b")
    monkeypatch.setattr(_Search, "_fits", lambda self, layout, colocated: True)
    trusting = searched(run, hf, kept=1)
    assert trusting.refusals.counts["the memory plan"] > 20
