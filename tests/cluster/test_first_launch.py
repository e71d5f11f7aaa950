"""docs/first_launch.md is executed as far as a machine without a GPU goes.

The dry runs print the plan whose figures the page quotes, and every message that the page quotes is one that the code
has. In the long tier its commands run on two nodes of namespaces, on which Ray counts 8 GPUs each: the doctor names
what is missing, and the launch ends before its first stage; and the rehearsal itself runs whole on CPU ranks: the
shipped configuration, with a small local checkpoint in place of the published one, cut to its first layers. Not
covered: GPUs, and the times.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import typer
from typer.testing import CliRunner

from miles_like.hf.checkpoint import HFCheckpoint
from scripts import run_deepseek
from tests.support.namespaces import ROOT, Cluster, nodes
from tests.support.tiny_models import random_tensors, write_checkpoint

PAGE = (ROOT / "docs" / "first_launch.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
RAY = ("--num-cpus=2", "--num-gpus=8", "--object-store-memory=80000000", "--disable-usage-stats")
HERE = "tests/cluster/test_first_launch.py"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "COLUMNS": "160"}


def commands(*parts: str) -> list[str]:
    """The page's commands with all of `parts`."""
    found = [line for line in COMMANDS if all(part in line for part in parts)]
    assert found, f"the page has no command with {parts}"
    return found


def words(command: str, address: str, work: Path) -> list[str]:
    """The command as this environment runs it, with its run directory below `work`."""
    first, *rest = shlex.split(
        command.replace("HEAD:6379", address).replace("--run-dir runs/", f"--run-dir {work}/runs/")
    )
    if first == "miles-like":
        return [sys.executable, "-m", "miles_like.cli", *rest]
    return [sys.executable if first == "python" else str(Path(sys.executable).with_name(first)), *rest]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launch")


@pytest.fixture(scope="module")
def cluster(work: Path) -> Iterator[Cluster]:
    """Two nodes, on which Ray was started by the page's commands."""
    with nodes(2, work=work) as made:
        (head,), (other,) = commands("ray start", "--head"), commands("ray start --address")
        for node, command in zip(made, (f"{head} --include-dashboard=false", other), strict=True):
            node.run([*words(command, made.ray_address, work), *RAY, f"--node-ip-address={node.address}"])
        yield made


@pytest.mark.long(beside="tests/miles_like/doctor/test_node_checks.py")
def test_the_doctor_names_what_these_nodes_lack(cluster: Cluster, work: Path) -> None:
    """Every row that the page's table names is a row of the doctor."""
    (command,) = commands("miles-like doctor", "rehearsal_deepseek_v3")
    file = work / "doctor.json"
    done = cluster[0].run(
        [*words(command, cluster.ray_address, work), "--json", str(file)], check=False, env=OFFLINE, timeout_s=280.0
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(file.read_text())["findings"]
    wrong = {f["check"] for f in found if f["outcome"] == "wrong"}
    assert {"trainer: transformer-engine-torch", "engine"} <= wrong
    (table,) = re.findall(r"\| row \| cause \| remedy \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", PAGE)
    rows = [row.split("`")[1] for row in table.splitlines()]
    assert rows and {row.split(" A")[0] for row in rows} <= {f["check"].split(" node")[0] for f in found}


@pytest.mark.parametrize("command", commands("--dry-run"))
def test_a_dry_run_prints_the_plan_that_the_page_quotes(
    command: str, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command in this process, which has imported it all."""
    monkeypatch.chdir(ROOT)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(run_deepseek.main)
    _, script, *arguments = words(command, "", work)
    assert script == "scripts/run_deepseek.py"
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "160", "RAY_ADDRESS": ""})
    assert done.exit_code == 0, (done.output, done.exception)
    check_quoted(command, done.stdout)


@pytest.mark.long(beside=HERE)
@pytest.mark.parametrize("command", commands("--dry-run"))
def test_a_dry_run_of_a_node_prints_it_too(command: str, cluster: Cluster, work: Path) -> None:
    check_quoted(command, cluster[0].run(words(command, cluster.ray_address, work), env=OFFLINE).stdout)


def check_quoted(command: str, printed: str) -> None:
    plan = "\n".join(printed.splitlines()[:10])
    assert plan.startswith("layout: ")
    name = "rehearsal" if "rehearsal" in command else "v3"
    quoted = re.findall(r"[\d.]+ [GT]B", next(x for x in plan.splitlines() if x.startswith("bytes: ")))
    sections = PAGE.split("\n## ")
    section = next(s for s in sections if s.startswith("4." if name == "rehearsal" else "5."))
    assert all(size in section for size in quoted[:-1]), f"{quoted} of the plan, the page has others"


@pytest.mark.long(beside="tests/miles_like/preflight/test_preflight.py")
def test_the_launch_ends_before_its_first_stage_and_says_why(cluster: Cluster, work: Path) -> None:
    (command,) = [c for c in commands("run_deepseek.py", "rehearsal_deepseek_v3") if "--dry-run" not in c]
    rows = f"data.train={ROOT}/configs/tiny/train.jsonl"  # those of the configuration are on the hub
    settings = ["--set", f"cluster.stage_dir={cluster.disk}", "--set", rows, "--set", "data.answer_key=answer"]
    started = [*words(command, cluster.ray_address, work), *settings]
    done = cluster[0].run(started, check=False, env=OFFLINE, timeout_s=280.0)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "transformer_engine" in done.stderr and "/opt/engine/bin/python" in done.stderr
    assert not list((work / "runs").glob("cache/*/data"))


def on_cpu(work: Path) -> Path:
    """The shipped rehearsal with a small local checkpoint, on CPU ranks, which take turns with the embedded engine."""
    hf = json.loads((ROOT / "configs" / "tiny" / "model.json").read_text()) | {"num_hidden_layers": 4}
    model = write_checkpoint(work / "model", hf, random_tensors(hf))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((ROOT / "configs" / "tiny" / name).read_bytes())
    off = dict.fromkeys(
        ("grouped_gemm", "rope_fusion", "permute_fusion", "overlap_grad_reduce", "overlap_param_gather"), False
    )
    data = {"train": str(ROOT / "configs" / "tiny" / "train.jsonl"), "answer_key": "answer", "template": "plain"}
    settings: dict[str, Any] = {
        "extends": str(ROOT / "configs" / "rehearsal_deepseek_v3.toml"),
        "model": {"path": str(model), "config": str(model / "config.json"), "first_layers": 3},
        "data": data | {"max_prompt_tokens": 64},
        "parallel": {"tp": 1, "pp": 2, "ep": 1, "first_stage_layers": 2, "last_stage_layers": 1},
        "kernels": off | {"spec": "local", "dispatcher": "alltoall", "offload_optimizer": 0.0},
        "train": {"groups_per_step": 2, "samples_per_group": 2, "max_tokens_per_rank": 512},
        "rollout": {"engine": "embedded", "max_new_tokens": 8, "start_timeout_s": 200.0},
        "cluster": {"gpus_per_node": 0, "colocate": True, "stage_dir": str(work / "local")},
    }
    (work / "cpu.toml").write_text(tomli_w.dumps(settings))
    return work / "cpu.toml"


@pytest.mark.long(beside="tests/cluster/test_spread_run.py")
def test_the_rehearsal_runs_on_cpu_ranks(cluster: Cluster, work: Path) -> None:
    """Three steps, started from another node than that of the ranks: what the page says is to be seen at each is
    printed, in that order."""
    run = ["scripts/run_deepseek.py", "--config", str(on_cpu(work)), "--run-dir", str(work / "cpu" / "run")]
    run += ["--ray-address", cluster.ray_address]
    done = cluster[1].run([sys.executable, *run], check=False, env=OFFLINE, timeout_s=500.0)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    seen = ["fetch", "dequantize", "convert", "stage", "rollout server 0 of 1: ", "Log-probability check passed"]
    seen += [f"step {k}/3" for k in (1, 2, 3)]
    places = [done.stdout.find(text) for text in seen]
    assert -1 not in places and places == sorted(places), (
        f"{dict(zip(seen, places, strict=True))}\n{done.stdout[:4000]}"
    )
    (short,) = (work / "cpu" / "cache").glob("fetch-*/data")
    assert HFCheckpoint(short).config["num_hidden_layers"] == 3
    assert (work / "cpu" / "run" / "checkpoints" / "step_2").is_dir()


def test_messages_that_the_page_quotes_exist() -> None:
    """The last table's sentences, by the parts between their placeholders."""
    packages = ("miles_like", "rollout", "megatron_bridge")
    source = "\n".join(p.read_text(encoding="utf-8") for name in packages for p in sorted((ROOT / name).rglob("*.py")))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # of a string over several lines
    table = PAGE.split("| last line | meaning | remedy |")[1]
    quoted = [row.split("`")[1] for row in table.splitlines() if row.startswith("| `")]
    assert len(quoted) >= 5
    for message in quoted:
        missing = [part for part in map(str.strip, message.split("...")) if part and part not in source]
        assert not missing, f"{message!r}: no message has {missing}"
