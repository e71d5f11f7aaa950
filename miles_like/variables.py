"""Tables of environment variables in the configuration: which names a table may set, and which values are secret."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = ("KEY", "TOKEN", "SECRET")
# read by the interpreter before its first line runs: they belong to one Python environment, not to a run
INTERPRETER = (
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONSTARTUP",
    "PYTHONPLATLIBDIR",
    "PYTHONEXECUTABLE",
    "PYTHONSAFEPATH",
    "PYTHONNOUSERSITE",
    "PYTHONUSERBASE",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "__PYVENV_LAUNCHER__",
)
_DEVICES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
_WORLD = (
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_OWN_PREFIXES = ("RAY_", "MILES_LIKE_", "TORCHELASTIC_")


def is_secret(name: str) -> bool:
    """Whether the variable's value is a secret: it is then read from the driver's environment, and neither written nor
    printed."""
    return any(word in name.upper() for word in _SECRET)


def read_variables(key: str, given: Any) -> Any:
    """The table `key` of a configuration with whole numbers as text; what is no table is returned unchanged.

    Raises ValueError for the first name that the table cannot set, a value that is no text, or a secret that is written
    in the file. The message does not repeat the value.
    """
    if not isinstance(given, Mapping):
        return given
    for name, value in given.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{key} has {name!r}, which is not the name of an environment variable: correct it")
        if (why := _owner(name)) is not None:
            raise ValueError(f"{key}.{name} cannot be set, {why}: remove it")
        if is_secret(name) and value != "":
            raise ValueError(
                f"{key}.{name} has a value in the configuration, but a name with KEY, TOKEN or SECRET takes its value "
                f'from the environment of the process that starts the run: write {name} = "" and export {name} there'
            )
        if isinstance(value, bool) or not isinstance(value, str | int) or "\0" in str(value):
            raise ValueError(f"{key}.{name} is not a text without null characters: write its value in quotes")
    return {name: str(value) for name, value in given.items()}


def _owner(name: str) -> str | None:
    """What sets the variable in place of the user; None where the user may."""
    if name in _DEVICES:
        return "the placement gives each process its GPUs"
    if name in _WORLD or name.startswith(_OWN_PREFIXES):
        return "the run sets it in every process that needs it"
    if name in INTERPRETER:
        return "it would change which packages a Python finds (rollout.sglang.python names the engine's interpreter)"
    return None
