"""Where Triton kernels compute. Not covered: a CUDA device (tests/gpu)."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from quant.kernels import choice


class OnCuda:
    """What `uses_triton` asks of a tensor."""

    is_cuda = True
    device = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> OnCuda:
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    monkeypatch.setattr(choice, "_installed", lambda: True)
    monkeypatch.setattr(choice, "_is_new", lambda device: True)
    return OnCuda()


def test_a_cpu_tensor_has_the_plain_path() -> None:
    assert choice.uses_triton(torch.zeros(1)) is False


@pytest.mark.parametrize("value, uses", [("0", False), ("1", True), ("", True)])
def test_the_variable_disables_the_kernels(
    hopper: OnCuda, monkeypatch: pytest.MonkeyPatch, value: str, uses: bool
) -> None:
    assert choice.uses_triton(hopper) is True  # type: ignore[arg-type]
    monkeypatch.setenv(choice.VARIABLE, value)
    assert choice.uses_triton(hopper) is uses  # type: ignore[arg-type]


@pytest.mark.parametrize("missing", ["_installed", "_is_new"])
def test_without_triton_or_on_an_older_device_it_is_plain(
    hopper: OnCuda, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(choice, missing, lambda *_: False)
    assert choice.uses_triton(hopper) is False  # type: ignore[arg-type]


def test_devices_of_rocm_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their capabilities have another numbering: an MI300 says 9.4."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    assert choice._is_new.__wrapped__(OnCuda.device) is True
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert choice._is_new.__wrapped__(OnCuda.device) is False


def test_a_fake_tensor_is_plain(hopper: OnCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no address that a kernel could read."""
    fake = FakeTensorMode().from_tensor(torch.zeros(1))
    monkeypatch.setattr(FakeTensor, "is_cuda", True, raising=False)
    assert fake.is_cuda and choice.uses_triton(fake) is False


def test_codecs_do_not_import_triton() -> None:
    code = "import sys, quant.registry; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"
