"""A user's own function or class by where it is: `package.module:name`, or `path/to/file.py:name`.

One loader for rewards, advantages, losses, filters, environments and generate functions. What it finds is held to a
Protocol of miles_like/protocols.py before anything is started: that it can be called as it will be called.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from miles_like.user_errors import raised

FORMS = "package.module:name or path/to/file.py:name"


def load(name: str, *protocols: type, key: str, known: Mapping[str, Callable[[], Any]] | None = None) -> Any:
    """What `name`, the value of the configuration's `key`, stands for: `known[name]()`, or what is at an import path.

    A class is made an instance, without arguments, unless the class itself can be called as a Protocol asks. Without
    Protocols whatever can be called will do.

    Raises ValueError with one sentence for a name that is not known (with the nearest that is), a module or file that
    cannot be imported, an attribute that is missing (with the nearest), and for what cannot be called as any of
    `protocols` is.
    """
    known = known or {}
    if name in known:
        return known[name]()
    if ":" not in name:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        meant = f": did you mean {near[0]!r}? Known: {', '.join(known)}, {FORMS}" if near else f": want {FORMS}"
        raise ValueError(f"unknown {key} {name!r}{meant}")
    where, _, attribute = name.rpartition(":")
    module = _module(where, said=f"{key} {name!r}")
    if not hasattr(module, attribute):
        public = [n for n, v in vars(module).items() if not n.startswith("_") and callable(v)]
        near = difflib.get_close_matches(attribute, public, n=1, cutoff=0.0)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{key} {name!r}: module {where} has no {attribute!r}{meant}")
    return _fitting(getattr(module, attribute), protocols, said=f"{key} {name!r}")


def misfit(found: Any, protocol: type) -> str | None:
    """Why `found` cannot be called as `protocol.__call__` is; None: it can."""
    if not callable(found):
        return f"it is {found!r}, which cannot be called"
    asked = list(inspect.signature(protocol.__call__).parameters.values())[1:]  # without self
    named = [p.name for p in asked if p.kind is inspect.Parameter.KEYWORD_ONLY]
    placed = [p.name for p in asked if p.name not in named]
    try:
        inspect.signature(found).bind(*placed, **dict.fromkeys(named))
    except TypeError as e:
        return f"it cannot be called as {protocol.__name__}({', '.join([*placed, *(f'{n}=' for n in named)])}): {e}"
    except ValueError:
        return None  # written in C, without a signature to look at
    return None


def _fitting(found: Any, protocols: tuple[type, ...], *, said: str) -> Any:
    """`found`, or an instance of it. Raises ValueError for what fits no Protocol."""
    if any(misfit(found, p) is None for p in protocols):
        return found
    if inspect.isclass(found):
        try:
            inspect.signature(found).bind()
        except TypeError as e:
            raise ValueError(
                f"{said} is a class that cannot be made without arguments ({e}): give each a default"
            ) from e
        try:
            found = found()
        except Exception as e:  # as in _module
            raise ValueError(f"{said}: making one raised {raised(e)}") from e
    if not callable(found):
        raise ValueError(f"{said} is {found!r}, which cannot be called: name a function, or a class with __call__")
    wrong = [misfit(found, p) for p in protocols]
    if protocols and None not in wrong:
        raise ValueError(f"{said}: {', nor: '.join(str(w) for w in wrong)}; see docs/extending.md")
    return found


def _module(where: str, *, said: str) -> ModuleType:
    try:
        return _of_file(Path(where).resolve()) if where.endswith(".py") else importlib.import_module(where)
    except FileNotFoundError as e:
        raise ValueError(f"{said}: there is no file {e.filename}; a path starting with ./ is the config's") from e
    except SyntaxError as e:
        raise ValueError(f"{said}: {e.msg} ({e.filename}, line {e.lineno})") from e
    except ImportError as e:
        if where.endswith(".py"):
            raise ValueError(f"{said}: {e}") from e
        raise ValueError(
            f"{said}: {e}; check that it can be imported from here, or name its file: path/to/file.py:name"
        ) from e
    except (Exception, SystemExit) as e:  # the user's code: whatever it raises, say which it was
        raise ValueError(f"{said}: importing {where} raised {raised(e)}") from e


@functools.cache
def _of_file(path: Path) -> ModuleType:
    """The file as a module, run once. It is no module that others can import by name, so what is pickled for another
    process (cloudpickle, which Ray uses) takes its code along and needs no path there."""
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
