"""Shims: each target exists, none is felt outside megatron."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_bridge.device import device
from megatron_bridge.device.cuda_settings import use_deterministic_kernels
from megatron_bridge.device.device import init_device, set_environment
from megatron_bridge.device.shims import MEGATRON_SHIMS, NO_TE_SHIMS, TORCH_SHIMS, Shim
from megatron_bridge.plan.deterministic import ENVIRONMENT
from tests.support.refusals import refuses


def _fake(module: str) -> dict[str, object]:
    return {"__name__": module, "torch": torch}


def _call(source: str, module: str) -> object:
    """Evaluate an expression as if it stood in `module`."""
    return eval(source, _fake(module))


@pytest.fixture(autouse=True)
def env() -> device.DeviceEnv:
    return init_device()


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is redirected on CUDA")
@pytest.mark.parametrize(
    "source",
    [
        "torch.zeros(2, device='cuda')",
        "torch.tensor([1.0, 2.0], device='cuda', pin_memory=True)",
        "torch.ones(2).cuda()",
        "torch.ones(2).to('cuda')",
    ],
)
def test_redirects_answer_megatron_only(source: str) -> None:
    """Megatron writes device="cuda" literally. Any other caller that asks for CUDA where there is none must get the
    error: a silent CPU tensor would hide a bug."""
    assert _call(source, "megatron.core.anything").device.type == "cpu"  # type: ignore[attr-defined]
    with pytest.raises((RuntimeError, AssertionError)):
        _call(source, "another.package")


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is redirected on CUDA")
def test_tensor_type_names_lie_to_megatron_only() -> None:
    """Its optimizers compare the name with 'torch.cuda.FloatTensor'; a type conversion is not a question."""
    assert _call("torch.ones(1).type()", "megatron.core.optimizer") == "torch.cuda.FloatTensor"
    assert _call("torch.ones(1).type()", "another.package") == "torch.FloatTensor"
    converted = _call("torch.ones(1).type(torch.float64)", "megatron.core.optimizer")
    assert converted.dtype is torch.float64  # type: ignore[attr-defined]


def test_compilation_outside_megatron_is_untouched() -> None:
    """Only megatron's `jit_fuser` is eager; torch.compile itself is back in place after the import."""
    from megatron.core.jit import jit_fuser

    assert torch.compile.__module__ == "torch"
    if not torch.cuda.is_available():

        def f(x: int) -> int:
            return x

        assert eval("fuse(f)", {"__name__": "megatron.core.x", "fuse": jit_fuser, "f": f}) is f


def test_each_shim_says_why() -> None:
    """The table is the documentation."""
    shims = (*TORCH_SHIMS, *MEGATRON_SHIMS, *NO_TE_SHIMS)
    assert all(len(s.reason) > 10 for s in shims)
    assert len({(s.owner, s.name) for s in shims}) == len(shims)


def test_a_vanished_target_and_a_fixed_bug_fail_the_start() -> None:
    """When the pinned wheel moves, a shim must not silently patch nothing, or patch what needs it no more."""
    with refuses(AssertionError, "torch.cuda.no_such_function"):
        Shim("torch.cuda", "no_such_function", "a reason of some length", lambda stock: stock).install()
    with refuses(AssertionError, "torch.nn"):
        Shim("torch", "nn", "a reason of some length", lambda stock: stock, lambda stock: False).install()


def test_later_calls_return_the_same_value(env: device.DeviceEnv) -> None:
    """Installing twice would wrap the wrappers."""
    assert init_device() is env
    assert env.backend == ("nccl" if torch.cuda.is_available() else "gloo")


def test_device_contexts_act_on_shimmed_factories(env: device.DeviceEnv) -> None:
    """transformers builds models under `with torch.device("meta")`; a factory that escapes it leaves weights unfilled.
    In a separate interpreter: torch remembers the first such context of a process."""
    code = (
        "from megatron_bridge.device.device import init_device; init_device(); import torch\n"
        "with torch.device('meta'):\n"
        "    made = [torch.empty(2), torch.arange(3), torch.zeros(1), torch.tensor([1.0]), torch.randn(2)]\n"
        "assert all(t.device.type == 'meta' for t in made), made"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_variables_that_somebody_has_set_are_kept_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setenv("NCCL_ALGO", "^NVLS")
    set_environment(ENVIRONMENT)
    want = {"NCCL_ALGO": "^NVLS", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    assert {name: os.environ[name] for name in ENVIRONMENT} == want
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    with refuses(ValueError, "NCCL_ALGO", "Tree"):
        set_environment(ENVIRONMENT)
    for name in ENVIRONMENT:
        monkeypatch.delenv(name)


def test_deterministic_kernels_are_switched_on_in_torch_and_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's are triton's, which is absent here: that they are asked for once, and only where they apply."""
    asked: list[bool] = []
    kernels = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
    monkeypatch.setitem(sys.modules, kernels, SimpleNamespace(enable_batch_invariant_mode=lambda: asked.append(True)))
    try:
        use_deterministic_kernels("deterministic")
        assert torch.are_deterministic_algorithms_enabled() and not asked
        assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        use_deterministic_kernels("batch invariant")
        assert asked == [True]
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA ranks use the package")
def test_cpu_ranks_do_not_import_an_installed_transformer_engine(tmp_path: Path) -> None:
    """Megatron would take its optimizer and its router's product from it, which need CUDA. Seen with release 2.20.2
    and no device: the first trainer of a rank failed."""
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    code = (
        "from megatron_bridge.device.device import init_device; init_device()\n"
        "import megatron.core.optimizer as o, megatron.core.transformer.moe.moe_utils as m, torch\n"
        "print(o.Adam is torch.optim.AdamW, m.te_general_gemm)"
    )
    path = os.pathsep.join((str(tmp_path), *sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.stdout.split() == ["True", "None"], done.stderr


def test_announcements_of_libraries_are_not_in_the_log_of_a_rank() -> None:
    """Five of them stood after the line that a user looks for; a warning of this project or of another kind stays."""
    found = [("torch.distributed.c10d_logger", FutureWarning), ("megatron.core.x", FutureWarning)]
    kept = [("torch.nn", RuntimeWarning), ("miles_like.run", FutureWarning), ("torchmetrics", FutureWarning)]
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        device._quiet_libraries()
        for number, (module, category) in enumerate(found + kept):
            warnings.warn_explicit(str(number), category, f"{module}.py", 1, module=module)
    assert [str(w.message) for w in shown] == ["2", "3", "4"]
