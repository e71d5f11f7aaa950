"""Environment variables: which names a table of the configuration may set, which values are secret, and what another
Python than this process's must not inherit."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# in a word of a name (words are between underscores), wherever it stands: API_KEY, APIKEY and HFTOKENS are all secret
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL")
# words that have one of these and are no secret
_PLAIN = {
    "PKEY": "the partition of an InfiniBand network, a number: NCCL_IB_PKEY, UCX_IB_PKEY",
    "TOKENIZER": "a setting of a tokenizer: SGLANG_PATCH_TOKENIZER",
    "TOKENIZERS": "a setting of a tokenizer: TOKENIZERS_PARALLELISM",
    "DETOKENIZER": "a setting of a tokenizer: SGLANG_DETOKENIZER_MAX_STATES",
}
# before TOKENS in a name: a number of tokens, as SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK
_COUNTS = ("MAX", "MIN", "NUM")
# words around TOKEN of SGLang's settings: SGLANG_USE_AITER_FP8_PER_TOKEN, SGLANG_INIT_NEW_TOKEN_RATIO,
# SGLANG_SYNC_TOKEN_IDS_ACROSS_TP
_AROUND_TOKEN = (("PER", None), (None, "RATIO"), (None, "IDS"))
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
COMMAND_BEGAN = "MILES_LIKE_COMMAND_BEGAN"  # `miles-like train --supervise` sets it for its drivers
_SETTABLE = ("MILES_LIKE_TRITON",)  # quant.kernels.choice reads it in each process


def is_secret(name: str) -> bool:
    """Whether the variable's value is a secret: it is then read from the driver's environment, and neither written nor
    printed. What is not known to be plain is secret, which costs an `export` where it was not meant."""
    return secret_word(name) is not None


def secret_word(name: str) -> str | None:
    """The part of the name that makes its value a secret, such as KEY; None: it is plain."""
    words = name.upper().split("_")
    for i, word in enumerate(words):
        found = next((part for part in _SECRET if part in word), None)
        if found is not None and not _is_plain(words, i):
            return found
    return None


def _is_plain(words: Sequence[str], i: int) -> bool:
    """Whether word i of a name, which has a part of `_SECRET`, is known to be of no secret."""
    if words[i] == "TOKENS":
        return any(word in _COUNTS for word in words[:i])
    if words[i] == "TOKEN":
        before, after = words[i - 1] if i else None, words[i + 1] if i + 1 < len(words) else None
        return any(first in (None, before) and last in (None, after) for first, last in _AROUND_TOKEN)
    return words[i] in _PLAIN


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
        if (word := secret_word(name)) is not None and value != "":
            raise ValueError(
                f"{key}.{name} has a value in the configuration, but a name with {word} takes its value from the "
                f'environment of the process that starts the run: write {name} = "" and export {name} there'
            )
        if isinstance(value, bool) or not isinstance(value, str | int) or "\0" in str(value):
            raise ValueError(f"{key}.{name} is not a text without null characters: write its value in quotes")
    return {name: str(value) for name, value in given.items()}


def _owner(name: str) -> str | None:
    """What sets the variable in place of the user; None where the user may."""
    if name in _DEVICES:
        return "the placement gives each process its GPUs"
    if name in _WORLD or (name.startswith(_OWN_PREFIXES) and name not in _SETTABLE):
        return "the run sets it in every process that needs it"
    if name in INTERPRETER:
        return "it would change which packages a Python finds (rollout.sglang.python names the engine's interpreter)"
    return None


def inherited() -> Mapping[str, str]:
    """The environment of this process."""
    return os.environ


def filled(key: str, given: Mapping[str, str]) -> dict[str, str]:
    """The variables of a table that `read_variables` has read, with secrets from the environment of this process. key:
    of the table. Raises ValueError for a secret that the environment lacks."""
    for name, value in given.items():
        if not value and is_secret(name) and name not in os.environ:
            raise ValueError(
                f"{key}.{name} takes its value from the environment of the process that starts the run, which has "
                f"none: export {name} there"
            )
    return {name: value or (os.environ[name] if is_secret(name) else "") for name, value in given.items()}


def set_variables(values: Mapping[str, str]) -> None:
    """In the environment of this process."""
    os.environ.update(values)


def environment_of(python: str, environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for the interpreter `python` of another virtual environment: without variables that would make it
    find this process's packages, and with its folder first in PATH, where its compilers look for `ninja`."""
    kept = {name: value for name, value in environment.items() if name not in INTERPRETER}
    return kept | {"PATH": os.pathsep.join([str(Path(python).parent), kept.get("PATH", os.defpath)])}


def command_began() -> float | None:
    """When the command began whose supervisor has started this process, in seconds as `time.time` counts; None: it has
    no supervisor."""
    try:
        return float(os.environ[COMMAND_BEGAN])
    except (KeyError, ValueError):
        return None


def ray_address(given: str | None) -> str | None:
    """The Ray cluster to join: `given`, else that of the variable RAY_ADDRESS; None: none."""
    return given or os.environ.get("RAY_ADDRESS") or None
