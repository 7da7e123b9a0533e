"""Names of files for what is read elsewhere: the directories of one machine mean nothing there."""

from __future__ import annotations

import re
from typing import Any

_BETWEEN = re.compile(r"([+|]|,\s*(?=[/~]))")
"""What stands between the parts of a reference, as in hf:MODEL+ADAPTER, or of a list of paths."""
_HOME = r"~(?:[A-Za-z_][\w.-]*)?/+"
_WHOLE = re.compile(rf"^([\w-]+:)?(?:{_HOME}|/[^/]+/+)(?!.*\s[/~])(?:.*/)?(?=[^/])")
"""Directories of a part that is one path and nothing else, so they may have spaces in their names;
hf: may stand before it."""
_IN_NAME = r"[^\s/'\",|+]"
_INSIDE = re.compile(
    rf"(?<![^\s:+=,|'\"(\[])(?:{_HOME}|/{_IN_NAME}+/+)(?:{_IN_NAME}+/+)*(?={_IN_NAME})"
)
"""Directories of a path inside a text, after what may stand before one."""


def portable(value: Any) -> Any:
    """The same without the directories of absolute paths, or of those in a home directory."""
    if isinstance(value, str):
        parts = (_WHOLE.sub(r"\1", part) for part in _BETWEEN.split(value))
        return "".join(_INSIDE.sub("", part) for part in parts)
    if isinstance(value, dict):
        return {key: portable(each) for key, each in value.items()}
    return [portable(each) for each in value] if isinstance(value, list) else value
