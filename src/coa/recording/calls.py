"""The log of a recording: every model call as it was seen, before anybody reads a team in it.

One line for each event: a session begins, a call was answered, a tool gave a result, a session
ended. A conversation grows by a message or two at each call and is sent whole every time, so that
each message, system prompt and list of tools stands in the file once, in the line of the first call
that has it, and is named by its digest from then on.

A session without an end was cut, by a signal or by the end of the machine; its calls are all there.
A file of sessions is for its owner's eyes only: it holds prompts.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from coa.errors import RecordError
from coa.io.files import make_private
from coa.io.runs import Appender, Json, dumps, read_jsonl
from coa.recording.episode import ToolSpec
from coa.recording.wire import FunctionCall, ServerUse, WireExchange, WireMessage, WireUsage

Redact = Callable[[str], str]
KILLED = "the recording was killed"
"""Why a session that has no end was cut."""


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """One model call of a session."""

    session: str
    dialect: str
    exchange: WireExchange
    begun: float
    """Seconds since the epoch, as `ended`."""
    ended: float
    status: int = 200
    """Of HTTP; 0: the server could not be reached."""
    cut: str = ""
    """Why the reply is not whole; empty: it is."""
    unread: str = ""
    """What could not be read of the request or the reply, where that is so."""
    retry: int = 0
    """How often the program had sent this request before."""
    agent: str = ""
    """Its agent, where the source names one; empty: the flow of messages shows it."""
    request: str = ""
    """Digest of the request as it was sent."""
    used: tuple[FunctionCall, ...] = ()
    """Tools and agents that the program called as the text of this reply says, which is a program
    itself and holds no calls; spans show them. Their results are in `LoggedSession.results`."""
    superseded: bool = False
    """The program did not take this reply, and sent the same request again."""

    @property
    def answered(self) -> bool:
        """Whether a model's reply, or a part of it, reached the program and was used by it."""
        return self.exchange.reply is not None and not self.superseded


@dataclass(slots=True)
class LoggedSession:
    """The calls of one run of a team, in the order in which they were answered."""

    name: str
    about: Json = field(default_factory=dict)
    """What was known when it began: its `source`; `task_id` and `question`, where it had a task."""
    calls: list[LoggedCall] = field(default_factory=list)
    end: Json | None = None
    """What was known when it ended: the program's `exit_code` and its stated `answer`, the `stdout`
    that it ended with, `cut` where it was stopped. None: nobody saw the end."""
    results: dict[str, WireMessage] = field(default_factory=dict)
    """Results of tools, by the id of the call, that are known from elsewhere than a later call."""
    tools: list[ToolSpec] = field(default_factory=list)
    """Tools that are known from elsewhere than a request, which need not declare them."""

    @property
    def cut(self) -> str:
        """Why it is not whole; empty: it is."""
        if self.end is None:
            return KILLED
        return str(self.end.get("cut", ""))

    def add(self, call: LoggedCall) -> None:
        """Keep a call. The attempt that it repeats is superseded: of several like it (one request
        may be meant twice, at once) one that failed, and else the last."""
        if call.retry and call.request:
            places = [
                place
                for place, earlier in enumerate(self.calls)
                if earlier.request == call.request and earlier.retry < call.retry
                if not earlier.superseded
            ]
            failed = [at for at in places if self.calls[at].cut or not self.calls[at].answered]
            for place in (failed or places)[-1:]:
                self.calls[place] = replace(self.calls[place], superseded=True)
        self.calls.append(call)


def unused(name: str, taken: set[str]) -> str:
    """A name for one more session, which is taken then: one that was used before has a number."""
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name}~{number}"
    taken.add(free)
    return free


class CallLog:
    """Appends to a log; several threads may."""

    def __init__(self, path: Path, redact: Redact | None = None) -> None:
        make_private(path)
        self._file = Appender(path)
        self._redact = redact
        self._known: set[str] = set()
        for _, record in read_jsonl(path, growing=True):
            self._known.update(record.get("new", ()))
        self._lock = threading.Lock()

    def begin(self, session: str, **about: Any) -> Json:
        """A session begins; what is kept of that."""
        return self._event("begin", session, about)

    def end(self, session: str, **about: Any) -> Json:
        """A session ended; what is kept of that."""
        return self._event("end", session, about)

    def _event(self, event: str, session: str, about: Json) -> Json:
        kept = about if self._redact is None else cleaned(about, self._redact)
        with self._lock:
            self._file.write({"event": event, "session": session, **kept})
        return dict(kept)

    def result(self, session: str, result: WireMessage) -> WireMessage:
        """A tool gave a result that no later call will show; what is kept of it."""
        kept = result if self._redact is None else _redacted(result, self._redact)
        new: Json = {}
        with self._lock:
            said = self._named(kept.to_json(), new)
            self._file.write({"event": "result", "session": session, "result": said, "new": new})
            self._known.update(new)
        return kept

    def write(self, call: LoggedCall) -> LoggedCall:
        """A call was answered, or failed; what is kept of it."""
        if self._redact is not None:
            used = tuple(_redacted_call(each, self._redact) for each in call.used)
            call = replace(call, exchange=redacted(call.exchange, self._redact), used=used)
        exchange, new = call.exchange, dict[str, Any]()
        with self._lock:
            named = partial(self._named, new=new)
            record = {
                "event": "call",
                **{name: getattr(call, name) for name in _PLAIN if getattr(call, name) != ""},
                "model": exchange.model,
                "system": named(exchange.system),
                "tools": named([asdict(tool) for tool in exchange.tools]),
                "messages": [named(message.to_json()) for message in exchange.messages],
                "reply": None if exchange.reply is None else named(exchange.reply.to_json()),
                "usage": asdict(exchange.usage),
                "stop": exchange.stop,
                "id": exchange.id,
                "follows": exchange.follows,
            }
            if exchange.kept:
                record["kept"] = named(exchange.kept)
            if exchange.drafts:
                record["drafts"] = [named(message.to_json()) for message in exchange.drafts]
            if exchange.ran:
                record["ran"] = [asdict(use) for use in exchange.ran]
            if call.used:
                record["used"] = [asdict(each) for each in call.used]
            self._file.write({**record, "new": new})
            self._known.update(new)
        return call

    def _named(self, value: Any, new: Json) -> str:
        """The digest that stands for a value, which goes into the file the first time."""
        text = value if isinstance(value, str) else dumps({"": value})
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:20]
        if digest not in self._known:
            new[digest] = value
        return digest

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> CallLog:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


_PLAIN = (
    *("session", "dialect", "begun", "ended", "status", "cut", "unread", "retry"),
    *("agent", "request"),
)
"""Fields of a call that stand in its line as they are."""


def read_sessions(path: Path) -> list[LoggedSession]:
    """The sessions of a log, in the order in which they began."""
    sessions: dict[str, LoggedSession] = {}
    known = _Known()
    for number, record in read_jsonl(path, growing=True):
        with _line(path, number):
            event, name = record.pop("event"), record.pop("session")
            session = sessions.setdefault(name, LoggedSession(name))
            if event == "begin":
                session.about = {**session.about, **record}
                session.end = None
            elif event == "end":
                session.tools = [ToolSpec(**each) for each in record.pop("tools", ())]
                session.end = record
            else:
                known.values.update(record["new"])
                if event == "result":
                    result = known.message(record["result"])
                    session.results[result.answers] = result
                else:
                    session.add(_call(name, record, known))
    return list(sessions.values())


class _Known:
    """What digests stand for. A message is read once, however many calls have it."""

    def __init__(self) -> None:
        self.values: Json = {}
        self._messages: dict[str, WireMessage] = {}
        self._tools: dict[str, tuple[ToolSpec, ...]] = {}

    def message(self, digest: str) -> WireMessage:
        if digest not in self._messages:
            self._messages[digest] = WireMessage.from_json(self.values[digest])
        return self._messages[digest]

    def tools(self, digest: str) -> tuple[ToolSpec, ...]:
        if digest not in self._tools:
            self._tools[digest] = tuple(ToolSpec(**tool) for tool in self.values[digest])
        return self._tools[digest]


@contextmanager
def _line(path: Path, number: int) -> Iterator[None]:
    """Says which line of which file is no line of a log."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RecordError(
            f"{path}: line {number}: found no model call ({type(error).__name__}: {error}), "
            "expected a line of `coa record`."
        ) from None


def _call(session: str, record: Json, known: _Known) -> LoggedCall:
    exchange = WireExchange(
        record["model"],
        known.values[record["system"]],
        known.tools(record["tools"]),
        tuple(map(known.message, record["messages"])),
        None if record["reply"] is None else known.message(record["reply"]),
        WireUsage(**record["usage"]),
        record["stop"],
        record["id"],
        record["follows"],
        tuple(map(known.message, record.get("drafts", ()))),
        tuple(_server_use(use) for use in record.get("ran", ())),
        known.values[record["kept"]] if "kept" in record else "",
    )
    plain = {name: record[name] for name in _PLAIN if name in record}
    used = tuple(FunctionCall(**each) for each in record.get("used", ()))
    return LoggedCall(session=session, exchange=exchange, used=used, **plain)


def _server_use(record: Json) -> ServerUse:
    return ServerUse(**{**record, "call": FunctionCall(**record["call"])})


def redacted(exchange: WireExchange, redact: Redact) -> WireExchange:
    """The exchange with every text in it as `redact` returns it."""

    def of_use(use: ServerUse) -> ServerUse:
        call = replace(use.call, arguments=cleaned(use.call.arguments, redact))
        return replace(use, call=call, result=redact(use.result))

    def of_tool(tool: ToolSpec) -> ToolSpec:
        schema = json.dumps(cleaned(json.loads(tool.schema), redact)) if tool.schema else ""
        return replace(tool, about=redact(tool.about), schema=schema)

    of = partial(_redacted, redact=redact)
    return replace(
        exchange,
        system=redact(exchange.system),
        kept=redact(exchange.kept),
        tools=tuple(map(of_tool, exchange.tools)),
        messages=tuple(map(of, exchange.messages)),
        reply=None if exchange.reply is None else of(exchange.reply),
        drafts=tuple(map(of, exchange.drafts)),
        ran=tuple(map(of_use, exchange.ran)),
    )


def _redacted_call(call: FunctionCall, redact: Redact) -> FunctionCall:
    return replace(call, arguments=cleaned(call.arguments, redact))


def _redacted(message: WireMessage, redact: Redact) -> WireMessage:
    calls = tuple(_redacted_call(call, redact) for call in message.calls)
    text, reasoning, name = map(redact, (message.text, message.reasoning, message.name))
    return replace(message, text=text, reasoning=reasoning, calls=calls, name=name)


def cleaned(value: Any, redact: Redact) -> Any:
    """A JSON value with every text in it as `redact` returns it."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {name: cleaned(each, redact) for name, each in value.items()}
    return [cleaned(each, redact) for each in value] if isinstance(value, list) else value
