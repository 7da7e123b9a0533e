"""A whole folder or none: it is filled beside its place and renamed when it is complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coa.engines.disk import writing_to
from coa.engines.weights import sync_folder
from coa.errors import UsageError
from coa.locks import lock_output


@contextmanager
def whole_folder(target: Path, size: str, *, replaces: bool = False) -> Iterator[Path]:
    """A folder to fill, which becomes `target` at the end, or never when that fails.

    What a killed process left is removed by the next one, and what it was about to replace is put
    back before anything is asked of the caller; a second one at the same time is refused. `size`
    says how much room is needed, for a disk that is full.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100  # not through links, and "." has a name
    refuse_to_overwrite(target, replaces)
    part = target.with_name(f".{target.name}.part")
    folder, old = part / target.name, part / f"{target.name}.replaced"
    with writing_to(target, size, "give another folder with --out"):
        part.mkdir(parents=True, exist_ok=True)
        with lock_output(part):
            try:
                _put_back(old, target)
                refuse_to_overwrite(target, replaces)
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                yield folder
                sync_folder(folder)
                if target.exists():
                    target.rename(old)
                folder.rename(target)
            finally:
                _put_back(old, target)
                shutil.rmtree(part, ignore_errors=True)


def _put_back(old: Path, target: Path) -> None:
    """Rename what was to be replaced back, or remove it when the new folder is in its place."""
    # What is removed is renamed first: half a folder must not look like one to put back.
    removed = old.with_name(f"{old.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    if old.exists() and target.exists():
        old.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
    elif old.exists():
        old.rename(target)


def refuse_to_overwrite(target: Path, replaces: bool = False) -> None:
    """Only a new or an empty folder is written to, unless its files may be replaced."""
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target}: is a file, expected a new folder.")
    if not replaces and target.is_dir() and any(target.iterdir()):
        raise UsageError(f"{target}: exists and is not empty. Give a new folder with --out.")
