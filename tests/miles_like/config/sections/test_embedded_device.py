"""`rollout.embedded.device = "cuda"`: what it cannot be combined with is refused, trainer and server share the GPU in
turns, and the server's command says it.

Why it must hold: a run that is refused by a server costs the start of a trainer. Not covered: the device itself
(tests/gpu).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from miles_like.cluster.placement import plan_placement
from miles_like.commands.train import _ON_A_GPU
from miles_like.config.load import load_config
from rollout.embedded.device.cuda import check_flags, check_sizes, memory_is_enough, use_cuda
from rollout.embedded.families.registry import architecture_of
from rollout.sglang.servers import ServerLaunch, embedded_command
from tests.support.refusals import Facts, refuses
from tests.support.tiny_models import tiny

TINY = Path(__file__).parents[4] / "configs" / "tiny.toml"
DEVICE = "rollout.embedded.device"


@pytest.mark.parametrize(
    ("setting", "facts"),
    [
        ("cluster.gpus_per_node=0", (DEVICE, "cluster.gpus_per_node", 0)),
        ("rollout.embedded.dtype=float32", (DEVICE, "bfloat16", "float32")),
        ("rollout.embedded.tp_size=2", (DEVICE, "tp_size", 2)),
        ("alignment.deterministic=true", (DEVICE, "alignment.deterministic")),
        ("precision.activations=fp8", (DEVICE, "precision.activations", "fp8")),
        ("rollout.servers=2", ("2 servers", 1)),
    ],
)
def test_what_a_gpu_cannot_do_is_refused(setting: str, facts: Facts) -> None:
    with refuses(ValueError, *facts):
        load_config(TINY, [*_ON_A_GPU, setting])


def test_trainer_and_server_take_turns_on_the_gpu() -> None:
    """As with stock servers, without a key; the teachers' servers stay on CPU."""
    config = load_config(TINY, _ON_A_GPU)
    assert config.takes_turns
    plan = plan_placement(config.cluster, config.parallel, config.rollout)
    assert plan.of("trainer")[0].gpus == plan.of("rollout")[0].gpus == (0,)
    command = embedded_command(ServerLaunch(model_path=Path("m"), config=config.rollout, log_dir=Path("l")), 1)
    assert command[command.index("--device") + 1] == "cuda" and command[command.index("--dtype") + 1] == "bfloat16"
    assert not load_config(TINY, [*_ON_A_GPU, f"{DEVICE}=cpu"]).takes_turns


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        ({"exact": (1, 1)}, ("--device", "--exact-parts")),
        ({"tp_size": 2}, ("--device", "--tp-size", 2)),
        ({"dtype": "float32"}, ("--device", "--dtype", "float32", "bfloat16")),
        ({"activations": "fp8"}, ("--device", "--activations", "fp8")),
    ],
)
def test_a_server_refuses_them_too(flags: dict[str, Any], facts: Facts) -> None:
    plain: dict[str, Any] = {"dtype": "bfloat16", "tp_size": 1, "ep_size": 1, "activations": "none", "exact": None}
    check_flags(**plain)
    with refuses(ValueError, *facts):
        check_flags(**(plain | flags))


def test_a_server_needs_a_device_and_rows_that_it_multiplies() -> None:
    check_sizes(architecture_of(tiny()))
    with refuses(ValueError, "--device", "moe_intermediate_size", 60, 8):
        check_sizes(architecture_of(tiny(moe_intermediate_size=60)))
    with (
        patch("torch.cuda.is_available", lambda: False),
        refuses(ValueError, "--device", unrecorded="it names the version of torch"),
    ):
        use_cuda()
    with refuses(ValueError, "--device", "--max-total-tokens", 4096), memory_is_enough(4096):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")


def test_servers_of_teachers_stay_on_cpu() -> None:
    config = load_config(TINY.with_name("tiny_opd.toml"), _ON_A_GPU)
    assert config.rollout.embedded.device == "cuda"
    assert {one.embedded.device for one in config.teacher_rollouts} == {"cpu"}
