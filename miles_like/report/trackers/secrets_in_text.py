"""Keeps the values of secret environment variables out of what is written."""

from __future__ import annotations

import re
from collections.abc import Mapping

from miles_like.variables import is_secret

_SHORTEST = 6  # characters; a shorter value occurs in other words
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """`text` with `***` in place of the values of the environment's secrets, and of users and passwords in URLs."""
    for name, value in environment.items():
        if is_secret(name) and len(value) >= _SHORTEST:
            text = text.replace(value, "***")
    return _USER_INFO.sub("***", text)
