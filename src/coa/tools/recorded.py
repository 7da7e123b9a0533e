"""Tools that answer from a record: what the tools of a team were asked, and what they answered.

They stand in for tools that are not here: when a recorded chain is replayed, and in an environment
made of recordings until somebody names the real functions. A call that the team made is answered as
it was then, however its arguments are written; one that it never made has no answer, which is the
record's fault and not the model's.

The file of a record has a line for each tool that the team had, and one for each call.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from coa.errors import ConfigError, RecordError, ToolError
from coa.grammar.grammar import Body
from coa.io.runs import Json, read_jsonl
from coa.tasks import Task
from coa.tools.arguments import canonical, described, only_text, read_arguments, shape_of
from coa.tools.base import RunTool, Tool, fingerprint_of
from coa.tools.sources import Opening, ToolsOf, withheld

RECORDED = "recorded"
"""Among the tools of an `environment.toml`: those of the record that nothing else answers for."""
Answers = Mapping[str, Sequence[str]]
"""Arguments, as `canonical` writes them -> what came back, each time."""
_ANY_LENGTH = 1 << 30
_SHOWN = 80


@dataclass(frozen=True)
class RecordedTool:
    """A tool that a team had: what a prompt said of it, and what it takes."""

    name: str
    about: str = ""
    body: Body = "text"
    schema: str = ""
    """JSON schema of the argument as JSON text."""

    @cached_property
    def arguments(self) -> Json:
        """The schema, read; empty where nobody knows it."""
        read: Json = json.loads(self.schema) if self.schema else {}
        return read

    @cached_property
    def only(self) -> str:
        """The only argument, of a tool whose calls are a text alone; else empty."""
        return only_text(self.arguments)

    @cached_property
    def described(self) -> str:
        """What a prompt says of it, with the arguments that it takes."""
        about = " ".join(self.about.split()).rstrip(".")
        if not self.schema or "the content is" in about.casefold():
            return about
        if self.only:
            named = f"he content is the {self.only.replace('_', ' ')}"
            return f"{about}; t{named}" if about else f"T{named}"
        return described(about, self.arguments)

    def answering(self, answers: Answers, block: str = "", fingerprint: str = "") -> Tool:
        """The tool with these answers. One that is asked the same again gives the next of them, and
        the last one from then on."""

        @asynccontextmanager
        async def session() -> AsyncIterator[RunTool]:
            asked = Counter[str]()

            async def answer(argument: str) -> str:
                key = self._key(argument, answers)
                asked[key] += 1
                return answers[key][min(asked[key], len(answers[key])) - 1]

            yield answer

        async def unopened(argument: str) -> str:
            raise ToolError(f"{self.name}: a record answers within a rollout only.")

        return Tool(
            self.name,
            unopened,
            about=self.described,
            body=self.body,
            schema=self.schema,
            max_chars=_ANY_LENGTH,
            block=block,
            session=session,
            parameter=self.only,
            checked=False,  # a call that was wrong is answered as it was then
            fingerprint=fingerprint,
        )

    def _key(self, argument: str, answers: Answers) -> str:
        """The arguments as the answers have them."""
        key = canonical(argument, self.only)
        if key not in answers and self.schema:  # right perhaps, and written in another way
            read = read_arguments(argument, self.arguments)
            key = canonical(json.dumps(read), self.only)
        if key not in answers:
            shown = key if len(key) <= _SHOWN else f"{key[:_SHOWN]}..."
            raise ToolError(f"{self.name}: the record has no answer to {shown}")
        return key


@dataclass(frozen=True)
class RecordedCall:
    """A call that a team made, and what came back."""

    tool: str
    argument: str
    result: str
    task: str = ""
    """The id of the task that it was made for."""


@dataclass(frozen=True)
class ToolRecord:
    """The tools of a team and the calls of them."""

    tools: tuple[RecordedTool, ...]
    calls: tuple[RecordedCall, ...]

    @cached_property
    def _by_task(self) -> dict[str, dict[str, Answers]]:
        """What each tool answered in each task; under no task, what it answered first in any."""
        only = {each.name: each.only for each in self.tools}
        found: defaultdict[str, defaultdict[str, dict[str, list[str]]]]
        found = defaultdict(lambda: defaultdict(dict))
        for call in self.calls:
            key = canonical(call.argument, only.get(call.tool, ""))
            found[call.task][call.tool].setdefault(key, []).append(call.result)
            found[""][call.tool].setdefault(key, [call.result])
        return {task: dict(own) for task, own in found.items()}

    def answers(self, tool: str, task: str = "") -> Answers:
        """What a tool answers in a task: what it did then, else what it did in any other."""
        anywhere = self._by_task.get("", {}).get(tool, {})
        return {**anywhere, **self._by_task.get(task, {}).get(tool, {})}

    def differences(self, tools: Iterable[Tool]) -> list[str]:
        """A line for each of these tools that takes other arguments than that of the record."""
        then, lines = {each.name: each.arguments for each in self.tools}, list[str]()
        for tool in tools:
            now = json.loads(tool.schema) if tool.schema else {}
            if tool.body == "text" and (only := tool.parameter):
                now = {"properties": {only: {"type": "string"}}, "required": [only]}
            was = then.get(tool.name, {})
            if was and now and _shapes(was) != _shapes(now):
                lines.append(f"{tool.name} takes {shape_of(now)}, the team's took {shape_of(was)}")
        return lines

    def to_lines(self) -> list[Json]:
        return [*({"offered": asdict(each)} for each in self.tools), *map(asdict, self.calls)]

    @classmethod
    def load(cls, path: Path) -> ToolRecord:
        if not path.is_file():
            raise ConfigError(
                f"{path}: no such record of tools. `coa init FOLDER --from EPISODES` writes one."
            )
        return _loaded(path, path.stat().st_mtime_ns)


@cache
def _loaded(path: Path, changed: int) -> ToolRecord:
    """The record of a file, read again only when it changed."""
    tools: list[RecordedTool] = []
    calls: list[RecordedCall] = []
    for number, record in read_jsonl(path):
        try:
            if "offered" in record:
                tools.append(RecordedTool(**record["offered"]))
                assert isinstance(tools[-1].arguments, dict), tools[-1].schema
            else:
                calls.append(RecordedCall(**record))
        except (AssertionError, TypeError, ValueError) as wrong:
            raise RecordError(
                f"{path}: line {number}: found no tool and no call of one ({wrong}), expected what "
                "`coa init --from` writes."
            ) from None
    return ToolRecord(tuple(tools), tuple(calls))


def _shapes(schema: Mapping[str, Any]) -> set[str]:
    """The arguments one by one, in whatever order."""
    parts = schema.get("properties", {}).items()
    return {shape_of({**schema, "properties": {name: _plainly(part)}}) for name, part in parts}


def _plainly(part: Any) -> Any:
    """An argument without what frameworks write in one way or another: that a list may hold
    anything, and that a value may be null."""
    if not isinstance(part, dict):
        return part
    kinds = [each for each in part.get("anyOf", ()) if each != {"type": "null"}]
    part = kinds[0] if len(kinds) == 1 else part
    return {"items": {}, **part} if part.get("type") == "array" else part


@dataclass(frozen=True)
class RecordedTools:
    """A source of tools that answer from the file of a record."""

    file: str
    but: tuple[str, ...] = ()
    """Tools that something else answers for."""

    @property
    def tools(self) -> tuple[str, ...]:
        held = ToolRecord.load(Path(self.file)).tools
        return tuple(each.name for each in held if each.name not in self.but)

    @asynccontextmanager
    async def open(self, how: Opening) -> AsyncIterator[ToolsOf]:
        if how.observations == "wrong":
            raise ConfigError(
                f"{self.file}: observations 'wrong': a record has no wrong answers to give; "
                "withheld and closed_book work with it."
            )
        path = Path(self.file)
        record, wanted = ToolRecord.load(path), set(self.tools)
        answers_from = fingerprint_of(path.read_text(encoding="utf-8"))

        def made(tool: RecordedTool, task: str) -> Tool:
            answers = record.answers(tool.name, task)
            given = tool.answering(answers, fingerprint=fingerprint_of(answers_from, task))
            given = replace(given, origin=answers_from)
            return withheld(given) if how.observations == "withheld" else given

        def tools(task: Task) -> list[Tool]:
            return [made(each, task.id) for each in record.tools if each.name in wanted]

        yield tools
