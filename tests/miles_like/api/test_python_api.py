"""What the functions of `import miles_like` take and give; a whole run of `train` is in tests/e2e/test_python_runs.py.

Why it must hold: a user of Python has no command line that would show what was understood. Not covered: what the
functions compute, which the commands of the same names share with them.
"""

from __future__ import annotations

import asyncio
import builtins
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import miles_like
from miles_like.api.calls import console_of
from miles_like.api.training import reward_overrides
from miles_like.config.load import load_config
from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.plugins import load, name_of
from miles_like.rewards.maths.answers import gsm8k
from miles_like.types import Finish
from tests.support.refusals import refuses
from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

TINY = Path(__file__).parents[3] / "configs" / "tiny.toml"


def test_every_public_name_is_found_and_no_other() -> None:
    assert all(getattr(miles_like, name) is not None for name in miles_like.__all__)
    assert set(miles_like.__all__) <= set(dir(miles_like))
    assert not hasattr(miles_like, "trian")


# ---- configurations


def test_a_dict_is_the_configuration_that_a_file_with_its_keys_is(tmp_path: Path) -> None:
    given = {"extends": "tiny", "train": {"steps": 3}, "rollout.temperature": 0.5}
    written = f'extends = "{TINY}"\ntrain.steps = 3\nrollout.temperature = 0.5\n'
    (tmp_path / "a.toml").write_text(written)
    assert load_config(given) == load_config(tmp_path / "a.toml")
    assert load_config(Path("tiny")) == load_config(TINY)


def test_overrides_are_a_dict_of_sections_or_of_dotted_keys(tmp_path: Path) -> None:
    by_text = load_config(TINY, ["train.steps=3", "optimizer.lr=1e-3", f"data.train={tmp_path}/a.jsonl"])
    path = tmp_path / "a.jsonl"
    for given in (
        {"train.steps": 3, "optimizer.lr": 1e-3, "data.train": path},
        {"train": {"steps": 3}, "optimizer": {"lr": 1e-3}, "data": {"train": path}},
    ):
        assert load_config(TINY, [given]) == by_text
    dropped = load_config(TINY, [{"model.make": False, "model.path": "a/b"}])
    assert dropped.model.make is None and dropped.model.path == "a/b"


def test_a_name_that_is_shipped_yields_to_a_file_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("tiny")).train.steps == 100
    (tmp_path / "tiny").write_text(f'extends = "{TINY}"\ntrain.steps = 7\n')
    assert load_config(Path("tiny")).train.steps == 7


# ---- rewards


def short(prompt: Any, sample: Any) -> float:
    return 0.0


def rewarded(reward: Any, *before: str) -> Any:
    return load_config(TINY, [*before, *reward_overrides(reward)]).reward


def test_a_reward_replaces_those_of_the_configuration() -> None:
    parts = ("reward.parts.gsm8k=1.0", "reward.parts.length=0.5", "reward.length.target=3", "reward.length.limit=9")
    for before in ((), ("reward.name=regex", "reward.regex.pattern=a"), parts):
        found = rewarded(short, *before)
        assert list(found.weights) == [name_of(short)] and found.style == "own" and found.regex is found.length is None
    kept = rewarded("regex", "reward.name=regex", "reward.regex.pattern=a", "reward.timeout_s=3")
    assert kept.regex.pattern == "a" and kept.timeout_s == 3
    assert rewarded(None) == load_config(TINY).reward


def test_a_function_has_the_style_of_its_parameters() -> None:
    """One parameter of any name is a sample."""
    assert rewarded(lambda sample: 1.0).style == rewarded(lambda s: 1.0).style == "sample"
    assert rewarded(lambda completions, **columns: [1.0]).style == "trl"
    assert rewarded(lambda solution_str, ground_truth: 1.0).style == "verl"


def test_a_function_that_can_be_imported_is_named_by_its_path_and_another_by_its_code() -> None:
    def local(sample: Any) -> float:
        return 1.0

    def edited(sample: Any) -> float:
        return 2.0

    local_name = name_of(local)
    edited.__qualname__ = local.__qualname__
    assert name_of(gsm8k) == "miles_like.rewards.maths.answers:gsm8k"
    assert local_name.startswith("given:local-") and load(local_name, key="reward.name") is local
    assert name_of(edited) != local_name == name_of(local)
    with refuses(ValueError, "reward.name", "'given:other-0'", "miles_like.train"):
        load("given:other-0", key="reward.name")


def test_a_function_of_one_sample_is_given_prompt_response_and_answer() -> None:
    from miles_like.config.sections.reward import RewardConfig
    from miles_like.rewards.load import scored_by
    from miles_like.types import Prompt
    from tests.support.made_samples import sample

    seen: list[Any] = []

    def reward(sample: Any) -> float:
        seen.append(sample)
        return float(sample.response == sample.answer)

    prompt = Prompt(id="p", token_ids=(1, 2), answer="4", text="2+2=", meta={"level": 3})
    scorer = scored_by(reward, RewardConfig(name="m:f"))
    right, wrong = (sample("p", i, response_len=1, text=text) for i, text in enumerate(("4", "5")))
    scores = asyncio.run(_all(scorer, prompt, [right, wrong]))
    assert [s.value for s in scores] == [1.0, 0.0]
    found = {one.response: one for one in seen}  # in any order: the function is called in threads
    assert found["4"].prompt == "2+2=" and found["4"].meta == {"level": 3} and found["4"].finish is Finish.STOP
    assert found["5"].sample is wrong and found["5"].tokens == 1


async def _all(scorer: Any, prompt: Any, samples: list[Any]) -> list[Any]:
    try:
        return list(await scorer([prompt] * len(samples), samples))
    finally:
        await scorer.close()


def test_a_run_whose_function_no_file_names_is_resumed_with_it_alone(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[reward]\nname = "given:mine-0a1b2c3d"\n')
    again: dict[str, Any] = {"run_dir": tmp_path, "resume": True, "quiet": True}
    for reward in (None, "gsm8k"):
        with refuses(miles_like.UserError, tmp_path, "'mine'", "miles_like.train", "resume=True"):
            miles_like.train("tiny", reward=reward, **again)


# ---- calls


def in_a_loop(call: Callable[[], Any]) -> Any:
    async def cell() -> Any:
        return call()

    return asyncio.run(cell())


def directly(call: Callable[[], Any]) -> Any:
    return call()


@pytest.mark.parametrize("called", [directly, in_a_loop])
def test_a_mistake_is_a_user_error_of_one_sentence(called: Callable[..., Any], tmp_path: Path) -> None:
    with refuses(miles_like.UserError, "train.stepz", "'train.steps'"):
        called(lambda: miles_like.plan("tiny", overrides={"train.stepz": 3}))
    with refuses(miles_like.UserError, "overrides", "'train.steps=3'"):
        called(lambda: miles_like.train("tiny", run_dir=tmp_path / "a", overrides="train.steps=3"))
    with refuses(miles_like.UserError, "trainy", "tiny_sft"):
        called(lambda: miles_like.train("trainy", run_dir=tmp_path / "a"))
    with refuses(miles_like.UserError, "reward.name", "'gsmk8'", "'gsm8k'"):
        called(lambda: miles_like.train("tiny", run_dir=tmp_path / "a", reward="gsmk8", quiet=True))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("called", [directly, in_a_loop])
def test_a_fault_of_the_program_is_left_as_it_is(called: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: object) -> None:
        raise KeyError("a")

    monkeypatch.setattr("miles_like.run.plan.make_plan", faulty)
    with pytest.raises(KeyError):
        called(lambda: miles_like.plan("tiny"))


@pytest.mark.parametrize("called", [directly, in_a_loop])
def test_a_plan_tells_what_fits(called: Callable[..., Any]) -> None:
    config = TINY.parent / "qwen3_4b.toml"
    assert called(lambda: miles_like.plan(config, device="H200")).fits
    assert not called(lambda: miles_like.plan(config, device="RTX4090")).fits
    assert not miles_like.plan("tiny").on_gpus


def test_a_notebook_gets_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Rich makes an HTML block of each line where it finds Jupyter's shell."""
    shell = type("ZMQInteractiveShell", (), {})
    monkeypatch.setattr(builtins, "get_ipython", shell, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)  # as some versions of ipykernel say
    assert Console().is_jupyter
    console_of(False).print("[bold]step[/] 1/1")
    console_of(True).print("nothing")
    assert capsys.readouterr().out == "step 1/1\n"


def test_a_model_is_quantized_and_converted_and_comes_back(tmp_path: Path) -> None:
    hf = tiny()
    write_checkpoint(tmp_path / "bf16", hf, random_tensors(hf))
    done = miles_like.quantize(tmp_path / "bf16", tmp_path / "fp8", format="fp8", report=True)
    assert done.report is not None and (tmp_path / "fp8" / "quant_report.json").is_file()
    assert done.bytes < sum(f.stat().st_size for f in (tmp_path / "bf16").glob("*.safetensors"))
    there = miles_like.convert(str(tmp_path / "bf16"), str(tmp_path / "megatron"), to="megatron")
    back = miles_like.convert(tmp_path / "megatron", tmp_path / "back", to="hf")
    assert there.tensors == back.tensors > 0 and str(back).startswith(f"{back.tensors} tensors, ")
    ours, theirs = HFCheckpoint(tmp_path / "bf16"), HFCheckpoint(tmp_path / "back")
    assert all(torch.equal(ours.read(name), theirs.read(name)) for name in ours.names())
    with refuses(miles_like.UserError, "to", "'hugging'", "'hf'"):
        miles_like.convert(tmp_path / "megatron", tmp_path / "no", to="hugging")  # type: ignore[arg-type]
    with refuses(miles_like.UserError, "'4XB'", "4GiB"):
        miles_like.convert(tmp_path / "megatron", tmp_path / "no", to="hf", memory_limit="4XB")


def test_an_evaluation_reads_what_the_command_reads(tmp_path: Path) -> None:
    with refuses(miles_like.UserError, "--data", "--config"):
        miles_like.evaluate(tmp_path)
    with refuses(miles_like.UserError, "train", "data"):
        miles_like.evaluate(tmp_path, data="a.jsonl", overrides={"train.steps": 3})
    with refuses(miles_like.UserError, "--threads", 2, "--server"):
        miles_like.evaluate(tmp_path, data={"a": "a.jsonl"}, server="http://127.0.0.1:1", threads=2)
    with refuses(miles_like.UserError, tmp_path / "none", "config.json"):
        miles_like.evaluate(tmp_path / "none", data={"a": "a.jsonl"}, reward=lambda sample: 1.0)


# ---- results


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    rows = [{"step": 0, "eval/a/avg@1": 0.25}, {"step": 1, "rollout/reward/mean": 0.5, "train/grad_norm": None}]
    rows.append({"step": 2, "rollout/reward/mean": 0.25, "eval/a/avg@1": 0.5})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step_2\n")
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_2.jsonl").write_text('{"response": "4", "reward": 1.0}\n')
    return tmp_path


def test_a_result_reads_the_files_of_the_run(run_dir: Path) -> None:
    result = miles_like.RunResult(str(run_dir))
    assert [row["step"] for row in result.rows] == [0, 1, 2] and math.isnan(result.rows[1]["train/grad_norm"])
    assert result.checkpoint == run_dir / "checkpoints" / "step_2"
    assert result.samples(2) == [{"response": "4", "reward": 1.0}]
    assert result.summary["rollout/reward/mean"] == {"first": 0.5, "last": 0.25, "best": 0.5}
    assert "train/grad_norm" not in result.summary
    with refuses(miles_like.UserError, run_dir / "rollouts" / "step_7.jsonl", 2):
        result.samples(7)
    (run_dir / "checkpoints" / "latest").unlink()
    assert result.checkpoint is None
    with refuses(miles_like.UserError, "metrics.jsonl"):
        _ = miles_like.RunResult(run_dir / "none").metrics


def test_metrics_are_a_table_where_pandas_is_there(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table: Any = miles_like.RunResult(run_dir).metrics
    assert list(table.index) == [0, 1, 2] and list(table["eval/a/avg@1"].dropna()) == [0.25, 0.5]
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert isinstance(miles_like.RunResult(run_dir).metrics, list)
