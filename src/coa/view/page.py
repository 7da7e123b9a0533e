"""`coa view FILE --html OUT`: trajectories or episodes in, one HTML page out.

What the file holds is read off its records, not off its name. Beside a `trajectories.jsonl`, what
`coa distill` (rejected.jsonl, funnel.json) or `coa eval` (scores.jsonl, summary.json) wrote goes on
the page, too.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from coa.errors import RecordError, UsageError
from coa.io.runs import Json, read_jsonl, read_records, write_atomic
from coa.view.browse import View, bars, object_of, shown
from coa.view.chains import Scores, chains_view
from coa.view.teams import episodes_view
from coa.view.terminal import percent

# ------------------------------------------------------------------------------------------------
# Frame: a view becomes one HTML file that asks for nothing and runs nothing but our own script.
#
# Every text of a record may be hostile: a chain can hold `</script><img onerror=...>`. Therefore
# records are JSON in script elements that browsers do not run, with `<`, `>` and `&` written as
# escapes; the script puts them on the page as text only; and a content security policy with the
# hashes of our script and style forbids everything else, the network included.
#
# Records are compressed in chunks (chains repeat themselves: about one tenth is left), and a
# browser unpacks a chunk when somebody looks at it. The file is ASCII, so no byte of a record can
# break it, and the same input gives the same bytes.
# ------------------------------------------------------------------------------------------------


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
    return resources.files("coa.view").joinpath(name).read_text("utf-8")


CHAINS, EPISODES = "trajectories.jsonl", "episodes.jsonl"


class Written(NamedTuple):
    """What is on a page."""

    kind: str
    """chains or episodes."""
    shown: int
    total: int
    """How many there are; `shown` of them are in the list."""
    dropped: int
    size: int
    """Bytes of the page."""


def write_page(file: Path, out: Path, *, n: int | None = None, title: str = "") -> Written:
    """Write the page of a file, or of a directory that holds one; `n`: only the first so many."""
    if out.suffix not in (".html", ".htm") or out.is_dir():
        raise UsageError(f"{out}: a page is a file whose name ends in .html; name one.")
    source = _source(file)
    view = read_view(source)
    total = len(view.entries)
    if not total and not view.dropped:
        raise UsageError(f"{source}: is empty, so there is nothing to show.")
    page = render(view.limited(n), title or _title(file, source))
    write_atomic(out, page)
    return Written(view.kind, len(view.entries), total, _count_dropped(view), len(page))


def read_view(source: Path) -> View:
    """What is in a file of trajectories or episodes."""
    if _holds_episodes(source):
        return episodes_view(source)
    if source.name != CHAINS:
        return chains_view(source)
    beside = source.parent
    view = chains_view(source, _scores(beside / "scores.jsonl"))
    _add_dropped(view, beside / "rejected.jsonl")
    _add_funnel(view, beside / "funnel.json")
    _add_accuracy(view, beside / "summary.json")
    return view


def _source(file: Path) -> Path:
    if not file.is_dir():
        return file
    found = [file / name for name in (CHAINS, EPISODES) if (file / name).is_file()]
    if not found:
        raise UsageError(
            f"{file}: holds neither {CHAINS} nor {EPISODES}. "
            "Give a directory that coa distill or coa eval wrote, or such a file."
        )
    return found[0]


def _holds_episodes(source: Path) -> bool:
    for number, record in read_jsonl(source):
        if "segments" in record:
            return False
        if "events" in record and "agents" in record:
            return True
        keys = ", ".join(list(record)[:6]) or "none"
        raise RecordError(
            f"{source}:{number}: neither a trajectory nor an episode (its fields: {keys[:120]}). "
            "Give what coa record, coa distill or coa eval wrote."
        )
    return source.name == EPISODES  # an empty file is told apart by its name alone


def _title(file: Path, source: Path) -> str:
    """The directory's name where the file's says nothing."""
    named = file if file.is_dir() else source
    plain = named.is_dir() or named.name not in (CHAINS, EPISODES)
    return named.resolve().name if plain else f"{named.resolve().parent.name}/{named.name}"


def _scores(path: Path) -> Scores:
    """(task, sample) -> score, where the chains are of an evaluation."""
    if not path.is_file():
        return {}

    def score(record: Json) -> tuple[tuple[str, int], float]:
        value = float(record["score"])
        if not math.isfinite(value):
            raise ValueError(f"the score is {value!r}, expected a number.")
        return (record["task_id"], record["sample"]), value

    return dict(read_records(path, score))


def _add_dropped(view: View, path: Path) -> None:
    if not path.is_file():
        return

    def note(record: Json) -> tuple[str, ...]:
        copies = record.get("copies")
        return (
            shown(record["task_id"]),
            f"repeated, +{shown(copies)}" if copies else "dropped",
            shown(record.get("stage", "")),
            shown(record["reason"]),
            shown(record.get("detail", "")),
        )

    view.dropped = read_records(path, note)
    view.figures.append(("dropped", f"{_count_dropped(view):,}"))


def _count_dropped(view: View) -> int:
    return sum(what == "dropped" for _, what, *_ in view.dropped)


def _add_funnel(view: View, path: Path) -> None:
    funnel = object_of(path)
    if not funnel:
        return
    try:
        rows: list[tuple[str, float, str]] = [("episodes", int(funnel["episodes"]), "")]
        for each in funnel.get("stages", ()):
            about = "repeated: " if each.get("repeated") else ""
            rows.append(
                (shown(each["stage"]), int(each["left"]), about + _reasons(each["reasons"]))
            )
        about = "" if "stages" in funnel else _reasons(funnel["rejected"])
        rows.append(("kept", int(funnel["kept"]), about))
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        raise RecordError(f"{path}: not a funnel of coa distill ({exc!r}).") from None
    view.charts.insert(0, bars("From episodes to chains", rows, unit="left after each stage"))


def _reasons(counts: Json) -> str:
    return ", ".join(f"{reason} ({shown(count)})" for reason, count in counts.items())


def _add_accuracy(view: View, path: Path) -> None:
    summary = object_of(path)
    if not summary:
        return
    try:
        accuracy = percent(summary["accuracy"], summary["ci95"]).strip()
    except (IndexError, KeyError, TypeError, ValueError) as exc:
        raise RecordError(f"{path}: not a summary of coa eval ({exc!r}).") from None
    view.figures.insert(1, ("accuracy, 95% interval", accuracy))
