"""Loads a user's function or class from an import path: `package.module:name`, or `path/to/file.py:name`.

The one loader for rewards, advantages, losses, filters, environments and generate functions. It checks the signature of
what it finds against a Protocol of miles_like/protocols.py before anything starts.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from miles_like.limits.user_errors import raised

FORMS = "package.module:name or path/to/file.py:name"
GIVEN = "given:"  # begins the name of a function that Python code of this process passed
_given: dict[str, Callable[..., Any]] = {}


def name_of(function: Callable[..., Any]) -> str:
    """The name under which `load` finds a function that Python code passes: its import path if another process can
    import it, else `given:NAME-DIGEST`, which this process alone knows. The digest is of its code: an edited function
    has another name."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", type(function).__qualname__)
    if module != "__main__" and getattr(sys.modules.get(str(module)), name, None) is function:
        return f"{module}:{name}"
    plain = name.rpartition(".")[2].strip("<>")
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    given = f"{GIVEN}{plain}-{hashlib.sha256(repr(_parts(code)).encode()).hexdigest()[:8]}"
    _given[given] = function
    return given


def _parts(code: object) -> object:
    """What a function computes with, without its file and lines."""
    if isinstance(code, frozenset):
        return sorted(map(repr, code))  # its own order differs between processes
    if not isinstance(code, CodeType):
        return code
    return code.co_code.hex(), code.co_names, code.co_varnames, [_parts(const) for const in code.co_consts]


def load(name: str, *protocols: type, key: str, known: Mapping[str, Callable[[], Any]] | None = None) -> Any:
    """`known[name]()`, or the object at the import path `name`; `name` is the value of the configuration's `key`.

    A class is instantiated without arguments, unless the class itself can be called as a Protocol requires. Without
    Protocols, any callable is accepted.

    Raises ValueError for an unknown name (with the nearest known one), a module or file that cannot be imported, a
    missing attribute (with the nearest one), and an object that cannot be called as any of `protocols` requires.
    """
    known = known or {}
    if name in known:
        return known[name]()
    if name.startswith(GIVEN):
        if name not in _given:
            raise ValueError(
                f"{key} {name!r} is a function that Python code passed to miles_like.train, but this process has "
                "no function of that name: pass it again, or use an import path"
            )
        return _fitting(_given[name], protocols, label=f"{key} {name!r}")
    if ":" not in name:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        meant = f": did you mean {near[0]!r}? Known: {', '.join(known)}, {FORMS}" if near else f": expected {FORMS}"
        raise ValueError(f"unknown {key} {name!r}{meant}")
    where, _, attribute = name.rpartition(":")
    module = _module(where, label=f"{key} {name!r}")
    if not hasattr(module, attribute):
        public = [n for n, v in vars(module).items() if not n.startswith("_") and callable(v)]
        near = difflib.get_close_matches(attribute, public, n=1, cutoff=0.0)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{key} {name!r}: module {where} has no {attribute!r}{meant}")
    return _fitting(getattr(module, attribute), protocols, label=f"{key} {name!r}")


def misfit(found: Any, protocol: type) -> str | None:
    """Why `found` cannot be called with the arguments of `protocol.__call__`; None: it can."""
    if not callable(found):
        return f"it is {found!r}, which is not callable"
    parameters = list(inspect.signature(protocol.__call__).parameters.values())[1:]  # without self
    keywords = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    positional = [p.name for p in parameters if p.name not in keywords]
    try:
        inspect.signature(found).bind(*positional, **dict.fromkeys(keywords))
    except TypeError as e:
        call = ", ".join([*positional, *(f"{n}=" for n in keywords)])
        return f"it cannot be called as {protocol.__name__}({call}): {e}"
    except ValueError:
        return None  # written in C, without a signature to inspect
    return None


def _fitting(found: Any, protocols: tuple[type, ...], *, label: str) -> Any:
    """`found`, or an instance of it. Raises ValueError where it fits no Protocol."""
    if any(misfit(found, p) is None for p in protocols):
        return found
    if inspect.isclass(found):
        try:
            inspect.signature(found).bind()
        except TypeError as e:
            raise ValueError(
                f"{label} is a class that cannot be instantiated without arguments ({e}): give each argument a default"
            ) from e
        try:
            found = found()
        except Exception as e:  # as in _module
            raise ValueError(f"{label}: instantiating it raised {raised(e)}") from e
    if not callable(found):
        raise ValueError(f"{label} is {found!r}, which is not callable: specify a function, or a class with __call__")
    wrong = [misfit(found, p) for p in protocols]
    if protocols and None not in wrong:
        raise ValueError(f"{label}: {', nor: '.join(str(w) for w in wrong)}; see docs/extending.md")
    return found


def _module(where: str, *, label: str) -> ModuleType:
    try:
        return _of_file(Path(where).resolve()) if where.endswith(".py") else importlib.import_module(where)
    except FileNotFoundError as e:
        raise ValueError(
            f"{label}: file not found: {e.filename}; paths starting with ./ are relative to their configuration "
            "file, those of --set to the working directory"
        ) from e
    except SyntaxError as e:
        raise ValueError(f"{label}: {e.msg} ({e.filename}, line {e.lineno})") from e
    except ImportError as e:
        if where.endswith(".py"):
            raise ValueError(f"{label}: {e}") from e
        raise ValueError(
            f"{label}: {e}; install it or add it to PYTHONPATH, or use the path of its file: path/to/file.py:name"
        ) from e
    except (Exception, SystemExit) as e:  # the user's code may raise anything
        raise ValueError(f"{label}: importing {where} raised {raised(e)}") from e


@functools.cache
def _of_file(path: Path) -> ModuleType:
    """The file as a module, executed once. It is not in sys.modules, so pickles for another process (by cloudpickle,
    which Ray uses) contain its code, and the file need not exist there."""
    name = f"{path.stem}@{path}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "the name ends with .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for it there while the file runs
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call of the function, or of the object, returns a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
