"""Error replies in OpenAI's shape, for its routes, and in SGLang's for all others."""

from __future__ import annotations

from http import HTTPStatus

import orjson

from rollout.wire import endpoints

_KINDS = {
    HTTPStatus.UNAUTHORIZED: ("authentication_error", "invalid_api_key"),
    HTTPStatus.FORBIDDEN: ("permission_error", None),
    HTTPStatus.INTERNAL_SERVER_ERROR: ("server_error", None),
    HTTPStatus.SERVICE_UNAVAILABLE: ("server_error", None),
}


class BadRequest(ValueError):
    """A request that cannot be served. parameter: the key at fault, None: not one alone."""

    def __init__(
        self,
        message: str,
        parameter: str | None = None,
        *,
        status: int = HTTPStatus.BAD_REQUEST,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.parameter, self.status, self.code = parameter, status, code


def error_json(message: str, status: int, path: str) -> bytes:
    """The body of an error reply at `path`."""
    if path.startswith(endpoints.OPENAI):
        kind, code = _KINDS.get(HTTPStatus(status), ("invalid_request_error", None))
        return openai_error(message, kind=kind, code=code)
    return orjson.dumps({"error": {"message": message}})


def openai_error(
    message: str, *, kind: str = "invalid_request_error", parameter: str | None = None, code: str | None = None
) -> bytes:
    return orjson.dumps({"error": {"message": message, "type": kind, "param": parameter, "code": code}})
