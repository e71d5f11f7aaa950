"""`miles-like eval`: its requests, its output and its files, and that it leaves no server behind.

A server of a tiny random model in this process, over HTTP, and the command line in front of it. Not covered: the start
of a server by the command (tests/rollout/sglang/test_servers.py tests its `launch_server`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miles_like.cli import app
from miles_like.run.evaluate import stop_tokens
from rollout.sglang.client import SGLangClient
from rollout.sglang.http_replies import RolloutError
from rollout.sglang.servers import ServerLaunch
from tests.support.cli_runner import CliRunner
from tests.support.embedded_fixtures import oracle, save, served, service
from tests.support.refusals import Facts, check_refusal

TINY = Path(__file__).parents[3] / "configs" / "tiny"
HELD = str(TINY / "heldout.jsonl")


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save(oracle(vocab_size=128), tmp_path_factory.mktemp("hf"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, path)
    return path


@pytest.fixture(scope="module")
def url(hf: Path) -> Iterator[str]:
    s = service(hf)
    s.engine.set_version("7")
    with served(s) as address:
        yield address


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def asked(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


@pytest.mark.slow
def test_a_running_server_is_asked_and_scored(
    hf: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures in the table and in the file are those of the answers that are kept. The command does not own the server,
    so it does not empty its cache, which a busy one would refuse when all answers are there."""

    async def refused(self: SGLangClient) -> None:
        raise RolloutError("requests are running")

    monkeypatch.setattr(SGLangClient, "flush_cache", refused)
    (tmp_path / "own.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    out, kept = tmp_path / "deep" / "figures.json", tmp_path / "answers.jsonl"
    more = ["--samples", "2", "--max-new-tokens", "4", "--max-prompts", "3", "--json", out, "--answers", kept]
    result = asked(hf, "--server", url, "--data", HELD, "--data", "mine=own.jsonl", *more)
    assert result.exit_code == 0, result.output
    figures = json.loads(out.read_text())
    assert figures["weight_version"] == 7 and figures["model"] == str(hf)
    assert [k for k in figures if k.startswith("eval/mine/")] == [
        f"eval/mine/{k}" for k in ("greedy", "avg@2", "pass@1", "pass@2", "unscored_frac")
    ]
    answers = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [(a["set"], a["mode"]) for a in answers].count(("heldout", "sampled")) == 6 and len(answers) == 12
    for mode, key in (("greedy", "greedy"), ("sampled", "avg@2")):
        rewards = [a["reward"] for a in answers if a["set"] == "heldout" and a["mode"] == mode]
        assert figures[f"eval/heldout/{key}"] == pytest.approx(sum(rewards) / len(rewards))
    assert all(a["versions"] in ([[7, 0, a["tokens"]]], []) and a["tokens"] <= 4 for a in answers)
    assert all(word in result.output for word in ("heldout", "mine", "pass@2", "prompts"))


@pytest.mark.slow
def test_answers_are_chosen_by_a_reward(hf: Path, url: str, tmp_path: Path) -> None:
    """Two budgets of beams beside the best of 1, 2, 4 and 8; the selector's score of each answer is kept. Here the
    selector and the set's reward are the same function, so the best of all is the best there is."""
    (tmp_path / "own.py").write_text("def low(prompt, sample):\n    return -len(set(sample.text))\n")
    more = ["--max-new-tokens", "6", "--max-prompts", "3", "--json", "f.json", "--answers", "a.jsonl"]
    search = ["--best-of", "8", "--by", "./own.py:low", "--beam", "2", "--step-tokens", "2", "--reward", "./own.py:low"]
    result = asked(hf, "--server", url, "--data", HELD, *more, *search)
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "f.json").read_text())
    best = [figures[f"eval/heldout/best@{n}"] for n in (1, 2, 4, 8)]
    assert best == sorted(best) and best[0] == pytest.approx(figures["eval/heldout/avg@8"])
    answers = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    sampled = [a for a in answers if a["mode"] == "sampled"]
    assert len(sampled) == 24 and all(a["reward_parts"] == {"by/low": a["reward"]} for a in sampled)
    prompts = {a["prompt_id"] for a in sampled}
    assert best[-1] == pytest.approx(sum(max(a["reward"] for a in sampled if a["prompt_id"] == p) for p in prompts) / 3)
    assert {f"eval/heldout/beam@{n}" for n in (4, 8)} <= figures.keys() and "eval/heldout/beam@2" not in figures
    assert figures["eval/heldout/beam_tokens@8"] <= 8 * 6 and figures["eval/heldout/best_tokens"] <= 8 * 6
    assert "best@8" in result.output and "beam@8" in result.output


@pytest.mark.slow
def test_a_run_s_configuration_says_how(hf: Path, url: str, tmp_path: Path) -> None:
    """Its sections data, eval, reward and rollout; what the command line says comes after it."""
    text = f'extends = "{TINY.parent}/tiny.toml"\n[eval]\nmax_prompts = 2\n[eval.sets.quick]\npath = "{HELD}"\n'
    (tmp_path / "run.toml").write_text(text)
    result = asked(
        hf, "--server", url, "--config", "run.toml", "--json", "f.json", "--set", "eval.sets.quick.samples=3"
    )
    assert result.exit_code == 0, result.output
    assert {"eval/heldout/avg@1", "eval/quick/avg@3"} <= json.loads((tmp_path / "f.json").read_text()).keys()


@pytest.mark.slow
def test_prompts_without_answers_are_scored_by_what_needs_none(hf: Path, url: str, tmp_path: Path) -> None:
    """A function is given "" for the answer that is not there; a set may have its own reward."""
    (tmp_path / "own.py").write_text("def known(prompt, sample):\n    return float(prompt.answer == '2')\n")
    (tmp_path / "mixed.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2="}\n')
    (tmp_path / "bare.jsonl").write_text('{"prompt": "1+1="}\n')
    text = '[reward]\nname = "format"\n[eval.sets.mixed]\npath = "mixed.jsonl"\nreward = "./own.py:known"\n'
    (tmp_path / "run.toml").write_text(f'extends = "{TINY.parent}/tiny.toml"\n[data]\neval = "./bare.jsonl"\n{text}')
    result = asked(hf, "--server", url, "--config", "run.toml", "--json", "f.json")
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["eval/bare/avg@1"] == 0.0 and figures["eval/mixed/avg@1"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["{hf}"], ("--data", "FILE")),
        (["{hf}", "--data", "none.jsonl"], ("none.jsonl",)),
        (["{hf}", "--data", "empty.jsonl"], ("empty.jsonl",)),
        (["{hf}", "--data", "bare.jsonl"], ("bare.jsonl", "answer")),
        (
            ["{hf}", "--data", "mixed.jsonl", "--reward", "exact"],
            ("mixed.jsonl", 2, "exact"),
        ),
        (["{hf}", "--data", HELD, "--data", f"heldout={HELD}"], ("heldout", "NAME", "FILE")),
        (["{hf}", "--data", HELD, "--reward", "exat_number"], ("exat_number", "exact_number")),
        (["{hf}", "--data", HELD, "--reward", "none"], ("heldout",)),
        (["{hf}", "--data", HELD, "--best-of", "4"], ("--best-of", 4, "--by")),
        (["{hf}", "--data", HELD, "--best-of", "4", "--samples", "2", "--by", "length"], ("--samples", 2, 4)),
        (["{hf}", "--data", HELD, "--by", "length"], ("--by", "--best-of")),
        (["{hf}", "--data", HELD, "--best-of", "4", "--by", "exact"], ("--by", "exact")),
        (["{hf}", "--data", HELD, "--best-of", "4", "--by", "format", "--beam", "3"], (3, 4, 2)),
        (
            ["{hf}", "--data", HELD, "--best-of", "4", "--by", "format", "--step-tokens", "3"],
            ("--step-tokens", "--beam"),
        ),
        (["{hf}", "--data", HELD, "--set", "rollout.treads=1"], ("rollout.treads",)),
        (["{hf}", "--data", HELD, "--set", "algorithm.name=grpo"], ("algorithm", "seed", "data", "reward")),
        (["{hf}", "--data", HELD, "--server", "{url}", "--port", "{port}"], ("--port", "--server")),
        (
            ["nowhere", "--data", HELD, "--server", "127.0.0.1:3000"],
            ("127.0.0.1:3000", "http://127.0.0.1:3000"),
        ),
        (["nowhere", "--data", HELD], ("nowhere", "config.json")),
        (["{bare}", "--data", HELD], ("bare", "tokenizer.json")),
        (["{hf}", "--data", HELD, "--port", "{port}"], ("127.0.0.1",)),
        (["{hf}", "--data", HELD, "--server", "http://127.0.0.1:1"], ("http://127.0.0.1:1",)),
        (["{other}", "--data", HELD, "--server", "{url}"], ("DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM")),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(
    hf: Path, url: str, tmp_path: Path, arguments: list[str], facts: Facts
) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bare.jsonl").write_text('{"prompt": "1+1="}\n')
    (tmp_path / "mixed.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2="}\n')
    for name, keep in (("bare", "[cm]*"), ("other", "[ct]*")):
        (tmp_path / name).mkdir()
        for file in hf.glob(keep):
            shutil.copy(file, tmp_path / name)
    (tmp_path / "other" / "config.json").write_text('{"architectures": ["Qwen3MoeForCausalLM"]}')
    words = {"hf": str(hf), "bare": "bare", "other": "other", "url": url, "port": url.rpartition(":")[2]}
    (tmp_path / "kept.jsonl").write_text("of an eval before")
    result = asked(*(a.format(**words) for a in arguments), "--json", "new/f.json", "--answers", "kept.jsonl")
    assert result.exit_code == 2, result.output
    error = " ".join(result.stderr.split())
    assert "Traceback" not in error
    check_refusal(error, *facts)
    assert not Path("new/f.json").exists() and Path("kept.jsonl").read_text() == "of an eval before"


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_a_server_of_its_own_is_stopped_whatever_happens(
    hf: Path, url: str, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """It is started with room for the longest prompt and answer."""
    stopped: list[str] = []

    class Handle:
        def __init__(self) -> None:
            self.url = "http://127.0.0.1:1" if fails else url

        def __enter__(self) -> Handle:
            return self

        def __exit__(self, *_: object) -> None:
            stopped.append(self.url)

    def launch_server(launch: ServerLaunch) -> Handle:
        config = launch.config
        assert launch.model_path == hf.resolve() and not launch.return_routed_experts
        assert config.embedded.context_length >= new and config.embedded.max_total_tokens >= 2 * new
        return Handle()

    new = 40_000 if fails else 4
    monkeypatch.setattr("miles_like.run.evaluate.launch_server", launch_server)
    result = asked(hf, "--data", HELD, "--max-prompts", "2", "--max-new-tokens", str(new))
    assert len(stopped) == 1 and result.exit_code == (2 if fails else 0), result.output


def test_a_turn_may_end_by_more_tokens_than_the_tokenizer_s(tmp_path: Path) -> None:
    assert stop_tokens(tmp_path, 1) == (1,) and stop_tokens(tmp_path, None) == ()
    for given, want in (("[5, 1]", (1, 5)), ("5", (1, 5)), ("null", (1,))):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {given}}}')
        assert stop_tokens(tmp_path, 1) == want
