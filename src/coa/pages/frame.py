"""Frame: a view becomes one HTML file that asks for nothing and runs nothing but our own script.

Every text of a record may be hostile: a chain can hold `</script><img onerror=...>`. Therefore
records are JSON in script elements that browsers do not run, with `<`, `>` and `&` written as
escapes; the script puts them on the page as text only; and a content security policy with the
hashes of our script and style forbids everything else, the network included.

Records are compressed in chunks (chains repeat themselves: about one tenth is left), and a browser
unpacks a chunk when somebody looks at it. The file is ASCII, so no byte of a record can break it,
and the same input gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from coa.pages.view import View
from coa.runs import Json

CHUNK = 64
"""Records in a chunk: a browser unpacks that many at once, in a few milliseconds."""
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def render(view: View, title: str) -> str:
    """The whole page of an inspection."""
    page = {
        "kind": view.kind,
        "noun": view.noun,
        "numbers": view.numbers,
        "shown": view.shown,
        "flags": view.flags,
        "looks": view.looks,
        "figures": view.figures,
        "charts": view.charts,
        "notes": view.notes,
        "chunk": CHUNK,
        "entries": view.entries,
        "dropped": view.dropped,
    }
    places = {
        "noun": view.noun[1],
        "dropped": _dropped(view),
        "page": harmless_json(page),
        "records": harmless_json(pack(view.records)),
    }
    scripts = ("inspect_records.js", "inspect.js")
    return fill("inspect.html", title, places, ("paper.css", "inspect.css"), scripts)


def fill(
    template: str,
    title: str,
    places: Mapping[str, str],
    styles: Sequence[str],
    scripts: Sequence[str],
) -> str:
    """A template of ours with its places filled: they hold markup or JSON that is harmless."""
    style, script = ("".join(map(_part, names)) for names in (styles, scripts))
    filled = {
        "policy": _policy(style, script),
        "title": html.escape(title).encode("ascii", "xmlcharrefreplace").decode(),
        "style": style,
        "script": script,
        **places,
    }
    # One pass, so that a title with braces is not taken for a place.
    return _PLACE.sub(lambda match: filled[match.group(1)], _part(template))


def _dropped(view: View) -> str:
    """What the table of those that were not kept once is called."""
    repeated = any(what != "dropped" for _, what, *_ in view.dropped)
    return "Dropped and repeated" if repeated else "Dropped"


def harmless_json(value: Any) -> str:
    """JSON that can stand inside a script element, whatever its texts hold."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&]", lambda match: _ESCAPES[match.group()], text)


def pack(records: Sequence[Json]) -> list[str]:
    """Chunks of records: JSON, deflated, in base64."""
    chunks = (records[start : start + CHUNK] for start in range(0, len(records), CHUNK))
    return [base64.b64encode(zlib.compress(_plain(chunk), 9)).decode() for chunk in chunks]


def _plain(chunk: Sequence[Json]) -> bytes:
    return json.dumps(list(chunk), separators=(",", ":"), allow_nan=False).encode("ascii")


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _part(name: str) -> str:
    return resources.files("coa.pages").joinpath(name).read_text("utf-8")
