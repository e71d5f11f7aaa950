"""The checks before a deterministic run starts: of its configuration, and between its two sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from miles_like.algorithms.terms.bounds import Bounds
from miles_like.alignment.allowance import allowance
from miles_like.alignment.same_bits import check_same_bits
from miles_like.config.load import dump_config, load_config
from miles_like.config.ranks import trainer_config
from miles_like.config.run import RunConfig
from miles_like.run.assemble import describe_processes, known_model
from quant.exact.selftest import fingerprint
from rollout.sglang import servers
from rollout.sglang.servers import ServerLaunch
from rollout.sglang.startup import launch_server
from tests.support.chosen import later
from tests.support.refusals import Facts, refuses
from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

TINY = Path(__file__).parents[3] / "configs" / "tiny.toml"
ON = "alignment.deterministic=true"


def launch(config: RunConfig) -> ServerLaunch:
    return ServerLaunch(model_path=Path("/m"), config=config.rollout, log_dir=Path("/logs"), exact=config.tp_shards)


def test_the_flag_reaches_both_sides() -> None:
    """The engine computes as many parts of a sum as the trainer has ranks for them, in the trainer's dtype."""
    for changes, want in (([], ["1", "1"]), (["parallel.tp=2", "parallel.dp=1", "parallel.ep=1"], ["2", "1"])):
        config = load_config(TINY, [ON, *changes])
        trainer = trainer_config(config, TINY.parent)
        assert trainer.deterministic
        command = servers.embedded_command(launch(config), 31000)
        at = command.index("--exact-parts")
        assert command[at + 1 : at + 3] == want
        assert command[command.index("--dtype") + 1] == trainer.params_dtype == "bfloat16"
    plain = load_config(TINY)
    command = servers.embedded_command(launch(plain), 31000)
    assert "--exact-parts" not in command and command[command.index("--dtype") + 1] == "float32"
    assert not trainer_config(plain, TINY.parent).deterministic


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        (["rollout.engine=sglang"], ("cluster.gpus_per_node", 0, "rollout.engine", "embedded")),
        (["rollout.embedded.dtype=float32"], ("rollout.embedded.dtype", "float32")),
        (["precision.qat=false"], ("fp8", "precision.qat")),
    ],
)
def test_sides_that_cannot_agree_are_refused(changes: list[str], facts: Facts) -> None:
    load_config(TINY, changes)
    with refuses(ValueError, "alignment.deterministic", *facts):
        load_config(TINY, [ON, *changes])


QWEN = TINY.parent / "qwen3_30b_a3b.toml"
ON_GPUS = [ON, "kernels.grouped_gemm=false"]


@pytest.mark.parametrize(("gpu", "backend"), [("hopper", "fa3"), ("blackwell", "triton")])
def test_on_gpus_each_side_gets_its_own_settings(gpu: str, backend: str, tmp_path: Path) -> None:
    """They are in the resolved configuration, the server's command and the ranks' settings; equal bits on both sides
    are not assumed, neither by the check at start nor by the bounds."""
    config = load_config(QWEN, [*ON_GPUS, f"rollout.sglang.gpu={gpu}"])
    flags = config.rollout.sglang
    assert (flags.enable_deterministic_inference, flags.attention_backend) == (True, backend)
    assert not config.bit_exact and config.tp_shards is None
    allowed = allowance(Bounds(), config.precision, engine="sglang", exact=config.bit_exact)
    assert allowed == allowance(Bounds(), load_config(QWEN).precision, engine="sglang", exact=False)
    (tmp_path / "again.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.toml") == config
    described = "\n".join(describe_processes(config, tmp_path, known_model(config), tmp_path / "stage-1"))
    assert f" --attention-backend {backend} " in described and " --enable-deterministic-inference" in described
    assert "batch invariant forward, NCCL_ALGO=Ring, CUBLAS_WORKSPACE_CONFIG=:4096:8, NVTE_ALLOW_NONDET" in described
    plain = "\n".join(
        describe_processes(stock := load_config(QWEN), tmp_path, known_model(stock), tmp_path / "stage-1")
    )
    assert "determin" not in plain and "NCCL_ALGO" not in plain and "--attention-backend" not in plain


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        (
            ["rollout.sglang.enable_deterministic_inference=false"],
            ("rollout.sglang.enable_deterministic_inference",),
        ),
        (
            ["rollout.sglang.attention_backend=flashmla"],
            ("rollout.sglang.attention_backend", "flashmla"),
        ),
    ],
)
def test_settings_of_gpus_that_contradict_are_refused(changes: list[str], facts: Facts) -> None:
    with refuses(ValueError, *facts):
        load_config(QWEN, [*ON_GPUS, *changes])
    own = load_config(QWEN, [*ON_GPUS, "rollout.sglang.attention_backend=triton"]).rollout.sglang
    assert own.attention_backend == "triton" and own.enable_deterministic_inference


def test_an_embedded_engine_beside_gpus_is_exact_by_itself() -> None:
    """Its log-probabilities do not depend on batches; they are not the trainer's bits."""
    config = load_config(TINY, [ON, "cluster.gpus_per_node=2"])
    assert config.tp_shards == (1, 1) and not config.bit_exact


def test_a_server_of_other_bits_is_named() -> None:
    alike = {"exact_fingerprint": "abc", "exact_parts": [2, 1], "dtype": "bfloat16"}

    def check(trainer: str | None, **other: Any) -> None:
        both = {"http://a": alike, "http://b": alike | other}
        check_same_bits(trainer, both, tp_shards=(2, 1), dtype="bfloat16")

    check("abc")
    for theirs in ("xyz", None):
        with refuses(ValueError, "http://b"):
            check("abc", exact_fingerprint=theirs)
    with refuses(ValueError, "None"):
        check(None)
    for other in ({"exact_parts": [1, 1]}, {"exact_parts": None}, {"dtype": "float32"}):
        with refuses(ValueError, "http://b", "[2, 1]", "bfloat16"):
            check("abc", **other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "exact", later([(1, 1), None], [(1, 1)], beside="tests/miles_like/alignment/test_same_bits.py")
)
def test_a_server_tells_what_bits_it_computes(tmp_path: Path, exact: tuple[int, int] | None) -> None:
    """Its process's, over HTTP; a server without exact operations reports none."""
    hf = tiny()
    path = write_checkpoint(tmp_path / "hf", hf, random_tensors(hf))
    config = load_config(TINY, [ON]).rollout
    with launch_server(ServerLaunch(model_path=path, config=config, log_dir=tmp_path, exact=exact)) as server:
        info = httpx.get(f"{server.url}/server_info", timeout=60, trust_env=False).json()
    assert info["exact_fingerprint"] == (None if exact is None else fingerprint())
    assert info["exact_parts"] == (None if exact is None else list(exact)) and info["dtype"]
    assert info["triton"] is False, "a CPU has PyTorch"
