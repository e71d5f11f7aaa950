"""`verify --server`: a server that is not there, or is not what the job needs, is refused before ranks are started.

Not covered: a whole comparison on a running server (tests/sglang_cpu).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from miles_like.alignment.live import opaque_evidence
from miles_like.run.verify import VerifyOptions, VerifyRun, check_attached
from rollout.config import RolloutConfig
from rollout.sglang.client import SGLangClient
from rollout.sglang.http_replies import RolloutError
from rollout.sglang.ports import free_port
from rollout.wire.control import ChecksumReply, ModelInfo, RankReply
from tests.support.refusals import Facts, refuses

URL = "http://10.0.0.7:30000"
INFO = ModelInfo(model_path="/m", weight_version="0", architectures=("Qwen3MoeForCausalLM",))
STOCK = {"version": "0.5.23", "tp_size": 1, "enable_return_routed_experts": True}


def job(engine: str = "sglang", *, experts: bool = True) -> Any:
    """As ModelPlan."""
    return SimpleNamespace(
        config=SimpleNamespace(rollout=RolloutConfig.model_validate({"engine": engine})),
        hf=SimpleNamespace(config={"architectures": ["Qwen3MoeForCausalLM"]}),
        served=Path("/served"),
        run_dir=Path("/run"),
        model=SimpleNamespace(routing=object() if experts else None),
    )


def side() -> Any:
    """As RolloutSide."""
    return SimpleNamespace(plan=job(), sglang_client=lambda url, ours, key: SGLangClient(url, routing=None, key=key))


def test_a_server_of_the_job_is_taken() -> None:
    check_attached(URL, INFO, STOCK, job())
    check_attached(URL, INFO, STOCK | {"enable_return_routed_experts": False}, job(experts=False))
    check_attached(URL, INFO, {"version": "embedded", "enable_return_routed_experts": True}, job("embedded"))


@pytest.mark.parametrize(
    ("run", "info", "server", "facts"),
    [
        (job("embedded"), INFO, STOCK, ("rollout.engine", "embedded", "--set", "rollout.engine")),
        (job(), INFO, {"version": "embedded"}, ("rollout.engine", "sglang")),
        (
            job(),
            ModelInfo(model_path="/m", weight_version="0"),
            STOCK,
            ("Qwen3MoeForCausalLM",),
        ),
        (job(), INFO, STOCK | {"tp_size": 8}, (8, "rollout.sglang.tp_size", 1, "--set", "rollout.sglang.tp_size", 8)),
        (job(), INFO, STOCK | {"enable_return_routed_experts": False}, ("--enable-return-routed-experts",)),
    ],
)
def test_another_is_refused_with_the_remedy(run: Any, info: ModelInfo, server: dict[str, Any], facts: Facts) -> None:
    with refuses(ValueError, *facts):
        check_attached(URL, info, server, run)


def test_one_that_is_not_there_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with refuses(RolloutError, url):
        asyncio.run(VerifyRun(side(), VerifyOptions(attached=[url])).meet())


def test_only_named_servers_are_overwritten() -> None:
    with refuses(ValueError, "--overwrite", "--server"):
        VerifyRun(side(), VerifyOptions(overwrite=True))
    for options in (VerifyOptions(attached=[URL], overwrite=True), VerifyOptions()):
        assert VerifyRun(side(), options).may_publish
    assert not VerifyRun(side(), VerifyOptions(attached=[URL])).may_publish


def test_new_samples_are_compared_with_the_last_checkpoint_of_the_run(tmp_path: Path) -> None:
    """Not those of a server that runs, whose weights are its run's, and not kept ones."""
    assert VerifyOptions().of_run(tmp_path).checkpoint is None
    for step in (2, 10):
        (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
        (tmp_path / "checkpoints" / f"step_{step}" / "run_state.json").touch()
    (tmp_path / "checkpoints" / "latest").write_text("step_10\n")
    assert VerifyOptions().of_run(tmp_path).checkpoint == tmp_path / "checkpoints" / "step_10"
    given = VerifyOptions(checkpoint=tmp_path / "checkpoints" / "step_2")
    for options in (given, VerifyOptions(attached=[URL]), VerifyOptions(rollouts=Path("step_1.jsonl"))):
        assert options.of_run(tmp_path) is options


def test_kept_samples_ask_no_server() -> None:
    for more in ({"attached": [URL]}, {"prompts": 8}):
        with refuses(ValueError, "--rollouts", "step_1.jsonl"):
            VerifyRun(side(), VerifyOptions(rollouts=Path("step_1.jsonl"), **more))


def test_every_rank_of_a_server_is_compared() -> None:
    """Stock SGLang of two ranks, the second of which held other values of one tensor until the publication."""
    before, after = (
        ChecksumReply(
            per_engine_checksum="",
            ranks=tuple(
                RankReply(checksums=names, per_gpu_checksum="") for names in ({"a": "1", "b": "2"}, {"a": "3", "b": of})
            ),
        )
        for of in ("4", "5")
    )
    published: Any = SimpleNamespace(whole=None, spec=None)
    assert opaque_evidence(after.tensors, before.tensors, published).differing == ["b (rank 1)"]
