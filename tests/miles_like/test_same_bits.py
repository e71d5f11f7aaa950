"""What is said before a deterministic run starts: by its configuration, and by its two sides to each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from miles_like.algorithms.bounds import Bounds
from miles_like.assemble import describe_processes
from miles_like.config_io import dump_config, load_config
from miles_like.rank_configs import trainer_config
from miles_like.same_bits import check_same_bits
from miles_like.verify.allowance import allowance
from quant.exact.selftest import fingerprint
from rollout import servers
from tests.megatron_bridge.tiny_models import random_tensors, tiny, write_checkpoint

TINY = Path(__file__).parents[2] / "configs" / "tiny.toml"
ON = "alignment.deterministic=true"


def test_the_flag_reaches_both_sides() -> None:
    """The engine computes as many parts of a sum as the trainer has ranks for them, in the trainer's dtype."""
    for changes, want in (([], ["1", "1"]), (["parallel.tp=2", "parallel.dp=1", "parallel.ep=1"], ["2", "1"])):
        config = load_config(TINY, [ON, *changes])
        trainer = trainer_config(config, TINY.parent)
        assert trainer.deterministic
        command = servers.embedded_command(Path("/m"), config.rollout, port=31000, exact=config.exact_parts)
        at = command.index("--exact-parts")
        assert command[at + 1 : at + 3] == want
        assert command[command.index("--dtype") + 1] == trainer.params_dtype == "bfloat16"
    plain = load_config(TINY)
    command = servers.embedded_command(Path("/m"), plain.rollout, port=31000, exact=plain.exact_parts)
    assert "--exact-parts" not in command and command[command.index("--dtype") + 1] == "float32"
    assert not trainer_config(plain, TINY.parent).deterministic


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["rollout.engine=sglang"], "on GPUs only, cluster.gpus_per_node = 0: set rollout.engine = 'embedded'"),
        (["rollout.embedded.dtype=float32"], "rollout.embedded.dtype = 'float32': remove that key"),
        (["precision.qat=false"], "fp8 weights, which the trainer does not know of: set precision.qat = true"),
    ],
)
def test_sides_that_cannot_agree_are_refused(changes: list[str], said: str) -> None:
    load_config(TINY, changes)
    with pytest.raises(ValueError) as e:
        load_config(TINY, [ON, *changes])
    assert said in str(e.value) and "alignment.deterministic = true" in str(e.value)


QWEN = TINY.parent / "qwen3_30b_a3b.toml"
ON_GPUS = [ON, "kernels.grouped_gemm=false"]


@pytest.mark.parametrize(("gpu", "backend"), [("hopper", "fa3"), ("blackwell", "triton")])
def test_on_gpus_each_side_gets_its_own_settings(gpu: str, backend: str, tmp_path: Path) -> None:
    """They are in the resolved configuration, the server's command and the ranks' settings; bits that are equal on both
    sides are promised to nobody, neither to the check at start nor to the bounds."""
    config = load_config(QWEN, [*ON_GPUS, f"rollout.sglang.gpu={gpu}"])
    flags = config.rollout.sglang
    assert (flags.enable_deterministic_inference, flags.attention_backend) == (True, backend)
    assert not config.bit_exact and config.exact_parts is None
    allowed = allowance(Bounds(), config.precision, engine="sglang", exact=config.bit_exact)
    assert allowed == allowance(Bounds(), load_config(QWEN).precision, engine="sglang", exact=False)
    (tmp_path / "again.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.toml") == config
    told = "\n".join(describe_processes(config, tmp_path))
    assert f" --attention-backend {backend} " in told and " --enable-deterministic-inference" in told
    assert "batch invariant forward, NCCL_ALGO=Ring, CUBLAS_WORKSPACE_CONFIG=:4096:8, NVTE_ALLOW_NONDET" in told
    plain = "\n".join(describe_processes(load_config(QWEN), tmp_path))
    assert "determin" not in plain and "NCCL_ALGO" not in plain and "--attention-backend" not in plain


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["rollout.sglang.enable_deterministic_inference=false"], "false says the contrary: remove that key"),
        (
            ["rollout.sglang.attention_backend=flashmla"],
            "'flashmla' has no deterministic kernels: set it to one",
        ),
    ],
)
def test_settings_of_gpus_that_contradict_are_refused(changes: list[str], said: str) -> None:
    with pytest.raises(ValueError) as e:
        load_config(QWEN, [*ON_GPUS, *changes])
    assert said in str(e.value)
    own = load_config(QWEN, [*ON_GPUS, "rollout.sglang.attention_backend=triton"]).rollout.sglang
    assert own.attention_backend == "triton" and own.enable_deterministic_inference


def test_an_embedded_engine_beside_gpus_is_exact_by_itself() -> None:
    """Its log-probabilities do not depend on batches; they are not the trainer's bits."""
    config = load_config(TINY, [ON, "cluster.gpus_per_node=2"])
    assert config.exact_parts == (1, 1) and not config.bit_exact


def test_a_server_of_other_bits_is_named() -> None:
    alike = {"exact_fingerprint": "abc", "exact_parts": [2, 1], "dtype": "bfloat16"}

    def check(trainer: str | None, **other: Any) -> None:
        both = {"http://a": alike, "http://b": alike | other}
        check_same_bits(trainer, both, parts=(2, 1), dtype="bfloat16")

    check("abc")
    for theirs in ("xyz", None):
        with pytest.raises(ValueError, match=r"abc on the trainer and (xyz|None) on http://b"):
            check("abc", exact_fingerprint=theirs)
    with pytest.raises(ValueError, match="None on the trainer"):
        check(None)
    for other in ({"exact_parts": [1, 1]}, {"exact_parts": None}, {"dtype": "float32"}):
        with pytest.raises(
            ValueError, match=r"http://b was started with .*has parts \[2, 1\] and computes in bfloat16"
        ):
            check("abc", **other)


def test_a_server_tells_what_bits_it_computes(tmp_path: Path) -> None:
    """Of its own process, over HTTP; a server that is not asked to be exact tells nothing."""
    hf = tiny()
    path = write_checkpoint(tmp_path / "hf", hf, random_tensors(hf))
    config = load_config(TINY, [ON]).rollout
    for exact, want in (((1, 1), fingerprint()), (None, None)):
        with servers.launch_embedded(path, config, port=None, log_dir=tmp_path, exact=exact) as server:
            told = httpx.get(f"{server.url}/server_info", timeout=60, trust_env=False).json()
            assert told["exact_fingerprint"] == want
            assert told["exact_parts"] == (None if exact is None else list(exact)) and told["dtype"]
