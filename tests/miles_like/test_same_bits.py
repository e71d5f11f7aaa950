"""What is said before a deterministic run starts: by its configuration, and by its two sides to each other."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from miles_like.config import trainer_config
from miles_like.config_io import load_config
from miles_like.same_bits import check_same_bits
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
        (["rollout.engine=sglang"], "set rollout.engine = 'embedded'"),
        (["cluster.gpus_per_node=2"], "cluster.gpus_per_node = 2"),
        (["rollout.embedded.dtype=float32"], "rollout.embedded.dtype = 'float32': remove that key"),
        (["precision.qat=false"], "fp8 weights, which the trainer does not know of: set precision.qat = true"),
    ],
)
def test_sides_that_cannot_agree_are_refused(changes: list[str], said: str) -> None:
    load_config(TINY, changes)
    with pytest.raises(ValueError) as e:
        load_config(TINY, [ON, *changes])
    assert said in str(e.value) and "alignment.deterministic = true" in str(e.value)


def test_a_server_of_other_bits_is_named() -> None:
    check_same_bits("abc", {"http://a": {"exact_fingerprint": "abc"}})
    for theirs in ({"exact_fingerprint": "xyz"}, {"exact_fingerprint": None}, {}):
        with pytest.raises(ValueError, match=r"abc on the trainer and (xyz|None) on http://b"):
            check_same_bits("abc", {"http://a": {"exact_fingerprint": "abc"}, "http://b": theirs})
    with pytest.raises(ValueError, match="None on the trainer"):
        check_same_bits(None, {"http://a": {"exact_fingerprint": "abc"}})


def test_a_server_tells_what_bits_it_computes(tmp_path: Path) -> None:
    """Of its own process, over HTTP; a server that is not asked to be exact tells nothing."""
    hf = tiny()
    path = write_checkpoint(tmp_path / "hf", hf, random_tensors(hf))
    config = load_config(TINY, [ON]).rollout
    for exact, want in (((1, 1), fingerprint()), (None, None)):
        with servers.launch_embedded(path, config, port=None, log_dir=tmp_path, exact=exact) as server:
            told = httpx.get(f"{server.url}/server_info", timeout=60, trust_env=False).json()
            assert told["exact_fingerprint"] == want
