"""Downloads that continue where they were cut, from wherever the user's pip would fetch.

pip knows the index, the proxy and the certificates of this machine, so it is asked where a wheel
is; the bytes are then read with HTTP ranges into a file that outlives a kill. Whatever cannot be
read that way (a folder of wheels, an index behind a login) is left to pip itself.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

Say = Callable[[str], None]
TRIES = 4


def locate(requirement: str) -> str | None:
    """The address from which pip would take the wheel; None when pip cannot or will not say."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    command += ["--no-deps", "--no-input", "--quiet", "--report", "-", requirement]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        address = json.loads(asked.stdout)["install"][0]["download_info"]["url"]
    except (ValueError, LookupError, TypeError):
        return None
    return address if isinstance(address, str) and address.startswith("http") else None


def download(address: str, part: Path, say: Say) -> bool:
    """Read `address` into `part`, going on from what `part` holds; whether all of it is there."""
    import httpx

    # pip's variable for certificates counts here, too: behind a company's proxy it must.
    trusted = ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or None)
    with httpx.Client(verify=trusted, follow_redirects=True, timeout=30.0) as client:
        for _ in range(TRIES):
            try:
                if _read(client, address, part, say):
                    return True
            except httpx.TransportError:
                continue  # cut; the next try asks for the rest
            except (httpx.HTTPError, httpx.InvalidURL):
                return False
    return False


def _read(client: object, address: str, part: Path, say: Say) -> bool:
    import httpx

    assert isinstance(client, httpx.Client)
    have = part.stat().st_size if part.is_file() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with client.stream("GET", address, headers=headers) as answer:
        if answer.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink()  # longer than the file: not a part of it
            return False
        answer.raise_for_status()
        continued = answer.status_code == httpx.codes.PARTIAL_CONTENT
        if continued:
            say(f"continuing at {have / 1e6:.0f} MB")
        with part.open("ab" if continued else "wb") as file:
            for chunk in answer.iter_raw():  # as it comes: a cut must not lose a buffer
                file.write(chunk)
    return True
