"""Runs everything that needs a CUDA device, in order: what a fault of one part would spoil comes after it.

Each step is a process with a limit. Its output goes to OUT/NAME.log, the JSON objects among its lines are
its facts, and OUT/results.json holds the steps so far with the versions, the device and the commit, so that a run that
is stopped keeps what it has. Without CUDA it says so and measures nothing.

    python benchmarks/gpu_program.py [--out build/gpu] [--only NAME ...] [--limit SECONDS]
    python benchmarks/gpu_program.py --write build/gpu/results.json ...  # into docs/gpu.md, on any machine
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from figures import ROOT, provenance, shown, write_block

PAGE = ROOT / "docs" / "gpu.md"
SCRIPT = "benchmarks/gpu_program.py"
PACKAGES = ("torch", "triton", "megatron-core", "transformer-engine", "transformers", "sglang")
LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One process: a test file, a script or a module of this repository, with its arguments."""

    name: str
    script: str
    arguments: tuple[str, ...] = ()

    def command(self, out: Path) -> list[str]:
        if Path(self.script).name.startswith("test_"):
            report = ["--junitxml", str(out / f"{self.name}.xml")]
            return [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *report, self.script]
        if not self.script.endswith(".py"):
            return [sys.executable, "-m", self.script, *self.arguments]
        return [sys.executable, self.script, *self.arguments]


ON_A_GPU = (  # as `miles-like demo --device cuda` sets it
    *("--set", "cluster.gpus_per_node=1", "--set", "parallel.dp=1", "--set", "parallel.ep=1"),
    *("--set", "kernels.spec=local", "--set", "rollout.embedded.device=cuda"),
)
SHORT = ("--set", "model.make.max_steps=50")  # of the warm-up: any weights will do
STEPS = (
    Step(name="codecs", script="tests/gpu/test_codec_cuda.py"),
    Step(name="handles", script="tests/gpu/test_handles_cuda.py"),
    Step(name="kernels", script="tests/gpu/test_kernels_cuda.py"),
    Step(name="trainer", script="tests/gpu/test_trainer_cuda.py"),
    Step(name="fp8", script="tests/gpu/test_fp8_cuda.py"),
    Step(name="decoding", script="tests/gpu/test_decoding_kernels_cuda.py"),
    Step(name="embedded", script="tests/gpu/test_embedded_cuda.py"),
    Step(name="converted", script="tests/gpu/test_converted_cuda.py"),
    Step(name="turns", script="tests/gpu/test_turns_cuda.py"),
    Step(name="demo", script="tests/gpu/test_demo_cuda.py"),
    Step(
        name="verify",
        script="miles_like",
        arguments=(
            "verify",
            "--config",
            "configs/tiny_bf16.toml",
            "--run-dir",
            "runs/verify_cuda",
            "--layers",
            *ON_A_GPU,
            *SHORT,
        ),
    ),
    Step(name="sglang", script="tests/gpu/test_stock_sglang_cuda.py"),
    Step(name="sglang_turns", script="tests/gpu/test_stock_turns_cuda.py"),
    Step(name="plan", script="tests/gpu/test_plan_cuda.py"),
    Step(name="codec_rates", script="benchmarks/gpu_rates.py", arguments=("--only", "codecs")),
    Step(name="rates", script="benchmarks/gpu_rates.py"),
    Step(name="mfu", script="benchmarks/mfu.py", arguments=("--peak-tflops", "989")),
)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one step did. status: the process's, 124 past its limit; counts: of pytest's report."""

    name: str
    command: str
    status: int
    seconds: float
    counts: dict[str, int] = field(default_factory=dict)
    facts: list[dict[str, Any]] = field(default_factory=list)

    def verdict(self) -> str:
        if self.status == 124:
            return "stopped at its limit"
        if not self.counts:
            return "ran" if self.status == 0 else f"**failed**, status {self.status}"
        words = [f"{n} {word}" for word, n in self.counts.items() if n]
        return ", ".join(words) if self.status in (0, 5) else f"**{', '.join(words)}**"


def run(step: Step, out: Path, limit_s: float) -> Outcome:
    """The step's outcome; its output is in `out`."""
    command, log = step.command(out), out / f"{step.name}.log"
    began = time.monotonic()
    with log.open("w") as lines:
        try:
            status = subprocess.run(
                command, cwd=ROOT, stdout=lines, stderr=subprocess.STDOUT, timeout=limit_s, env=_environment()
            ).returncode
        except subprocess.TimeoutExpired:
            status = 124
    seconds = round(time.monotonic() - began, 1)
    counts = counts_of(out / f"{step.name}.xml")
    shown_command = " ".join(["python", *command[1:]])
    return Outcome(
        name=step.name,
        command=shown_command,
        status=status,
        seconds=seconds,
        counts=counts,
        facts=list(facts_of(log.read_text())),
    )


def _environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


def facts_of(output: str) -> Iterator[dict[str, Any]]:
    """The lines of `output` that are JSON objects; pytest's dots may stand in front of one."""
    for line in output.splitlines():
        start = line.find("{")
        if start >= 0 and not line[:start].strip(".sFEx "):
            try:
                yield json.loads(line[start:])
            except ValueError:
                continue


def counts_of(report: Path) -> dict[str, int]:
    """passed, failed and skipped tests of pytest's XML; empty without one."""
    if not report.exists():
        return {}
    suite = next(ET.parse(report).getroot().iter("testsuite"))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped = int(suite.get("skipped", 0))
    return {"passed": int(suite.get("tests", 0)) - failed - skipped, "failed": failed, "skipped": skipped}


def versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def device() -> str:
    """Name, memory and driver of the first CUDA device."""
    import torch

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    memory = torch.cuda.get_device_properties(0).total_memory / (1 << 30)
    return (
        f"{torch.cuda.get_device_name(0)}, {memory:.1f} GiB, driver {driver.splitlines()[0] if driver else 'unknown'}"
    )


def measure(steps: Sequence[Step], out: Path, limit_s: float, commit: str | None) -> int:
    """0 when each step passed. Steps of an earlier run of the same commit stay in the results."""
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.json"
    head = {"device": device(), "versions": versions(), "provenance": provenance(commit)}
    before = json.loads(results.read_text()) if results.exists() else {}
    done = before.get("steps", {}) if before.get("provenance") == head["provenance"] else {}
    for step in steps:
        outcome = run(step, out, limit_s)
        print(f"{step.name:<12} {outcome.seconds:>7.1f} s  {outcome.verdict()}", flush=True)
        done[step.name] = asdict(outcome)
        results.write_text(json.dumps({**head, "steps": done}, indent=1))
    return int(any(o["status"] not in (0, 5) for o in done.values()))


def rows(results: dict[str, Any]) -> list[str]:
    """The block of docs/gpu.md: a row for each step, then its facts."""
    outcomes = [Outcome(**x) for x in results["steps"].values()]
    lines = [f"{results['device']}; " + ", ".join(f"{k} {v}" for k, v in results["versions"].items()) + ".", ""]
    lines += ["| step | seen | seconds |", "|---|---|---|"]
    ran = {step.name: " ".join([step.script, *step.arguments]) for step in STEPS}
    lines += [f"| `{o.name}`: `{ran.get(o.name, o.command)}` | {o.verdict()} | {o.seconds:.0f} |" for o in outcomes]
    facts = [(o.name, *one) for o in outcomes for fact in o.facts for one in _together(dict(_flat(fact)))]
    if facts:
        lines += ["", "| step | figure | value |", "|---|---|---|"]
        lines += [f"| `{name}` | {key} | {value} |" for name, key, value in facts]
    return lines


def _together(figures: dict[str, str]) -> list[tuple[str, str]]:
    """Figures whose names differ in the last part before the unit ("fp8, Triton, encode, GB/s") as one row."""
    out: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for key, value in figures.items():
        parts = key.removeprefix("figures.").split(", ")
        *of, kind, unit = parts if len(parts) > 2 else [*parts, "", ""]
        out.setdefault((", ".join(of), unit), []).append((kind, value))
    return [
        (
            " ".join(filter(None, [of, ", ".join(filter(None, (k for k, _ in found))), unit])),
            ", ".join(v for _, v in found),
        )
        for (of, unit), found in out.items()
    ]


def _flat(fact: dict[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """(key, value) of the numbers, words and short lists of a fact; keys of nested objects are joined by a dot."""
    for key, value in fact.items():
        if key in ("name", "goals", "holds"):  # of a benchmark's last line
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        elif isinstance(value, list):
            yield f"{above}{key}", ", ".join(shown(x) for x in value)
        else:
            yield f"{above}{key}", shown(value)


def main() -> int:
    """0 when each step passed, or when there is no device."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=ROOT / "build" / "gpu")
    p.add_argument("--only", nargs="+", choices=[s.name for s in STEPS], help="these steps")
    p.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that one step may take")
    p.add_argument("--commit", help="the commit of this code, where it is no git checkout")
    p.add_argument("--write", type=Path, nargs="+", metavar="RESULTS", help="put these results into docs/gpu.md")
    args = p.parse_args()
    if args.write:
        found = [json.loads(path.read_text()) for path in args.write]
        steps = {name: outcome for one in found for name, outcome in one["steps"].items()}
        ordered = {step.name: steps[step.name] for step in STEPS if step.name in steps}
        commits = list(dict.fromkeys(one["provenance"] for one in found))
        write_block(PAGE, SCRIPT, rows({**found[0], "steps": ordered}), line="; ".join(commits))
        return 0
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return 0
    return measure([s for s in STEPS if not args.only or s.name in args.only], args.out, args.limit, args.commit)


if __name__ == "__main__":
    sys.exit(main())
