"""Reads the commands of a launch script without running it: variables, arrays, arithmetic, continued lines.

Branches and loops are read as if all their lines ran once, in order. What only a running shell knows (the output of a
command, a variable that the script does not set, except HOME and PWD) stays as it is written: `$(nproc)`, `${DATA}`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

UNRESOLVED = re.compile(r"\$\(|\$\{?\w")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_BREAKS = "\n;&|()"
_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_LARGEST = 1 << 63
LONGEST = 1 << 20  # characters of a script


def read_commands(text: str) -> list[list[str]]:
    """The words of each command, without assignments. Raises ValueError for a quote or bracket that is not closed, and
    for a text of more than `LONGEST` characters."""
    if len(text) > LONGEST:
        raise ValueError(f"a script of {len(text):,} characters, more than {LONGEST:,}")
    scanner = _Scanner(text)
    scanner.read()
    return scanner.commands


@dataclass
class _Scanner:
    text: str
    at: int = 0
    commands: list[list[str]] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[str]] = field(default_factory=dict)
    _splits: bool = False

    def read(self) -> None:
        words: list[str] = []
        while self.at < len(self.text):
            c = self.text[self.at]
            if c in _BREAKS:
                self.at += 1
                self._end(words)
                words = []
            elif not self._skip_blank():
                found = self._word()
                if not (set(words) <= {"export", "local", "declare", "readonly"} and self._assigned(found)):
                    words += found
        self._end(words)

    def _end(self, words: list[str]) -> None:
        if words:
            self.commands.append(words)

    def _skip_blank(self, blank: str = " \t\r") -> bool:
        """Past blanks, continued lines and a comment; whether there was any."""
        start = self.at
        while self.at < len(self.text):
            if self.text[self.at] in blank:
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                break
        return self.at > start

    def _assigned(self, words: list[str]) -> bool:
        """Whether the word is `NAME=value` or the beginning of `NAME=( ... )`; the value is kept."""
        found = _ASSIGNED.match(words[0]) if len(words) == 1 else None
        if found is None:
            return False
        name, more, value = found[1], bool(found[2]), words[0][found.end() :]
        if not value and self.text[self.at : self.at + 1] == "(":
            self.at += 1
            items = self._array()
            self.arrays[name] = [*self.arrays.get(name, []), *items] if more else items
        else:
            self.variables[name] = self.variables.get(name, "") + value if more else value
        return True

    def _array(self) -> list[str]:
        items: list[str] = []
        while True:
            self._skip_blank(" \t\r\n")
            if self.at >= len(self.text):
                raise ValueError("an array '(' is not closed")
            if self.text[self.at] == ")":
                self.at += 1
                return items
            if self.text[self.at] in _BREAKS:
                self.at += 1
            else:
                items += self._word()

    def _word(self) -> list[str]:
        """One word, or those that an array or the blanks of a variable make of it."""
        words, quoted = [""], False
        while self.at < len(self.text) and (c := self.text[self.at]) not in " \t\r" + _BREAKS:
            if c == "'":
                words[-1] += self._until("'")
                quoted = True
            elif c == '"':
                _extend(words, self._quoted())
                quoted = True
            elif c == "\\":
                words[-1] += self.text[self.at + 1 : self.at + 2].replace("\n", "")
                self.at += 2
            elif c == "$":
                found = self._expanded()
                if self._splits and not _ASSIGNED.match(words[0]):
                    found = [piece for one in found for piece in ([one] if UNRESOLVED.search(one) else one.split())]
                _extend(words, found)
                quoted = quoted or not self._splits
            else:
                words[-1], self.at = words[-1] + c, self.at + 1
        return words if quoted or words != [""] else []

    def _until(self, end: str) -> str:
        close = self.text.find(end, self.at + 1)
        if close < 0:
            raise ValueError(f"a quote {end} is not closed")
        text, self.at = self.text[self.at + 1 : close], close + 1
        return text

    def _quoted(self) -> list[str]:
        words = [""]
        self.at += 1
        while self.at < len(self.text) and (c := self.text[self.at]) != '"':
            if c == "\\":
                escaped = self.text[self.at + 1 : self.at + 2]
                words[-1] += "" if escaped == "\n" else escaped if escaped in '$`"\\' else f"\\{escaped}"
                self.at += 2
            elif c == "$":
                _extend(words, self._expanded())
            else:
                words[-1], self.at = words[-1] + c, self.at + 1
        if self.at >= len(self.text):
            raise ValueError('a quote " is not closed')
        self.at += 1
        return words

    def _expanded(self) -> list[str]:
        """What stands for `$...` here: one text, or the items of an array. `_splits` is then whether blanks in it
        separate words."""
        text, start = self.text, self.at
        self._splits = not text.startswith("$(", start)
        if text.startswith("$((", start):
            inner = self._bracketed(start + 1, "(", ")")
            return [self._arithmetic(inner[1:-1])]
        if text.startswith("$(", start):
            return [f"$({self._bracketed(start + 1, '(', ')')})"]
        if text.startswith("${", start):
            return self._variable(self._bracketed(start + 1, "{", "}"))
        if (name := _NAME.match(text, start + 1)) is not None:
            self.at = name.end()
            return [self._value(name[0], f"${{{name[0]}}}")]
        self.at += 1
        return ["$"]

    def _bracketed(self, at: int, opening: str, closing: str) -> str:
        """The text between the bracket at `at` and its counterpart, and moves past it."""
        depth = 0
        for i in range(at, len(self.text)):
            depth += (self.text[i] == opening) - (self.text[i] == closing)
            if not depth:
                self.at = i + 1
                return self.text[at + 1 : i]
        raise ValueError(f"a bracket {opening} is not closed")

    def _variable(self, inner: str) -> list[str]:
        name = _NAME.match(inner)
        if name is None:
            return [f"${{{inner}}}"]
        rest = inner[name.end() :]
        if rest in ("[@]", "[*]"):
            return self.arrays.get(name[0], [])
        if rest.startswith((":-", "-")):
            text = rest.removeprefix(":").removeprefix("-")
            default = _Scanner(text, variables=self.variables, arrays=self.arrays)
            return [self._value(name[0], " ".join(default._word()))]
        return [self._value(name[0], f"${{{inner}}}") if not rest else f"${{{inner}}}"]

    def _value(self, name: str, otherwise: str) -> str:
        if name in self.variables:
            return self.variables[name]
        return str(Path.home()) if name == "HOME" else str(Path.cwd()) if name == "PWD" else otherwise

    def _arithmetic(self, text: str) -> str:
        """The value of an expression of integers and variables, or the expression as it is written."""
        expanded = _NAME.sub(lambda m: self._value(m[0], m[0]), text.replace("$", "").replace("{", "").replace("}", ""))
        try:
            return str(_evaluated(ast.parse(expanded.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return f"$(({text}))"


def _extend(words: list[str], more: list[str]) -> None:
    """Append to the last word the first of `more`, and the others as words."""
    if more:
        words[-1] += more[0]
        words += more[1:]


def _evaluated(node: ast.expr) -> int:
    """Raises ValueError for anything but integers of at most 64 bits, + - * / and %."""
    match node:
        case ast.Constant(value=int(value)):
            result = value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            result = _OPERATIONS[type(op)](_evaluated(left), _evaluated(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_evaluated(operand)
        case _:
            raise ValueError("no arithmetic")
    if not -_LARGEST <= result < _LARGEST:
        raise ValueError("more than 64 bits")
    return result
