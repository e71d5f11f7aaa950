"""Law: stock SGLang serves the same tensors, hash by hash, however the weights reach it: by handles of shared memory,
in a process group, in two of them whose sources are stages of a trainer, or from a disk; here with two tensor-parallel
ranks, which take their shards of whole tensors.

SGLang 0.5.23 as it is released, on CPU (`make test-sglang`). DeepSeek's shape, whose fused pair of projections is lost
when it is parted; with buckets of one module, of some and of all. With one rank: test_stock_sglang.py. Not covered:
CUDA IPC and NCCL; FP8 and INT4, whose CPU kernels need AMX.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang_cpu.served import START_S, serve
from tests.sglang_cpu.weight_paths import Stock, check_paths, check_sources
from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

pytestmark = pytest.mark.slow


def test_each_path_serves_what_a_publication_on_disk_does_to_two_ranks(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "hf", tiny(), random_tensors(tiny()))
    with serve(model, tmp_path / "sglang.log", "--tp-size", "2") as server:
        server.await_ready(START_S)
        stock = Stock(server.url, 2, model)
        check_paths(stock, tmp_path)
        check_sources(stock, model)
