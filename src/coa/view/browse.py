"""One HTML file that asks for nothing: the shell of both pages, and what an inspection page shows.

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
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from coa.errors import UsageError
from coa.io.runs import Json, read_object
from coa.recording.episode import Episode
from coa.trajectory import Trajectory

CHUNK = 64
"""Records in a chunk: a browser unpacks that many at once, in a few milliseconds."""
BINS = 12
"""At most so many bars in a histogram."""
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
_PLACE = re.compile(r"\{\{(\w+)\}\}")


# -- the shell ------------------------------------------------------------------------------


def check_out(out: Path, what: str) -> None:
    """Refuse to write a page over anything that is not one."""
    if out.suffix not in (".html", ".htm") or out.is_dir():
        raise UsageError(f"{out}: a {what} is a file whose name ends in .html; name one.")


def render(
    kind: str, title: str, page: Mapping[str, Any], records: Sequence[Json], **places: str
) -> str:
    """Return a whole page of a kind: inspect or report; `places` hold markup that is harmless."""
    style, script = (
        _asset(f"page.{suffix}") + _asset(f"{kind}.{suffix}") for suffix in ("css", "js")
    )
    filled = {
        "policy": _policy(style, script),
        "title": html.escape(title).encode("ascii", "xmlcharrefreplace").decode(),
        "style": style,
        "script": script,
        "page": _harmless_json(page),
        "records": _harmless_json(_pack(records)),
        **places,
    }
    template = _asset("page.html").replace("{{body}}", _asset(f"{kind}.html"))
    # One pass, so that a title with braces is not taken for a place.
    return _PLACE.sub(lambda match: filled[match.group(1)], template)


def _harmless_json(value: Any) -> str:
    """Return JSON that can stand inside a script element, whatever its texts hold."""
    return re.sub("[<>&]", lambda match: _ESCAPES[match.group()], _json(value))


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _pack(records: Sequence[Json]) -> list[str]:
    """Return chunks of records: JSON, deflated, in base64."""
    chunks = (records[start : start + CHUNK] for start in range(0, len(records), CHUNK))
    packed = (zlib.compress(_json(list(chunk)).encode("ascii"), 9) for chunk in chunks)
    return [base64.b64encode(each).decode() for each in packed]


def _policy(style: str, script: str) -> str:
    hashes = (base64.b64encode(hashlib.sha256(t.encode()).digest()) for t in (script, style))
    script_hash, style_hash = (f"'sha256-{each.decode()}'" for each in hashes)
    return (
        f"default-src 'none'; script-src {script_hash}; style-src {style_hash}; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )


def _asset(name: str) -> str:
    return resources.files("coa.view").joinpath(name).read_text("utf-8")


# -- what an inspection page shows ----------------------------------------------------------


class Dropped(NamedTuple):
    """A record that was not kept once."""

    task: str
    what: str
    """dropped, or how often it is repeated."""
    stage: str
    reason: str
    detail: str


@dataclass
class View:
    """Everything on a page: what the list needs of each record, and the records beside it.

    Chains and episodes differ in what one record looks like and in their figures; list, filters,
    charts and the table of what was dropped are the same. Only text and numbers, no markup.
    """

    kind: str
    """chains or episodes: how one record is drawn."""
    noun: tuple[str, str]
    """What a record is called, one and several."""
    numbers: dict[str, str]
    """Numbers of an entry to sort by -> how they are called."""
    shown: tuple[str, ...]
    """Which of the numbers stand in the list."""
    flags: dict[str, str]
    """Properties of an entry to filter by -> what they mean."""
    entries: list[Json] = field(default_factory=list)
    """One per record, for the list: id, question, answer, set, family, numbers, flags."""
    records: list[Json] = field(default_factory=list)
    """In the order of the entries; loaded only when one is looked at."""
    looks: dict[str, Json] = field(default_factory=dict)
    """Name of an agent -> its colour and its kind."""
    figures: list[tuple[str, str]] = field(default_factory=list)
    charts: list[Json] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _taken: set[str] = field(default_factory=set)

    def add(
        self,
        item: Trajectory | Episode,
        record: Json,
        numbers: Mapping[str, float],
        flags: Mapping[str, bool],
    ) -> Json:
        """Add a record; returns its entry in the list."""
        name, number = item.task_id, 2
        while name in self._taken:  # several records may be of the same task
            name, number = f"{item.task_id}~{number}", number + 1
        self._taken.add(name)
        meta = item.meta
        entry = {
            "id": name,
            "question": item.question,
            "answer": item.answer,
            "set": shown(meta.get("set", "")),
            "family": shown(meta.get("family", meta.get("kind", ""))),
            "numbers": dict(numbers),
            "flags": [flag for flag, holds in flags.items() if holds],
        }
        self.entries.append(entry)
        self.records.append(record)
        return entry

    def values(self, name: str) -> list[Any]:
        """Return a number of all entries that have it."""
        return [entry["numbers"][name] for entry in self.entries if name in entry["numbers"]]

    def mean(self, name: str) -> str:
        return f"{sum(self.values(name)) / max(1, len(self.entries)):.1f}"

    def share(self, flag: str, without: bool = False) -> str:
        """Return how many entries have a flag, or are without it, in percent."""
        held = sum((flag in entry["flags"]) != without for entry in self.entries)
        return share_of(held, len(self.entries))

    def add_charts(self, *charts: Json) -> None:
        """Add charts, and those that every page has."""
        unit = self.noun[1]
        flags = Counter(flag for entry in self.entries for flag in entry["flags"])
        known = [(flag, flags[flag]) for flag in self.flags if flags[flag]]
        self.charts += [*charts, bars("Properties", known, unit=unit, filters="flag")]
        for key, title in (("set", "Sets"), ("family", "Families")):
            groups = Counter(entry[key] for entry in self.entries)
            if len(groups) > 1:
                self.charts.append(bars(title, groups.most_common(), unit=unit, filters=key))

    @property
    def dropped_count(self) -> int:
        """How many were dropped, without those that are repeated."""
        return sum(each.what == "dropped" for each in self.dropped)

    def render(self, title: str, n: int | None) -> str:
        """Return the page with the first `n` records; the figures stay those of all."""
        held = {name: value for name, value in vars(self).items() if name not in _NOT_ON_PAGE}
        if n is not None and n < (total := len(self.entries)):
            of_all = f"The list has the first {n:,} of {total:,} {self.noun[1]}; the figures are of"
            held |= {"entries": self.entries[:n], "notes": [*self.notes, f"{of_all} all."]}
        both = self.dropped_count < len(self.dropped)
        places = {"noun": self.noun[1], "dropped": "Dropped and repeated" if both else "Dropped"}
        return render("inspect", title, held | {"chunk": CHUNK}, self.records[:n], **places)


_NOT_ON_PAGE = ("records", "_taken")


def require_text(record: object, *names: str) -> None:
    """Raise unless these fields hold text: what a stranger wrote must not surprise the page."""
    for name in names:
        value = getattr(record, name)
        if not isinstance(value, str):
            raise TypeError(f"{name} is {shown(value)[:60]}, expected text")


def object_of(path: Path) -> Json:
    """Return the JSON object in a small file; an empty one where there is no such file."""
    return read_object(path) if path.is_file() else {}


def shown(value: Any) -> str:
    """Return a value of a record as a person reads it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def facts_of(meta: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what else a record says about its task; set and family have places of their own."""
    return [(name, shown(value)) for name, value in meta.items() if name not in ("set", "family")]


def bars(
    title: str,
    counts: Iterable[tuple[str, float] | tuple[str, float, str]],
    *,
    unit: str = "",
    filters: str = "",
    note: str = "",
) -> Json:
    """Return a chart of bars: label, value and perhaps a remark.

    `filters`: a click on a label lists what has this set, family or flag.
    """
    rows = [(label, round(value, 2), *remark) for label, value, *remark in counts]
    return {"title": title, "unit": unit, "filters": filters, "note": note, "rows": rows}


def each_of(counts: Counter[str], whole: int) -> list[tuple[str, float]]:
    """Return counts for one of `whole`, the largest first."""
    return [(name, count / max(1, whole)) for name, count in counts.most_common()]


def histogram(values: Sequence[int]) -> list[tuple[str, int]]:
    """Count in at most `BINS` equal steps of a round width (1, 2 or 5 times a power of ten)."""
    if not values:
        return []
    low, high = min(values), max(values)
    widths = (digit * 10**power for power in range(19) for digit in (1, 2, 5))
    width = next((w for w in widths if high // w - low // w < BINS), high)
    counts = Counter(value // width for value in values)
    steps = range(low // width, high // width + 1)
    if width == 1:
        return [(f"{step:,}", counts[step]) for step in steps]
    return [(f"{s * width:,} to {(s + 1) * width - 1:,}", counts[s]) for s in steps]


def share_of(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "none"
