"""A folder that cannot be written, in one line: the disk is full, or it is not ours to write."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coa.errors import UsageError


@contextmanager
def writing_to(folder: Path, size: str, elsewhere: str) -> Iterator[None]:
    """`size` says how much room is needed, `elsewhere` how to choose another folder."""
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
