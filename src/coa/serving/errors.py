"""Refused: why a request gets no answer, in the words and the shape that OpenAI's clients expect.

    {"error": {"message": ..., "type": ..., "param": ..., "code": ...}}

Whose fault it is decides the status: 4xx is the client's, 503 the world's, 500 ours. What a client
reads never holds a path, a traceback or an address of this side; the log does.
"""

from __future__ import annotations

from coa.errors import CoaError
from coa.io.runs import Json

SHOWN = 60
"""Characters of a client's value that a message repeats."""


class Refused(CoaError):
    """A request that is answered with an error object."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.code, self.param = status, kind, code, param
        self.retry_after_s = retry_after_s

    def to_json(self) -> Json:
        body = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": body}

    def headers(self) -> dict[str, str]:
        made = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after_s is not None:
            made["Retry-After"] = str(self.retry_after_s)
        return made


def shown(value: object) -> str:
    """A client's value as a message repeats it: whole when it is short."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def unavailable(message: str, code: str, retry_after_s: int = 5) -> Refused:
    """The world's fault: it may work when it is tried again."""
    return Refused(message, 503, "server_error", code, retry_after_s=retry_after_s)


def our_fault() -> Refused:
    return Refused("the server made a mistake; its log says which.", 500, "server_error", "bug")
