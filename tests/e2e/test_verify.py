"""`miles-like verify` on a real job: servers, ranks over Ray, the table, the pictures, the status; and on kept samples.

Not covered: each kind of fault (tests/laws/test_verify_names_faults.py), stock SGLang, several nodes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from miles_like.config.load import load_config
from miles_like.hf.checkpoint import HFCheckpoint, write_hf
from miles_like.run import assemble
from miles_like.types import NamedTensor
from rollout.publish.servers import ServerSet
from rollout.sglang.ports import free_port
from rollout.sglang.servers import start
from rollout.wire.checksum import tensor_checksum
from tests.e2e.conftest import ONE_RANK, ROOT, SMALL, Run

REWARD = "tests.e2e.test_families:parity"  # that an untrained model gets half of the time, so that weights change
TINY = str(ROOT / "configs" / "tiny.toml")


Verify = Callable[..., "tuple[subprocess.CompletedProcess[str], dict[str, Any]]"]


@pytest.fixture
def verify(miles_like: Run, home: Path) -> Verify:
    """(name of the run directory, more settings) -> the command, and what it found."""

    def verified(name: str, *more: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
        out = home / f"{name}.json"
        done = miles_like(
            *("verify", "--config", TINY, "--run-dir", str(home / name), "--json", str(out)), *SMALL, *more
        )
        assert out.exists(), done.stderr[-3000:] + done.stdout[-3000:]
        return done, json.loads(out.read_text())

    return verified


@pytest.mark.long(beside="tests/laws/test_verify_names_faults.py")
def test_a_healthy_job_has_nothing_wrong_with_it(verify: Verify, home: Path) -> None:
    """FP8 weights with QAT on two ranks, against the embedded engine: kernels and bf16 alone differ."""
    done, found = verify("verify")
    assert done.returncode == 0 and found["verdicts"] == found["bounds_broken"] == [], done.stdout
    assert 0 < found["mismatch/kl"] < 1e-3 and found["routing/agreement"] > 0.9
    assert re.fullmatch(
        r"Trainer and rollout agree: KL \d\.\de-\d\d, bound 0\.001\.", done.stdout.rstrip().splitlines()[-1]
    )
    pictures = {p.name for p in (home / "verify" / "verify").glob("*.png")}
    assert pictures == {f"verify_{what}.png" for what in ("steps", "positions", "rho", "layers")}
    assert not (home / "verify" / "verify" / "weights").exists()


@pytest.fixture(scope="module")
def other(home: Path) -> Iterator[tuple[str, set[str], Path]]:
    """`miles-like serve` of the job's checkpoint with two weights of other values, in BF16 and in FP8: its URL, the
    names of the stored tensors that differ, and the job's checkpoint."""
    try:
        config = load_config(Path(TINY), [word for word in SMALL if word != "--set"])
        hf = assemble.staged(config, home / "attached", Console(), None) / "hf"
    finally:
        assemble.shut_down()
    checkpoint = HFCheckpoint(hf)
    norm, expert = "model.layers.1.input_layernorm.weight", "model.layers.1.mlp.experts.3.down_proj.weight"
    changed = {norm: checkpoint.read(norm) * 2}
    for part in (expert, f"{expert}_scale_inv"):
        changed[part] = checkpoint.read(part.replace("experts.3.", "experts.4."))
    tensors = (NamedTensor(n, changed.get(n, t)) for n, t in checkpoint.stream())
    write_hf(home / "other", tensors, checkpoint.config, copy_from=hf)
    port = free_port()
    command = [sys.executable, "-m", "miles_like.cli", "serve", str(home / "other"), "--port", str(port)]
    with start(command, url=f"http://127.0.0.1:{port}", log=home / "serve.log") as server:
        server.await_ready(120)
        yield server.url, set(changed), hf


def checksums(url: str) -> Mapping[str, str]:
    servers = ServerSet([url], 60)
    try:
        return servers.checksums()[0].ranks[0].checksums
    finally:
        servers.close()


@pytest.mark.long(beside="tests/laws/test_verify_names_faults.py")
def test_a_running_server_with_other_weights_is_named_and_left_as_it_is(
    verify: Verify, other: tuple[str, set[str], Path]
) -> None:
    """Its weights are hashed before anything is sent; with --overwrite they are named and replaced."""
    url, changed, hf = other
    before = checksums(url)
    done, found = verify("attached", *ONE_RANK, "--server", url)
    assert done.returncode == 1 and set(found["differing_tensors"]) == changed, done.stdout + done.stderr
    assert found["verify/weights/verdict"] == "differs" and "verify/weights/kl_after" not in found
    assert found["verify/numerics/verdict"] == "not compared"
    assert {v["cause"] for v in found["verdicts"]} == {"other weights", "weights in another's place"}
    assert f"did not change {url}; --overwrite publishes" in " ".join(done.stdout.split())
    assert done.stderr.rstrip().splitlines()[-1] == found["conclusion"]
    assert found["conclusion"].startswith("Trainer and rollout differ: weights: ")
    assert checksums(url) == before
    done, found = verify("overwritten", *ONE_RANK, "--server", url, "--overwrite")
    assert done.returncode == 1 and set(found["differing_tensors"]) == changed, done.stdout + done.stderr
    assert found["verify/weights/kl_after"] < found["verify/weights/kl_before"] / 4
    after = checksums(url)
    assert all(after[n] == tensor_checksum(n, HFCheckpoint(hf).read(n)) for n in changed)
    assert {n for n in before if before[n] != after[n]} == changed


@pytest.fixture(scope="module")
def kept(run: Run, home: Path) -> Path:
    """Samples of the first step of a deterministic run of two."""
    settings = ("train.steps=2", "eval.max_prompts=1", "alignment.deterministic=true", f"reward.name={REWARD}")
    sets = (x for one in settings for x in ("--set", one))
    done = run("--run-dir", str(home / "kept"), *SMALL, *sets, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"Log-probability check passed: KL 0\.0e\+00 over \d+ tokens, max difference 0 nats", done.stdout)
    return home / "kept" / "rollouts" / "step_1.jsonl"


@pytest.mark.long(beside="tests/laws/test_exact_logprobs.py")
def test_a_deterministic_run_has_no_gap_at_all(kept: Path) -> None:
    """From the configuration to metrics.jsonl: two ranks that share out the experts, a server with exact operations,
    their fingerprints compared, the samples before the first step, and both steps. The second has other weights."""
    rows = [json.loads(line) for line in (kept.parents[1] / "metrics.jsonl").read_text().splitlines()][1:]
    names = ("mismatch/logprob_abs_diff_max", "mismatch/kl", "mismatch/extreme_frac", "mismatch/ess")
    assert [[row[name] for name in (*names, "routing/agreement")] for row in rows] == [[0.0, 0.0, 0.0, 1.0, 1.0]] * 2
    assert all(row["train/grad_norm"] > 0 for row in rows)


@pytest.mark.long(beside="tests/laws/test_verify_names_faults.py")
def test_kept_samples_are_compared_without_a_server(verify: Verify, kept: Path, tmp_path: Path) -> None:
    """A fault in the file, each log-probability beside its neighbour's token, is what is found."""
    done, found = verify("whole", *ONE_RANK, "--rollouts", str(kept))
    assert done.returncode == 0 and found["mismatch/tokens"] > 24, done.stderr
    assert found["verify/weights/verdict"] == found["verify/quantizer/verdict"] == "not compared"
    assert "not compared: weights (no server is used), quantizer (" in found["conclusion"]
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    for row in rows:
        row["logprobs"] = row["logprobs"][1:] + row["logprobs"][:1]
    moved = tmp_path / "moved.jsonl"
    moved.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done, found = verify("moved", *ONE_RANK, "--rollouts", str(moved))
    assert done.returncode == 1 and [v["cause"] for v in found["verdicts"]] == ["shifted tokens"], done.stderr
    assert found["verify/tokens/kl_explained"] > 0.9 * found["verify/tokens/kl_before"]
