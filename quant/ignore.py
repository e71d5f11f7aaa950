"""Translation of `QuantSpec.ignore` to and from the ignore lists of other loaders. Torch-free.

There are three pattern languages: regular expressions matched from the start of a name (compressed-tensors, "re:"),
shell patterns of the whole name (ModelOpt), and lists of names (FP8). Loaders of the last compare whole names or
substrings, each in a different way: only full module names have the same meaning in all.

Each list begins with the linears that are never quantized here. `QuantSpec.covers` does not need these entries, so they
are dropped on reading.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from quant.spec import FUSED, OTHER_TOWERS, QuantSpec

NEVER_RE = (
    "lm_head",
    r"re:.*\.mlp\.gate$",
    r"re:.*\.shared_expert_gate$",
    r"re:.*\.embed_tokens$",
    r"re:.*\.eh_proj$",
    r"re:.*\.shared_head\.head$",
    r"re:.*\.indexer\.\w+$",
    r"re:.*\.linear_attn\.\w+$",
    rf"re:(?:.*\.)?(?:{'|'.join(OTHER_TOWERS)})\..*$",
)
NEVER_GLOB = (
    "lm_head",
    "*.mlp.gate",  # loaders that search for substrings would find the bare name in mlp.gate_up_proj
    "*.shared_expert_gate",
    "*.eh_proj",
    "*.shared_head.head",
    "*.indexer.*",
    "*.linear_attn.*",
    *(f"{tower}.*" for tower in OTHER_TOWERS),
    *(f"*.{tower}.*" for tower in OTHER_TOWERS),
)
NEVER_NAME = ("lm_head",)

_ANYWHERE, _BELOW = r"(?:.*\.)?", r"(?:\..*)?$"
_WILD = re.compile(r"[*?[]")


def to_regex(patterns: Iterable[str]) -> list[str]:
    """The `ignore` of compressed-tensors."""
    return [*NEVER_RE, *(p for p in map(_regex_of, patterns) if p not in NEVER_RE)]


def from_regex(entries: Iterable[str]) -> tuple[str, ...]:
    """The inverse of `to_regex`. An entry without prefix is the full name of a module."""
    return tuple(_of_regex(e) for e in entries if e not in NEVER_RE)


def to_globs(spec: QuantSpec, names: Sequence[str]) -> list[str]:
    """The `ignore` of ModelOpt; arguments as in `to_names`."""
    if names:
        return [*NEVER_GLOB, *_ignored(spec, names)]
    globs: list[str] = []
    for p in spec.ignore:
        if p.startswith("glob:"):
            globs.append(p.removeprefix("glob:"))
        elif _WILD.search(p) or p.startswith("re:"):
            raise ValueError(_inexpressible(spec, p))
        else:
            globs += _globs_of(p.removesuffix(".weight"))
    return [*NEVER_GLOB, *(g for g in globs if g not in NEVER_GLOB)]


def from_globs(entries: Sequence[str]) -> tuple[str, ...]:
    """The inverse of `to_globs`. An entry without wildcards is a run of components: loaders search for it in names."""
    found: list[str] = []
    rest = [e for e in entries if e not in NEVER_GLOB]
    while rest:
        plain = rest[0].removeprefix("*.")
        ours = [g for g in _globs_of(plain) if g not in NEVER_GLOB]
        if rest[0] != plain and not _WILD.search(plain) and rest[: len(ours)] == ours:
            found.append(plain)
            rest = rest[len(ours) :]
        else:
            found.append(f"glob:{rest[0]}" if _WILD.search(rest[0]) else rest[0])
            rest = rest[1:]
    return tuple(found)


def to_names(spec: QuantSpec, names: Sequence[str]) -> list[str]:
    """The `modules_to_not_convert` of FP8: full module names, if `names` of the model's tensors are given.

    Without names the patterns are written unchanged: `from_names` reads them back, but other loaders may not understand
    them. Raises ValueError for a pattern that this language cannot express.
    """
    if names:
        ignored = _ignored(spec, names)
    else:
        ignored = [p for p in spec.ignore if p not in NEVER_NAME]
        for p in ignored:
            if p.startswith(("re:", "glob:")):
                raise ValueError(_inexpressible(spec, p))
    return [*NEVER_NAME, *ignored] if ignored else []


def from_names(entries: Iterable[str]) -> tuple[str, ...]:
    """The inverse of `to_names`: the entries without the linears that are never quantized here."""
    return tuple(e for e in entries if e not in NEVER_NAME)


def _ignored(spec: QuantSpec, names: Sequence[str]) -> list[str]:
    return [name.removesuffix(".weight") for name in names if spec.ignores(name)]


def _inexpressible(spec: QuantSpec, pattern: str) -> str:
    return (
        f"ignore = {pattern!r} cannot be written in a {spec.convention} quantization_config without the names of the "
        "model's tensors: write a run of components without wildcards, such as 'self_attn'"
    )


def _globs_of(plain: str) -> list[str]:
    """Shell patterns equivalent to the run of components, with the module that engines fuse it into.

    The bare run is included only where it can be a whole name, because loaders also search for it in names.
    """
    parent, dot, last = plain.rpartition(".")
    out = [f"*.{plain}", f"*.{plain}.*", f"{plain}.*"]
    if last in FUSED:
        out += [f"*.{parent}{dot}{FUSED[last]}"]
    return [*out, plain] if last.endswith("_proj") else out


def _regex_of(pattern: str) -> str:
    if pattern.startswith("re:"):
        return pattern
    if pattern.startswith("glob:"):
        return f"re:{_translate(pattern.removeprefix('glob:'), '.')}$"
    return f"re:{_ANYWHERE}{_translate(pattern.removesuffix('.weight'), '[^.]')}{_BELOW}"


def _of_regex(entry: str) -> str:
    if not entry.startswith("re:"):
        return f"re:{re.escape(entry)}$"
    middle = entry.removeprefix("re:" + _ANYWHERE).removesuffix(_BELOW)
    wild = middle.replace("[^.]*", "*").replace("[^.]", "?").replace("[^.", "[!")
    plain = re.sub(r"\\(.)", r"\1", wild)
    return plain if _regex_of(plain) == entry else entry


def _translate(pattern: str, any_character: str) -> str:
    """Converts a shell pattern to a regular expression; `any_character` is the translation of `?`."""
    out, i = "", 0
    while i < len(pattern):
        c, i = pattern[i], i + 1
        close = pattern.find("]", i + 1) if c == "[" else -1
        if c in "*?":
            out += any_character + ("*" if c == "*" else "")
        elif close >= 0:
            inside = re.sub(r"([\\^\[])", r"\\\1", pattern[i:close])
            out += f"[{'^.' + inside[1:] if inside[0] == '!' else inside}]"
            i = close + 1
        else:
            out += re.escape(c)
    return out
