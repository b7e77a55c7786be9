"""Errors that a client gets, in OpenAI's format."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any


class Refused(Exception):
    """Error that a client gets instead of an answer.

    Args:
        param: name of the invalid field, if there is one.
        code: OpenAI's error code, if there is one.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code, self.headers = message, param, status, code, headers

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's format."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def shown(value: Any) -> str:
    """Format a value for a message, in at most 100 characters."""
    text = reprlib.repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def invalid(name: str, value: Any, what: str) -> Refused:
    """Return the error for a field with an invalid value."""
    return Refused(f"{name}={shown(value)} is not {what}.", name)
