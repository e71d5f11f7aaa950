"""Runs tests beside a program, inside a sandbox: the tests in one process, the program in another.

The program can neither read nor decide the verdict. Its process is forked before the tests arrive, answers calls with
plain data (`dump`), and ends with the tests. What it overrides (assert, unittest, __eq__, builtins) it overrides in its
own process; where it ends early or answers nothing, the tests that need it fail. The tests' process is not dumpable, so
that its memory and descriptors are closed to the program, and writes each verdict after a number that only it and the
caller know.

The source of this file is the program that the sandbox runs (standard library only); `dump` and `load` serve both
sides. Standard input is one JSON object: nonce, modules (names of the program's), tests (judging.py). Output, for each
test: `NONCE {"test": i, "value": ...}`, or `NONCE {"test": i, "of": n}` and n times `NONCE {"test": i, "name": ...,
"right": bool}`.
"""

from __future__ import annotations

import builtins
import collections
import ctypes
import decimal
import fractions
import importlib
import inspect
import json
import os
import socket
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

PR_SET_DUMPABLE = 4  # linux/prctl.h
MAPPINGS = (dict, collections.Counter, collections.OrderedDict, collections.defaultdict)
SEQUENCES: dict[str, Any] = {"l": list, "t": tuple, "s": set, "z": frozenset, "q": collections.deque}
_TAGS: dict[Any, str] = {of: tag for tag, of in SEQUENCES.items()}


def dump(value: Any) -> Any:
    """Plain data as JSON. Raises TypeError for a value of any other type, a subclass too: it may define its own
    equality."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in _TAGS:
        return {_TAGS[kind]: [dump(one) for one in value]}
    if kind in MAPPINGS:
        return {"d": [[dump(k), dump(v)] for k, v in value.items()]}
    if kind in (bytes, bytearray):
        return {"b": bytes(value).hex()}
    if kind is complex:
        return {"c": [value.real, value.imag]}
    if kind is fractions.Fraction:
        return {"f": [value.numerator, value.denominator]}
    if kind is decimal.Decimal:
        return {"m": str(value)}
    raise TypeError(f"a value of the type {kind.__name__}, which is no plain data")


def load(found: Any) -> Any:
    """The plain data of `dump`. Raises ValueError or TypeError for anything else."""
    if not isinstance(found, dict):
        if found is None or isinstance(found, bool | int | float | str):
            return found
        raise ValueError("a list without a tag")
    ((tag, inner),) = found.items()
    if tag in SEQUENCES:
        return SEQUENCES[tag](load(one) for one in inner)
    if tag == "d":
        return {load(k): load(v) for k, v in inner}
    if tag == "b":
        return bytes.fromhex(inner)
    if tag == "c":
        return complex(*inner)
    if tag == "f":
        return fractions.Fraction(*inner)
    if tag == "m":
        return decimal.Decimal(inner)
    raise ValueError(f"the tag {tag!r}")


# the program's process


def serve(end: socket.socket) -> NoReturn:
    """Import modules and call functions for the tests until they end."""
    lines = end.makefile("r", encoding="utf-8")
    for line in lines:
        try:
            answer = {"value": answered(json.loads(line))}
        except BaseException as e:
            answer = {"raised": [of.__name__ for of in type(e).__mro__], "text": str(e)[:500]}
        end.sendall(json.dumps(answer).encode() + b"\n")
    os._exit(0)


def answered(request: dict[str, Any]) -> Any:
    module = importlib.import_module(request["module"])
    if "call" in request:
        args, named = load(request["args"]), load(request["named"])
        return dump(getattr(module, request["call"])(*args, **named))
    public = {name: value for name, value in vars(module).items() if not name.startswith("__")}
    values = {}
    for name, value in public.items():
        try:
            values[name] = dump(value)
        except (TypeError, RecursionError):
            continue
    return {"calls": [name for name, value in public.items() if callable(value)], "values": values}


# the tests' process


class Program:
    """The other process, as the tests see it."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._lines = end, end.makefile("r", encoding="utf-8")

    def ask(self, **request: Any) -> Any:
        """Raises what the program raised, as the first type of its bases that is built in."""
        try:
            self._end.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(self._lines.readline())
        except (OSError, ValueError):
            raise RuntimeError("the program has ended") from None
        if "value" in answer:
            return answer["value"]
        known = (getattr(builtins, name, None) for name in answer["raised"])
        kind = next((k for k in known if isinstance(k, type) and issubclass(k, Exception)), RuntimeError)
        raise made(kind, answer["text"])

    def module(self, name: str) -> types.ModuleType:
        """A module whose functions call the program's. Names of builtins stay the tests': a program that defines `len`
        would decide what a test counts."""
        found, out = self.ask(module=name), types.ModuleType(name)
        for key, value in found["values"].items():
            if not hasattr(builtins, key):
                setattr(out, key, load(value))
        for key in found["calls"]:
            if not hasattr(builtins, key):
                setattr(out, key, self.function(name, key))
        return out

    def function(self, module: str, name: str) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            return load(self.ask(module=module, call=name, args=dump(args), named=dump(named)))

        call.__name__ = name
        return call


def made(kind: type[Exception], text: str) -> Exception:
    try:
        return kind(text)
    except TypeError:  # UnicodeDecodeError and others take more
        return RuntimeError(f"{kind.__name__}: {text}")


def finish(result: object) -> None:
    """Run what a test's call has only begun: an `async def` runs nothing before it is awaited."""
    if inspect.iscoroutine(result):
        import asyncio

        asyncio.run(result)
    elif inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise TypeError("a test that yields is not run")


def cases(entry: str, names: dict[str, Any], programs: dict[str, Any]) -> list[tuple[str, Callable[[], object]]]:
    """The tests that a source has defined in `names`: unittest's and pytest's, by how they are called, and HumanEval's
    `check`. What is the program's, as in `programs`, is no test."""
    out: list[tuple[str, Callable[[], object]]] = []
    own = {name: value for name, value in names.items() if value is not programs.get(name)}
    for name, value in own.items():
        if inspect.isfunction(value) and name.startswith("test"):
            out.append((name, value))
        elif inspect.isclass(value) and "unittest" in sys.modules:
            import unittest

            if issubclass(value, unittest.TestCase):
                methods = unittest.defaultTestLoader.getTestCaseNames(value)
                out += [(f"{name}.{method}", value(method).debug) for method in methods]
        elif inspect.isclass(value) and name.startswith("Test"):
            methods = [method for method in vars(value) if method.startswith("test")]
            out += [(f"{name}.{method}", getattr(value(), method)) for method in methods]
    if inspect.isfunction(own.get("check")) and entry:
        out.append(("check", lambda: names["check"](names[entry])))
    return out


class Tests:
    """nonce, modules, tests: of the request. say: writes a verdict."""

    def __init__(self, program: Program, request: dict[str, Any]) -> None:
        self._program, self._request = program, request
        self._names: dict[str, Any] | None = None

    def run(self) -> None:
        for i, test in enumerate(self._request["tests"]):
            try:
                if test["kind"] == "value":
                    code = compile(test["source"], "<test>", "eval")
                    self.say({"test": i, "value": dump(eval(code, self.names()))})
                else:
                    self.run_source(i, test["source"], test.get("entry", ""))
            except Exception as e:  # of the tests, or of the program in them
                self.say({"test": i, "name": "", "right": False, "why": f"{type(e).__name__}: {e}"[:300]})

    def run_source(self, i: int, source: str, entry: str) -> None:
        names = self.names()
        code = compile(source, "<test>", "exec")
        exec(code, names)
        found = cases(entry, names, self.names())
        self.say({"test": i, "of": max(len(found), 1)})
        if not found:
            self.say({"test": i, "name": "", "right": True})
        for name, function in found:
            why = ""
            try:
                finish(function())
            except Exception as e:
                why = f"{type(e).__name__}: {e}"[:300] or "failed"
            self.say({"test": i, "name": name, "right": not why, "why": why})

    def names(self) -> dict[str, Any]:
        """The names of a test: those of the program's modules."""
        if self._names is None:
            self._names = {"__name__": "tests"}
            for name in self._request["modules"]:
                module = self._program.module(name)
                sys.modules[name] = module
                self._names |= {k: v for k, v in vars(module).items() if not k.startswith("__")}
        return dict(self._names)

    def say(self, verdict: dict[str, Any]) -> None:
        os.write(1, f"{self._request['nonce']} {json.dumps(verdict)}\n".encode())


def main() -> None:
    work = os.getcwd()
    sys.path[:] = [path for path in sys.path if path not in ("", work)]  # a program may write unittest.py there
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0), os.dup2(null, 1)
        sys.path.insert(0, work)
        serve(theirs)
    theirs.close()
    with open(0, encoding="utf-8", closefd=False) as source:
        request = json.load(source)
    Tests(Program(ours), request).run()
    os._exit(0)


if __name__ == "__main__":
    main()
