"""No function of the source is written twice, and none is there for tests alone.

Why it must hold: a fault that is repaired in one of two copies stays in the other, and code that only tests call is
read and kept for nothing. Bodies are compared without docstrings, annotations and the names of local variables. Not
covered: copies that differ in one expression; methods; a name that is read elsewhere for something else.
"""

from __future__ import annotations

import ast
import copy
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.support.sources import tree_of, walk

ROOT = Path(__file__).parents[1]
SOURCES = ("quant", "routing_replay", "rollout", "megatron_bridge", "miles_like", "scripts")
CALLERS = (*SOURCES, "benchmarks", "docs")
LENGTH = 400  # characters of a normalized body: from two statements on
TWICE = {  # by their names, why both are kept
    ("_moe_layers",): "trainer and rollout read config.json separately, and are compared with each other",
    ("combine",): "the exact operations are a specification, the plain ones what is fast",
    ("room", "drain"): "the simulation follows the loop without torch",
    ("_sum", "json_sha256"): "manifests of a conversion and of a run: formats on disk that change separately",
}


class _Locals(ast.NodeTransformer):
    """Numbers in place of the names of arguments and local variables."""

    def __init__(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        names = [n.arg for n in ast.walk(function) if isinstance(n, ast.arg)]
        names += [n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        self._numbers = {name: f"_{i}" for i, name in enumerate(dict.fromkeys(names))}

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self._numbers.get(node.id, node.id), ast.Load())

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(self._numbers[node.arg])


def kinds(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[type[ast.AST], ...]:
    """The kinds of a body's nodes, which functions with equal bodies share."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return tuple(type(node) for statement in body for node in walk(statement))


def normalized(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    rename = _Locals(function)
    return "\n".join(ast.dump(rename.visit(copy.deepcopy(statement))) for statement in body)


def modules(folders: tuple[str, ...]) -> dict[str, ast.Module]:
    paths = sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))
    return {".".join(p.relative_to(ROOT).with_suffix("").parts): tree_of(p) for p in paths}


def repeated(trees: dict[str, ast.Module]) -> dict[tuple[str, ...], list[str]]:
    """Names of functions with equal bodies -> their modules."""
    alike = defaultdict(list)  # by what costs less than the normalized body
    for module, tree in trees.items():
        for node in walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                alike[kinds(node)].append((node, module))
    found = defaultdict(list)
    for node, module in [place for places in alike.values() if len(places) > 1 for place in places]:
        if len(body := normalized(node)) >= LENGTH:
            found[body].append((node.name, module))
    several = [places for places in found.values() if len(places) > 1]
    return {tuple(sorted({name for name, _ in places})): [module for _, module in places] for places in several}


def test_no_function_is_written_twice() -> None:
    found = repeated(modules(SOURCES))
    kept = {name for names in TWICE for name in names}
    assert not {names: where for names, where in found.items() if not kept.issuperset(names)}
    assert kept == {name for names in found for name in names}, "an exception that nothing needs"


def test_a_copy_with_other_names_and_annotations_is_found() -> None:
    one = "def a(x: int) -> int:\n    '''Text.'''\n    rows = [n for n in range(x) if n % 2]\n    return sum(rows) + x"
    two = "def b(y):\n    found = [m for m in range(y) if m % 2]\n    return sum(found) + y"
    trees = {"m": ast.parse(one), "n": ast.parse(two), "o": ast.parse(two.replace("% 2", "% 3"))}
    assert repeated(trees) == {("a", "b"): ["m", "n"]}


def definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """A module's functions and classes without decorators that register them, and its constants."""
    for node in tree.body:
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            registered = any("command" in ast.unparse(decorator) for decorator in node.decorator_list)
            names = [] if registered else [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [t.id for t in targets if isinstance(t, ast.Name)]
        for name in names:
            yield name, node


def loads(tree: ast.AST) -> list[str]:
    """Names that are read, attributes, and imported names."""
    out = []
    for node in walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            out.append(node.id)
        elif isinstance(node, ast.Attribute):
            out.append(node.attr)
        elif isinstance(node, ast.ImportFrom):
            out += [alias.name for alias in node.names]
    return out


def uncalled(sources: dict[str, ast.Module], callers: dict[str, ast.Module], texts: str) -> list[str]:
    """module.name of what no module of `callers` reads, and no text names. A private name is its module's."""
    by_module = {module: Counter(loads(tree)) for module, tree in (callers | sources).items()}
    everywhere: Counter[str] = Counter()
    for module in callers:
        everywhere.update(by_module[module])
    out, words = [], set(re.findall(r"\w+", texts))
    for module, tree in sources.items():
        here = by_module[module]
        for name, node in definitions(tree):
            read = here if name.startswith("_") else everywhere
            if name.startswith("__") or name in words:
                continue
            # it reads itself at most, which the module's own reads bound
            if not read[name] or (read[name] <= here[name] and read[name] <= loads(node).count(name)):
                out.append(f"{module}.{name}")
    return out


def test_every_function_has_a_caller_outside_of_the_tests() -> None:
    pages = "".join(p.read_text() for p in [ROOT / "README.md", ROOT / "pyproject.toml", *(ROOT / "docs").glob("*.md")])
    assert not uncalled(modules(SOURCES), modules(CALLERS), pages)


def test_what_only_itself_calls_has_no_caller() -> None:
    tree = ast.parse("def a(n):\n    return n and a(n - 1)\n\nB = 1\n\ndef c():\n    return B\n")
    assert uncalled({"m": tree}, {"m": tree}, "") == ["m.a", "m.c"]
    assert uncalled({"m": tree}, {"m": tree, "n": ast.parse("from m import c")}, "Call `a`.") == []
