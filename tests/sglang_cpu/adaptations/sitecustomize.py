"""What stock SGLang 0.5.23 takes for granted on import, and a machine without a GPU has not; and a faster start.

Python imports this file when it starts, in every process of the server, since `serve.py` puts this folder on its path.
No file of SGLang's is changed. What is put right is looked up by the name it has in that version, so that another
version fails here and not silently.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import absent


def operators_of_torchvision() -> None:
    """Its C++ library does not load beside a CPU build of torch, and its Python half registers shapes of two operators
    on import, which must be declared."""
    import torch

    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def host_memory(module: Any) -> None:
    """Routes are kept in host memory, which SGLang registers with CUDA: here it is memory like any other."""

    def plain(dims: Sequence[int], dtype: Any, device: str, pin_memory: bool, allocator: Any, *_: Any) -> Any:
        return allocator.allocate(dims, dtype=dtype, device="cpu")

    assert "cpu" not in module.ALLOC_MEMORY_FUNCS, "this version allocates on CPU by itself"
    module.ALLOC_MEMORY_FUNCS["cpu"] = plain


def latent_attention(module: Any) -> None:
    """For attention over latents (MLA) no choice is registered of the backend `torch_native`: it gets Triton's, whose
    keys do not fit what it reads back. Absorbed latents do."""
    registry = module.AttentionBackendRegistry
    assert "triton" in registry._handlers and "torch_native" not in registry._handlers
    registry.register("torch_native", lambda attention, batch: module.AttnForwardMethod.MLA)


def forked_processes(module: Any) -> None:
    """Scheduler and detokenizer begin with what the server has imported, and has one thread then. Spawned, as they are
    in the release, each of them imports it again: 12 seconds."""
    set_start_method = module.mp.set_start_method
    module.mp.set_start_method = lambda method, force=False: set_start_method("fork", force)


BEFORE: dict[str, Callable[[], None]] = {"torchvision": operators_of_torchvision}
AFTER: dict[str, Callable[[Any], None]] = {
    "sglang.srt.mem_cache.pool_host.common": host_memory,
    "sglang.srt.models.deepseek_common.attention_backend_handler": latent_attention,
}
if "SERVER_FORKS" in os.environ:
    AFTER["sglang.srt.entrypoints.engine"] = forked_processes


class _Adapted(importlib.abc.Loader):
    """A module's own loader, then the change."""

    def __init__(self, loader: importlib.abc.Loader, change: Callable[[Any], None]) -> None:
        self._loader, self._change = loader, change

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)


class _Adapting(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if (first := BEFORE.pop(name, None)) is not None:
            first()
        change = AFTER.pop(name, None)  # so that the search below does not come back here
        spec = None if change is None else importlib.util.find_spec(name)
        if spec is None or change is None:
            return None
        assert spec.loader is not None
        spec.loader = _Adapted(spec.loader, change)
        return spec


sys.meta_path.insert(0, _Adapting())
absent.stand_in("sgl_kernel", absent.Uncallable)  # no wheel for CPU; without AMX these models call none of it
absent.stand_in("triton", absent.Decorators)  # 691 MB of compiler, whose kernels are defined and never started here
