"""Modules that are imported and never computed with: every name in them exists."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any


class _Anything(ModuleType):
    """A module, an attribute of one, or an attribute of that, as it is asked for."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        found = type(self)(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found

    def __bool__(self) -> bool:
        return False

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return (object,)  # as a base class

    def __getitem__(self, key: object) -> Any:
        return self  # as a generic type

    def __or__(self, other: object) -> Any:
        return self  # in an annotation

    __ror__ = __or__


class Uncallable(_Anything):
    """Functions that are an error to call."""

    __version__ = "0"

    def __call__(self, *_: object, **__: object) -> Any:
        raise NotImplementedError(f"{self.__name__} is not there on this machine")


class Decorators(_Anything):
    """Functions that decorate, and hand back what they are given."""

    __version__ = "3.7.1"

    def __call__(self, *given: Any, **named: Any) -> Any:
        if len(given) == 1 and callable(given[0]) and not named:
            return given[0]
        return lambda decorated: decorated

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(a // -b)

    @staticmethod
    def next_power_of_2(n: int) -> int:
        return 1 << (n - 1).bit_length() if n > 0 else 1


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, root: str, kind: type[_Anything]) -> None:
        self._root, self._kind = root, kind

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != self._root:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._kind(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def stand_in(root: str, kind: type[_Anything]) -> None:
    """For `root` and all below it, where it is not installed."""
    sys.meta_path.append(_Finder(root, kind))
