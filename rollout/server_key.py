"""The secrets that rollout servers require, made once per run and sent as `Authorization: Bearer`.

As in stock SGLang 0.5.23 there are two: one for sampling and queries, one for every endpoint that changes the server.
They are passed by the environment or in a file of mode 0600, never on a command line, which every user of the machine
can read. SGLang reports both to a client that has the first (/server_info repeats its command line), so on a stock
server the first grants as much as the second.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollout.wire import endpoints

VARIABLE = "MILES_LIKE_SERVER_KEY"
# with OpenAI's; all other endpoints take SGLang's second key (`auth_level` in its http_server.py)
_SAMPLING = frozenset({endpoints.GENERATE, endpoints.MODEL_INFO, endpoints.SERVER_INFO})
_SHAPE = re.compile(r"[\x21-\x7e]{16,512}")


def is_sampling(endpoint: str) -> bool:
    """Whether a path, which may end with a query, takes the key for sampling and queries; otherwise that for
    control."""
    path = endpoint.partition("?")[0]
    return path in _SAMPLING or path.startswith(endpoints.OPENAI)


@dataclass(frozen=True, slots=True)
class ServerKey:
    """`repr` shows neither secret."""

    sampling: str = field(repr=False)
    control: str = field(repr=False)

    @classmethod
    def new(cls) -> ServerKey:
        return cls(secrets.token_hex(32), secrets.token_hex(32))

    @classmethod
    def parse(cls, text: str, source: str) -> ServerKey:
        """Parse `KEY` or `KEY CONTROL_KEY`, separated by white space; a single key is used for both. Raises ValueError
        naming `source` otherwise."""
        words = text.split()
        if len(words) not in (1, 2) or not all(_SHAPE.fullmatch(w) for w in words):
            raise ValueError(
                f"{source} contains no server key: use one secret, or two separated by a space (for sampling, for "
                "control), each of 16 to 512 printable ASCII characters, for example from `openssl rand -hex 32`"
            )
        return cls(words[0], words[-1])

    @property
    def text(self) -> str:
        """The form that `parse` reads."""
        return f"{self.sampling} {self.control}"

    def headers(self, endpoint: str) -> dict[str, str]:
        """The authorization header of a request to this path, which may end with a query."""
        return {"authorization": f"Bearer {self._of(endpoint)}"}

    def admits(self, endpoint: str, authorization: bytes) -> bool:
        """Whether this header value grants access to the path. The comparison takes constant time."""
        scheme, _, token = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._of(endpoint).encode())

    def _of(self, endpoint: str) -> str:
        return self.sampling if is_sampling(endpoint) else self.control

    def redact(self, output: bytes) -> bytes:
        """`output` with both secrets replaced."""
        for secret in {self.sampling, self.control}:
            output = output.replace(secret.encode(), b"<server key>")
        return output


def read_key(path: Path) -> ServerKey:
    """Raises ValueError for a file that is missing, that other users can read, or that holds no key."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"key file {path} is not a regular file: write the key into a regular file")
        if found.st_mode & 0o077:
            raise ValueError(
                f"key file {path} can be read by other users (mode {found.st_mode & 511:o}): run chmod 600 {path}"
            )
        text = path.read_bytes()[:4096].decode("ascii", "replace")
    except OSError as e:
        raise ValueError(f"key file {path}: {e.strerror}") from None
    return ServerKey.parse(text, f"key file {path}")


def given_key(path: Path | None) -> ServerKey | None:
    """The key of a server that this run did not start: from the file, else from the environment variable
    MILES_LIKE_SERVER_KEY, else None. Raises ValueError as `read_key` does."""
    return read_key(path) if path is not None else inherited_key()


def inherited_key() -> ServerKey | None:
    """Remove the key from the environment and return it, so that no child process inherits it."""
    text = os.environ.pop(VARIABLE, None)
    return None if text is None else ServerKey.parse(text, f"the environment variable {VARIABLE}")


def environment_with(key: ServerKey | None) -> Mapping[str, str]:
    """This process's environment with `key` as the server key, or with none."""
    plain = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return plain if key is None else plain | {VARIABLE: key.text}


def sglang_key_file(key: ServerKey) -> Path:
    """Write a file for stock SGLang's `--config`, of mode 0600. It is in the system's temporary directory because the
    run directory outlives the run."""
    fd, name = tempfile.mkstemp(prefix="miles-like-", suffix=".yaml")  # 0600; SGLang takes no other suffix
    with os.fdopen(fd, "w", encoding="ascii") as out:
        out.write(f'api-key: "{key.sampling}"\nadmin-api-key: "{key.control}"\n')
    return Path(name)
