"""Laws of streamed text: it never takes back, never has a part of a character or of a stop string, and does not depend
on how the text is divided into tokens.

Why it must hold: clients act on what was streamed, and a stop string ends an agent's turn. The oracle is the
tokenizer's own decoding of all tokens, and a search of the whole text character by character. Not covered: decoders
other than byte-level, byte-fallback and plain ones.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from miles_like.types import Finish
from rollout.embedded.engine.requests import SampledToken
from rollout.embedded.openai.detokenize import Vocabulary
from rollout.embedded.openai.sample_text import SampleText
from rollout.embedded.openai.stops import StopScanner

MERGES = [("Ã", "©"), ("Ġ", "a"), ("b", "Ġa"), ("ð", "Ł")]  # é; the first half of an emoji
ALPHABET = "ab é€😀\ufffd"
TEXTS = st.text(ALPHABET, max_size=24)
MORE = [bytes([first, *[0x80] * n]) for first in (0x80, 0x90, 0xA0) for n in range(3)]  # ends of characters
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3)


@cache
def byte_level() -> Vocabulary:
    """All bytes, some merges, a special and an added token."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in MERGES)]
    tokenizer = Tokenizer(models.BPE({n: i for i, n in enumerate(names)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<｜end｜>"])
    tokenizer.add_tokens([AddedToken("<tool call>"), AddedToken("é<x>")])
    return Vocabulary(tokenizer)


@cache
def byte_fallback() -> Vocabulary:
    """As Llama 2's: whole characters, and bytes for the others."""
    names = [*(f"<0x{i:02X}>" for i in range(256)), "a", "b", "▁", "é", "▁a"]
    tokenizer = Tokenizer(models.BPE({n: i for i, n in enumerate(names)}, [("▁", "a")], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<s>"])
    return Vocabulary(tokenizer)


@cache
def plain() -> Vocabulary:
    """As configs/tiny's."""
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(ALPHABET)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    return Vocabulary(tokenizer)


def whole(vocabulary: Vocabulary, tokens: list[int]) -> str:
    return str(vocabulary.tokenizer.decode(tokens, skip_special_tokens=True))


def token_ids(text: str, make: object) -> list[int]:
    """Tokens of the bytes or characters of a text."""
    tokenizer = make().tokenizer  # type: ignore[operator]
    if make is byte_level:
        return list(tokenizer.encode(text).ids)
    if make is byte_fallback:
        ids = []
        for c in text.replace(" ", "▁"):
            own = tokenizer.token_to_id(c)
            ids += [own] if own is not None else list(c.encode())
        return ids
    return [tokenizer.token_to_id(c) for c in text]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 262), max_size=24))
@example(list("é".encode()))
@example([byte_level().tokenizer.token_to_id(t) for t in ("é<x>", "Ã", "<｜end｜>", "©", "ð")])
def test_any_tokens_of_a_byte_level_tokenizer_stream_as_it_decodes_them(tokens: list[int]) -> None:
    """Except for an unfinished character at the end, for which the tokenizer writes U+FFFD."""
    vocabulary = byte_level()
    detokenizer, text = vocabulary.detokenizer(), whole(vocabulary, tokens)
    pieces = [detokenizer.push(t) for t in tokens]
    for so_far in accumulate(pieces):
        assert text.startswith(so_far)
    streamed = "".join(pieces) + detokenizer.finish()
    assert text in (streamed, streamed + "\ufffd")
    data = b"".join(vocabulary.bytes_of(t) for t in tokens if t not in vocabulary.hidden)
    unfinished = [n for n in (1, 2, 3) if any(_is_whole(data[-n:] + more) for more in MORE)]
    assert (text != streamed) == bool(unfinished and data)


def _is_whole(data: bytes) -> bool:
    try:
        return len(data) > 1 and len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("make", [byte_level, byte_fallback, plain])
@settings(max_examples=60, deadline=None)
@given(text=TEXTS, cut=st.integers(0, 80))
def test_a_text_streams_in_whole_characters_wherever_it_is_cut(make: object, text: str, cut: int) -> None:
    vocabulary: Vocabulary = make()  # type: ignore[operator]
    ids = token_ids(text, make)[: cut or None]
    detokenizer, got = vocabulary.detokenizer(), ""
    for t in ids:
        got += detokenizer.push(t)
        assert text.startswith(got)
    got += detokenizer.finish()
    assert text.startswith(got.rstrip("\ufffd")) and len(got.rstrip("\ufffd")) <= len(text)
    if cut == 0 or cut >= len(token_ids(text, make)):
        assert got == (text if make is byte_level else text.rstrip("\ufffd") if text.endswith("\ufffd") else text)


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """(end, start) of the stop string that is complete first, the longest of those; character by character."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return end, min(starts)
    return None


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.text("ab#", max_size=4), max_size=10),
    stops=st.lists(st.text("ab#", min_size=1, max_size=4), max_size=3),
)
@example(pieces=["a", "b", "c"], stops=["abd", "b"])
@example(pieces=["##", "#"], stops=["###", "#a"])
def test_a_text_ends_at_the_first_stop_string_however_it_is_divided(pieces: list[str], stops: list[str]) -> None:
    text, scanner, got = "".join(pieces), StopScanner(stops), ""
    found = first_stop(text, stops)
    for piece in pieces:
        got += scanner.push(piece)
        assert text.startswith(got) and (found is None or len(got) <= found[1])
        if scanner.matched is not None:
            break
        rest = text[len(got) :]
        open_ = [s for s in stops if s.startswith(scanner._held) and scanner._held]
        assert not scanner._held or (open_ and rest.startswith(scanner._held)), "held back without a reason"
    if found is None:
        assert scanner.matched is None and got + scanner.flush() == text
    else:
        assert scanner.matched == text[found[1] : found[0]] and got == text[: found[1]]


@pytest.mark.parametrize("make", [byte_level, byte_fallback, plain])
@settings(max_examples=60, deadline=None)
@given(text=TEXTS, stops=STOPS, limit=st.integers(1, 60), eos=st.booleans())
def test_a_sample_is_its_text_up_to_the_stop_string(
    make: object, text: str, stops: list[str], limit: int, eos: bool
) -> None:
    """It ends with the token that completes the stop string, which the tokenizer alone decides, and its tokens are
    those that the text is made of."""
    vocabulary: Vocabulary = make()  # type: ignore[operator]
    ids = token_ids(text, make)[:limit]
    if not ids:
        return
    sample, pieces = SampleText(vocabulary, stops), []
    for i, t in enumerate(ids):
        last = i == len(ids) - 1
        finish = (Finish.STOP if eos else Finish.LENGTH) if last else None
        pieces.append(sample.push(SampledToken(t, -1.0, (), finish)))
        if sample.finish is not None:
            break
    fed = ids[: sample.tokens]
    text_ids = fed[:-1] if eos and len(fed) == len(ids) else fed
    before, text_of = vocabulary.detokenizer(), vocabulary.detokenizer()
    assert first_stop("".join(before.push(t) for t in fed[:-1]), stops) is None, "a token too many"
    plain_text = "".join(text_of.push(t) for t in text_ids) + text_of.finish()
    found = first_stop(plain_text, stops)
    got = "".join(p.text for p in pieces)
    assert got == (plain_text if found is None else plain_text[: found[1]])
    assert [p.finish for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish == ("stop" if found is not None or eos else "length")
    of_text = [t.sampled.id for p in pieces for t in p.tokens]
    assert of_text == text_ids[: len(of_text)] and (found is not None or of_text == text_ids)
    starts = [t.start for p in pieces for t in p.tokens]
    assert starts == sorted(starts) and all(s <= len(got) for s in starts)


def test_tokens_of_tool_calls_are_no_text() -> None:
    """Whether the mark of the calls comes in one piece or in several, and where it never comes whole."""
    vocabulary = byte_level()

    def texts(text: str, begin: str = "<a>") -> tuple[str, str]:
        sample, ids = SampleText(vocabulary, calls_begin=begin), vocabulary.tokenizer.encode(text).ids
        pieces = [sample.push(SampledToken(t, 0.0, (), None)) for t in ids] + [sample.end("length")]
        return "".join(p.text for p in pieces), pieces[-1].calls

    assert texts("b<a>ab") == ("b", "<a>ab")
    assert texts("<a><a>") == ("", "<a><a>")
    assert texts("b<a") == ("b<a", "")
