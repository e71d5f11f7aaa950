"""Reinforcement-learning post-training of mixture-of-experts language models in low precision.

The functions of the Python API are imported when they are first used: `import miles_like` alone takes no library.
docs/python_api.md describes them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_like.api.checkpoints import convert, export, quantize
    from miles_like.api.models import evaluate, plan, verify
    from miles_like.api.results import RunResult
    from miles_like.api.training import train
    from miles_like.command_errors import UserError
    from miles_like.stopping import Stopped

__version__ = "0.1.0"
__all__ = [
    "RunResult",
    "Stopped",
    "UserError",
    "__version__",
    "convert",
    "evaluate",
    "export",
    "plan",
    "quantize",
    "train",
    "verify",
]

_MODULES = {
    "miles_like.api.training": ("train",),
    "miles_like.api.results": ("RunResult",),
    "miles_like.api.models": ("evaluate", "plan", "verify"),
    "miles_like.api.checkpoints": ("convert", "export", "quantize"),
    "miles_like.command_errors": ("UserError",),
    "miles_like.stopping": ("Stopped",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
