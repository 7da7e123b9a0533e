"""Labelled text: what stands after the labels of an agent's reply.

Labels may be in any case and marked up, have a wide colon, or be the keys of a JSON object, as
models write them that were trained to call tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from coa.teachers.llm_contracts import ECHOES

MAX_LINE = 300
"""Characters of a reply without labels that still can be nothing but a query or an answer."""
_ALOUD = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>", re.S | re.I)
_UNOPENED = re.compile(r"^.*</think(?:ing)?>", re.S | re.I)
"""Templates of reasoning models often end with the opening tag, so that replies do not have it."""
_PLACEHOLDER = re.compile(r"<[^<>\n]{1,60}>|\.{3}")


class Malformed(Exception):
    """A reply that cannot be read; the message tells its agent what to write."""


def said(reply: str) -> str:
    """A reply without what a model thinks aloud before it."""
    text = _UNOPENED.sub("", _ALOUD.sub("", reply)).strip()
    if not text:
        raise Malformed("Your reply is empty. Write it in the form that you were given.")
    if text.lower().startswith("<think"):
        raise Malformed("Your reply ends while you think. Think less, and reply.")
    return text


def sections(reply: str, labels: Sequence[str], last: str = "") -> dict[str, str]:
    """What stands after each label, up to the next; after `last` everything is its own."""
    if given := fields(reply):
        return _keyed(given, labels)
    names = "|".join(re.escape(label).replace(r"\ ", r"[ _]+") for label in labels)
    pattern = re.compile(
        rf"^([ \t>*#_`-]*)(?:final[ ])?({names})([ \t*_`]*[:\uff1a][ \t]*(?:\*\*|__)?)",
        re.M | re.I,
    )
    found = list(pattern.finditer(reply))
    parts: dict[str, str] = {}
    for at, match in enumerate(found):
        label = _label(match[2], labels)
        end = found[at + 1].start() if at + 1 < len(found) and label != last else len(reply)
        text = reply[match.end() : end].strip()
        if match[1].endswith("**") and "**" not in match[3]:  # bold from the label to the end
            text = text.removesuffix("**").rstrip()
        if parts.get(label, text) != text and label != "THOUGHT":
            raise Malformed(f"{label}: stands there twice. Write it once.")
        parts.setdefault(label, text)
        if label == last:
            break
    return parts


def _label(name: str, labels: Sequence[str]) -> str:
    """The label that is meant, in whatever case; empty: none of them."""
    name = " ".join(re.split(r"[ _]+", name)).casefold()
    return next((label for label in labels if label.casefold() == name), "")


def fields(reply: str) -> dict[str, Any]:
    """The JSON object that a reply is; empty: it is something else."""
    text = unfenced(re.sub(r"</?tool_call>", "", reply).strip())
    if not (text.startswith("{") and text.endswith("}")):
        return {}
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _keyed(given: Mapping[str, Any], labels: Sequence[str]) -> dict[str, str]:
    """What a JSON object says under each label, or under what calls of tools have instead."""
    also = {"name": "TOOL", "arguments": "INPUT"}
    parts: dict[str, str] = {}
    for name, value in given.items():
        if (label := _label(also.get(name, name), labels)) and value is not None:
            parts[label] = value.strip() if isinstance(value, str) else json.dumps(value)
    return parts


def unfenced(text: str) -> str:
    fence = re.fullmatch(r"```\w*\n(.*?)\n?```", text, re.S)
    return fence[1].strip() if fence else text


def line(text: str) -> str:
    return " ".join(text.split())


def is_line(text: str) -> bool:
    return "\n" not in text.strip() and len(text) <= MAX_LINE


def filled(text: str, where: str) -> str:
    if not text.strip():
        raise Malformed(f"{where} is empty. Fill it in.")
    first = text.removeprefix("```py").strip().split("\n")[0].casefold()
    if first in ECHOES or _PLACEHOLDER.fullmatch(text.strip()):
        raise Malformed(f"{where} holds only a placeholder. Fill it in.")
    return text
