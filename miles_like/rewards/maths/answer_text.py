"""Reads answers from text: the exact value of numbers, and the part of a response that is its answer.

Responses are untrusted, so every pattern here takes time linear in the text. The module imports only the standard
library, because the math worker (math_worker.py) uses it without torch.
"""

from __future__ import annotations

import re
from fractions import Fraction

MARK = "####"  # GSM8K's mark before the answer
MOST_DIGITS, MOST_POWER = 4000, 400  # digits and power of ten of a number: arithmetic on longer ones would be slow
MOST_CHARS = 4000  # of an answer in tags or after the mark

_SIGNS = str.maketrans({"\u2212": "-", "\ufe63": "-", "\uff0d": "-", "\uff0b": "+"})
_LATEX_SIGNS = {"\u2264": r"\le ", "\u2265": r"\ge ", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u221e": r"\infty "}
# a thousands separator: LaTeX's thin spaces, a comma with a negative one, a comma in braces, thin and fixed spaces
_THOUSANDS = re.compile(
    r"(?<=[0-9])(?:\\[,;:! ]|,\\!|\\!,|\{,\}|\\thinspace ?|[\u2009\u202f\u00a0])(?=[0-9]{3}(?![0-9]))"
)
_MONEY = r"(?:(?:US)?\\?\$|[\u20ac\u00a3\u00a5])"
_UNIT = r"(?:dollars?|cents?|USD|EUR|euros?)"
_DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_REPEATING = re.compile(r"(?<![0-9.])([+-]?)([0-9]*)\.([0-9]*)\\(?:overline|bar|dot) ?(?:\{([0-9]+)\}|([0-9]))")
_EXPONENT = re.compile(rf"(?<![\w.\\])(?<![0-9],)({_DECIMAL})[eE]([+-]?[0-9]{{1,3}})(?!\w|\.\w)")
_PLAIN = re.compile(rf"([+-]?)({_DECIMAL})(?:[eE]([+-]?[0-9]{{1,3}}))?")
_POWER = r"(?:\{([+-]?[0-9]{1,3})\}|([+-]?[0-9]{1,3}))"
_SCIENTIFIC = re.compile(rf"([+-]?)({_DECIMAL}) ?(?:\\times|\\cdot|\*|[\u00d7\u00b7]) ?10 ?\^ ?{_POWER}")
_WRAPPED = re.compile(rf"([+-]?) ?{_MONEY}? ?(.*?) ?{_MONEY}? ?{_UNIT}?\.?", re.DOTALL | re.IGNORECASE)
_BOX = "\\boxed{"
_TAGS = ("<answer>", "</answer>")
_OR = re.compile(r"\\text ?\{ ?or ?\}|\\(?:lor|vee)\b|(?<![\w\\])or(?![\w])", re.IGNORECASE)
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_WORD = re.compile(r"[A-Za-z]{3,}|(?<=[0-9] )[A-Za-z]{2}")
_NUMBER = re.compile(
    rf"(?:(?<![\w)])[+-])?{_MONEY}?(?:[0-9]*\.[0-9]*\\(?:overline|bar) ?\{{[0-9]+\}}"
    rf"|(?:{_DECIMAL})(?:[eE][+-]?[0-9]{{1,3}}(?!\w|\.\w))?)"
)
_GAP_OR = re.compile(r"[^\w.]*(?:[a-z]+[^\w.]+)?or(?:[^\w]+[a-z]+){0,2}[^\w]+", re.IGNORECASE)
_GAP_LIST = re.compile(r"[\s$]*(?:[,;&]|and)[\s$]*", re.IGNORECASE)
_VALUE = r"(?:[a-z] ?= ?)?\S*[0-9\\$]\S*"
_BEFORE_OR = re.compile(rf"({_VALUE}?)(?: [a-z]+)?[\s,(]*", re.IGNORECASE)
_AFTER_OR = re.compile(rf"\s+(?:(?:maybe|perhaps|possibly) )?({_VALUE})(?: [a-z]+)?\W*", re.IGNORECASE)
_EMPHASIS = re.compile(r"(\*\*|__|\*|`)(?! )([^*_`\n]+)(?<! )\1")


def plain_signs(text: str) -> str:
    """Replaces Unicode's minus and plus by ASCII's, and removes the thousands separators of LaTeX and typesetting."""
    return _THOUSANDS.sub("", text.translate(_SIGNS))


def number_of(text: str, *, decimal_only: bool = False) -> Fraction | None:
    """The exact value of a text that is one number: 18, -5, .5, 1,000, 1\\,000, 32,\\!348, 1e3, 1 \\times 10^{3},
    0.\\overline{3}, \\$18, US$18, $18$, 18 dollars, with an ASCII or a Unicode minus; None for any other text, and for
    more than 4,000 digits.

    decimal_only: no currency, exponent, repeating decimals or separators.
    """
    if len(text) > MOST_CHARS:
        return None
    if decimal_only:
        found = re.fullmatch(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)", text.translate(_SIGNS).strip())
        return _value(found[0], 0) if found else None
    wrapped = _WRAPPED.fullmatch(plain_signs(text).strip())
    sign, inner = (wrapped[1], wrapped[2].strip()) if wrapped else ("", "")
    if sign and inner[:1] in ("+", "-"):
        return None
    if repeating := _REPEATING.fullmatch(sign + inner):
        return _repeating(repeating)
    if not (plain := _PLAIN.fullmatch(sign + inner) or _SCIENTIFIC.fullmatch(sign + inner)):
        return None
    power = next((p for p in plain.groups()[2:] if p), 0)
    return _value(plain[1] + plain[2].replace(",", ""), int(power))


def _value(decimal: str, power: int) -> Fraction | None:
    if len(decimal) > MOST_DIGITS or abs(power) > MOST_POWER:
        return None
    return Fraction(decimal) * Fraction(10) ** power


def _repeating(found: re.Match[str]) -> Fraction | None:
    """0.1\\overline{6} is (16 - 1) / 90."""
    sign, whole, once, *ever = found.groups()
    again = ever[0] or ever[1]
    if len(whole + once + again) > MOST_DIGITS:
        return None
    all_, before = int((whole or "0") + once + again), int((whole or "0") + once)
    value = Fraction(all_ - before, (10 ** len(again) - 1) * 10 ** len(once))
    return -value if sign == "-" else value


def numbers_in(text: str) -> list[tuple[int, int, Fraction | None]]:
    """(start, end, value) of each number in the text; the value is None for more than MOST_DIGITS digits."""
    return [(m.start(), m.end(), number_of(m[0])) for m in _NUMBER.finditer(text)]


def last_number(text: str, *, first: bool) -> set[Fraction | None]:
    """The values of the text's answer, which is its last number, or with `first` its first: several for alternatives
    ("5 or 6", and with `first` also "5, 6"). Empty for a text without a number."""
    text = plain_signs(text)
    found = numbers_in(text)
    if not found:
        return set()
    chosen = [found[0] if first else found[-1]]
    for one in found[1:] if first else found[-2::-1]:
        left, right = (chosen[-1], one) if first else (one, chosen[-1])
        gap = text[left[1] : right[0]]
        if len(gap) > 40 or not (_GAP_OR.fullmatch(gap) or (first and _GAP_LIST.fullmatch(gap))):
            break
        chosen.append(one)
    return {value for _, _, value in chosen}


def last_alternatives(text: str) -> list[str]:
    """The values of a text that ends with "5 or 6" or "4 or 5 or 6", also across lines; empty for any other text."""
    *others, last = _OR.split(" ".join(text[-200:].split()))
    found = _AFTER_OR.fullmatch(last)
    values: list[re.Match[str] | None] = [found] if found else []
    while values and others:
        before = others.pop()
        between = _AFTER_OR.fullmatch(before) if others else None
        if between is None:
            ends = (_BEFORE_OR.fullmatch(before, m.start()) for m in re.finditer(r"\S+", before))
            values.append(next((e for e in ends if e), None))
            break
        values.append(between)
    found_values = [v[1].strip(",;.!?") for v in reversed(values) if v]
    found_values = [v.rstrip(")") if v.count(")") > v.count("(") else v for v in found_values]  # 5 (or 6)
    return [unemphasized(v) for v in found_values] if len(found_values) > 1 else []


def unemphasized(text: str) -> str:
    """Removes Markdown's signs that enclose the whole text: **72**, *72*, __72__ or `72`."""
    found = _EMPHASIS.fullmatch(text.strip())
    return found[2] if found else text


def in_tags(text: str) -> str | None:
    """The content of the last <answer>...</answer>; None without one."""
    end = text.rfind(_TAGS[1])
    start = text.rfind(_TAGS[0], 0, end) if end >= 0 else -1
    return text[start + len(_TAGS[0]) : end] if start >= 0 else None


def whole_answer(text: str) -> str:
    """The content of an <answer> tag at the response's end, else the whole response; stripped."""
    text = text.strip()
    found = in_tags(text) if text.endswith(_TAGS[1]) else None
    return text if found is None else found.strip()


def given(text: str) -> tuple[str, bool] | None:
    """The answer that a response marks: (the content of its last <answer> tag, False), or (the rest of the line after
    the last #### in that content, or in the response if it has no tag, True); None where it marks none."""
    tagged = in_tags(text)
    _, mark, after = (text if tagged is None else tagged).rpartition(MARK)
    if tagged is None and not mark:
        return None
    answer = (after.strip().splitlines() or [""])[0] if mark else after
    return answer.strip()[:MOST_CHARS], bool(mark)


def boxed(text: str) -> str | None:
    """The content of the last \\boxed{...}; None without one, or where another one is on its line."""
    start = text.rfind(_BOX)
    if start < 0 or _BOX in text[text.rfind("\n", 0, start) + 1 : start]:
        return None
    depth, begin = 0, start + len(_BOX)
    for at in range(begin, min(len(text), begin + MOST_CHARS)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth < 0:
            return text[begin:at].strip()
    return None


def alternatives(text: str) -> list[str]:
    """The parts of "5 or 6" and of "x=5 \\text{ or } x=6"; one part where there is no "or"."""
    parts = [part.strip(" \t\n,;").rstrip(".") for part in _OR.split(unemphasized(text))]
    parts[0] = re.sub(r"\A *either ", "", parts[0], flags=re.IGNORECASE)
    return [unemphasized(re.sub(r"\A(?:maybe|perhaps|possibly|even) ", "", part)) for part in parts if part]


def is_formula(text: str) -> bool:
    """Whether the text, without LaTeX commands, has no word (three letters, or two after a number and a blank)."""
    return not _WORD.search(_COMMAND.sub(" ", text))


def for_latex(text: str) -> str:
    """Rewrites numbers that LaTeX parsers misread (1e3, 0.\\overline{3}, 1\\,000, \\$18) in a form that they parse."""
    text = plain_signs(text).replace(r"\$", "").replace("US$", "$")
    for sign, command in _LATEX_SIGNS.items():
        text = text.replace(sign, command)
    return _EXPONENT.sub(_written_out, _REPEATING.sub(_as_fraction, text))


def for_prose(text: str) -> str:
    """Like `for_latex`, for text without formulas: a repeating decimal becomes p/q."""
    text = plain_signs(text).replace(r"\$", "").replace("US$", "$")
    return _EXPONENT.sub(_written_out, _REPEATING.sub(lambda m: _ratio(m, "{}/{}"), text))


def _as_fraction(found: re.Match[str]) -> str:
    return _ratio(found, r"\frac{{{}}}{{{}}}")


def _ratio(found: re.Match[str], form: str) -> str:
    value = _repeating(found)
    if value is None:
        return found[0]
    return ("-" if value < 0 else found[1]) + form.format(abs(value.numerator), value.denominator)


def _written_out(found: re.Match[str]) -> str:
    """1e3 becomes 1000, and 2.5e-3 becomes 0.0025."""
    value = _value(found[1].replace(",", ""), int(found[2]))
    if value is None:
        return found[0]
    # a finite decimal: its denominator divides a power of ten
    places = max(len(found[1].partition(".")[2]) - int(found[2]), 0)
    digits = str(value.numerator * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{digits[:-places]}.{digits[-places:]}" if places else digits
