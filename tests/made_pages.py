"""Pages for tests: small records to make one of, and a reader that takes a page apart again."""

from __future__ import annotations

import base64
import json
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

from coa.io.runs import dumps
from coa.recording.episode import AgentSpec, Episode, Message, ToolUse
from coa.trajectory import Author, Segment, StopReason, Trajectory
from coa.view.page import write_page

HOSTILE = "</script><img src=x onerror=alert(1)><!-- \u2028 <script>alert(2)</script> ]]> &lt;"
ORDINARY = "<think> I look.</think>\n<plan> 1. look</plan>"


class Page(NamedTuple):
    """A page taken apart again."""

    html: str
    content: dict[str, Any]
    records: list[dict[str, Any]]
    tags: list[str]


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: dict[str, str] = {}
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside = dict(attrs).get("id") or tag

    def handle_data(self, text: str) -> None:
        self.texts[self._inside] = self.texts.get(self._inside, "") + text


def read(path: Path) -> Page:
    html = path.read_text(encoding="ascii")
    parser = _Tags()
    parser.feed(html)
    chunks = json.loads(parser.texts["records"])
    records = [
        record
        for chunk in chunks
        for record in json.loads(zlib.decompress(base64.b64decode(chunk)).decode("ascii"))
    ]
    return Page(html, json.loads(parser.texts["page"]), records, parser.tags)


def page_of(tmp_path: Path, *records: Trajectory | Episode, **options: Any) -> Page:
    file = tmp_path / "made.jsonl"
    file.write_text("".join(dumps(each.to_json()) + "\n" for each in records), encoding="utf-8")
    write_page(file, tmp_path / "page.html", **options)
    return read(tmp_path / "page.html")


def chain(text: str = ORDINARY, **fields: Any) -> Trajectory:
    made: dict[str, Any] = {"task_id": "t1", "question": "Who?", "grammar": "mhqa", "answer": "me"}
    segments = [Segment(Author.PROMPT, "Answer."), Segment(Author.MODEL, text)]
    made |= {"segments": segments, "stop": StopReason.ANSWERED, "meta": {"family": "f"}}
    return Trajectory(**(made | fields))


def episode(**fields: Any) -> Episode:
    agents = [AgentSpec("planner", "planner", "You plan."), AgentSpec("bob", "searcher", "Seek.")]
    events = [
        Message("user", "planner", "Who?"),
        Message("planner", "bob", "1. look", "easy", {"part": "plan", "steps": [1]}),
        ToolUse("bob", "wiki_search", "who", "somebody", branch="1"),
        ToolUse("bob", "wiki_search", "whom", "", "timeout", erred=True, branch="2"),
        Message("bob", "user", "me", facts={"part": "alarm"}, erred=True),
    ]
    made: dict[str, Any] = {"task_id": "e1", "question": "Who?", "teacher": "t", "answer": "me"}
    return Episode(**(made | {"agents": agents, "events": events} | fields))
