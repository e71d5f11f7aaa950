"""Text of a sample, token by token, in whole characters.

A character of UTF-8 has up to four bytes, which may come in several tokens: text is passed on once all of them are
there. What `push` returned is a beginning of what the tokenizer decodes of all tokens, whatever follows.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection
from typing import Protocol

from tokenizers import Tokenizer, decoders

_UNDECODED = "\ufffd"
# A decoder that turns bytes into characters writes one U+FFFD for each byte of an unfinished character, three at most;
# more tokens than this without text are bytes of no character.
_PENDING = 16


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte, of byte-level tokenizers (`bytes_to_unicode` of GPT-2's encoder.py): printable bytes of
    Latin-1 stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


class Detokenizer(Protocol):
    """The text of one sample."""

    def push(self, token: int) -> str:
        """The characters that are whole with this token and were not before."""

    def finish(self) -> str:
        """What is left of whole characters when no token follows; the bytes of an unfinished one are dropped."""


class Vocabulary:
    """A tokenizer's tokens as text and bytes."""

    def __init__(self, tokenizer: Tokenizer, *, shown: Collection[str] = ()) -> None:
        """shown: special tokens that are part of the text nevertheless."""
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special = {t.content: i for i, t in added.items() if t.special}
        self.hidden = frozenset(i for content, i in self.special.items() if content not in shown)
        self._shown = len(self.hidden) < len(self.special)
        self.byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)

    def bytes_of(self, token: int) -> bytes:
        """Of a token alone; special tokens have their name's."""
        piece = self.tokenizer.id_to_token(token) or ""
        if not self.byte_level:
            return (piece if token in self.special.values() else self.decode([token])).encode()
        try:
            return bytes(_BYTES[c] for c in piece)
        except KeyError:  # the name of an added token
            return piece.encode()

    def decode(self, tokens: list[int]) -> str:
        kept = [t for t in tokens if t not in self.hidden] if self._shown else tokens
        return str(self.tokenizer.decode(kept, skip_special_tokens=not self._shown))

    def detokenizer(self) -> Detokenizer:
        return ByteDetokenizer(self) if self.byte_level else WindowDetokenizer(self)


class ByteDetokenizer:
    """Of a byte-level tokenizer, whose tokens are bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return "" if token in self._vocabulary.hidden else self._decoder.decode(self._vocabulary.bytes_of(token))

    def finish(self) -> str:
        return ""


class WindowDetokenizer:
    """Of any other tokenizer: decodes the last tokens with and without the new ones, for a token's text depends on the
    tokens before it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokens: list[int] = []  # a window of whole characters, then those since
        self._whole = 0  # tokens of the window's first part, whose text was passed on
        self._passed = 0  # characters of that text

    def push(self, token: int) -> str:
        if token in self._vocabulary.hidden:
            return ""
        self._tokens.append(token)
        text = self._vocabulary.decode(self._tokens)
        pending = len(self._tokens) - self._whole
        if (text.endswith(_UNDECODED) and pending <= _PENDING) or len(text) <= self._passed:
            return ""
        new = text[self._passed :]
        self._tokens = self._tokens[self._whole :]
        self._whole, self._passed = len(self._tokens), len(self._vocabulary.decode(self._tokens))
        return new

    def finish(self) -> str:
        return self._vocabulary.decode(self._tokens)[self._passed :].rstrip(_UNDECODED)
