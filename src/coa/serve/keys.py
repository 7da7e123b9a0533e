"""Who may ask: everybody who has the key, or, without one, this machine alone."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path

from coa.errors import UsageError
from coa.serve.refusals import Refused

KEY_VARIABLE = "COA_SERVE_KEY"


def read_key(path: Path | None) -> str:
    """The key from a file, or else from the environment; empty when there is none."""
    if path is None:
        return _sendable(os.environ.get(KEY_VARIABLE, "").strip(), KEY_VARIABLE)
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--key-file {path}: cannot be read ({type(error).__name__}).") from None
    if not key or len(key.splitlines()) > 1:
        raise UsageError(f"--key-file {path}: expected one line that is the key.")
    return _sendable(key, f"--key-file {path}")


def _sendable(key: str, where: str) -> str:
    """A key that clients can put into a header; others would lock everybody out."""
    if not (key.isascii() and key.isprintable()):
        raise UsageError(f"{where}: expected printable ASCII, as headers hold nothing else.")
    return key


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Lock:
    """Opens for a request that may come in.

    Without a key the names by which this machine calls itself are the only ones accepted, so that
    a page in a browser cannot reach the server under a name of its own.
    """

    def __init__(self, key: str) -> None:
        self._digest = _digest(key) if key else None

    def refuses(self, headers: Mapping[str, str]) -> Refused | None:
        """Why a request with these headers may not come in, if so."""
        if self._digest is None:
            if is_loopback(_without_port(headers.get("host", ""))):
                return None
            message = "this server has no key and is for this machine alone; use 127.0.0.1."
            return Refused(message, 403, code="host_not_allowed")
        kind, _, given = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(_digest(given.strip()), self._digest):
            return None
        message = "the key is missing or wrong; send it as Authorization: Bearer KEY."
        return Refused(message, 401, code="invalid_api_key")


def _digest(key: str) -> bytes:
    """Digests have one length, so that comparing them does not tell that of the key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _without_port(host: str) -> str:
    name, colon, _ = host.rpartition(":")
    return name if colon and not host.endswith("]") else host
