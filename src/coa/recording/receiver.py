"""The receiver of `coa record --otel`: programs send their spans here, as to any collector.

It listens on loopback, takes OTLP over HTTP (protobuf or JSON, packed or not), and appends each
request as one line of OTLP JSON to a file, which is what the collector's file exporter writes and
what `coa import` reads. A request is answered when its line is written, so what an exporter was
told to have arrived is on the disk. Metrics are accepted and forgotten.

Which session a span belongs to stands in the address that its program was given,
`/session/NAME/v1/traces`, and is noted as the resource's `coa.session`.

The calls of a session are read from its spans when it ends. If this process is killed before, the
file has the spans, and `after_kill` reads them at the next start.
"""

from __future__ import annotations

import asyncio
import json
import threading
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, unquote

import h11

from coa.errors import CoaError, RecordError
from coa.io.files import make_private
from coa.io.runs import Appender, Json, json_lines
from coa.recording.calls import (
    KILLED,
    CallLog,
    LoggedSession,
    Redact,
    cleaned,
    unused,
)
from coa.recording.importers.otlp import Telemetry, from_protobuf
from coa.recording.importers.reading import Notes
from coa.recording.importers.spans import CAPTURE_ADVICE, SESSION, assembled
from coa.recording.importers.work import NOT_CAPTURED
from coa.recording.loopback import HungUp, Loopback, ProgramConnection
from coa.recording.proxy import Secrets
from coa.recording.turns import strings_in

LARGEST = 1 << 28
"""Bytes of a request, unpacked; exporters send batches of a few megabytes."""
BEFORE = "spans_before"
"""In `LoggedSession.about`: the bytes of the file of spans when the session began."""
_JSON, _PROTOBUF = "application/json", "application/x-protobuf"
_STATED = ("answer", "error", "gaps", "team")
"""What the spans of a session say of it, where its end says nothing."""

CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""Its values changed with 1.37 of the conventions: before, `true`; now, where the content is to be.
Neither version takes the other's, so what a user has set stays as it is."""
CAPTURE = {
    "OTEL_SDK_DISABLED": "false",
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_LOGS_EXPORTER": "otlp",
    "OTEL_METRICS_EXPORTER": "none",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": "http/protobuf",
    "OTEL_EXPORTER_OTLP_HEADERS": "",
    "OTEL_TRACES_SAMPLER": "always_on",
    "OTEL_BSP_SCHEDULE_DELAY": "500",
    "OTEL_BLRP_SCHEDULE_DELAY": "500",
    "OTEL_BSP_MAX_QUEUE_SIZE": "65536",
    "OTEL_BLRP_MAX_QUEUE_SIZE": "65536",
    "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "",
    "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT": "",
    "OTEL_ATTRIBUTE_COUNT_LIMIT": "1000000",
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "1000000",
    "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT": "1000000",
    "OTEL_SPAN_EVENT_COUNT_LIMIT": "1000000",
    "OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental",
    CONTENT: "SPAN_ONLY",
    "TRACELOOP_TRACE_CONTENT": "true",
    "OPENINFERENCE_HIDE_INPUTS": "false",
    "OPENINFERENCE_HIDE_OUTPUTS": "false",
    "OPENINFERENCE_HIDE_INPUT_MESSAGES": "false",
    "OPENINFERENCE_HIDE_OUTPUT_MESSAGES": "false",
    "OPENINFERENCE_HIDE_INPUT_TEXT": "false",
    "OPENINFERENCE_HIDE_OUTPUT_TEXT": "false",
    "OPENINFERENCE_HIDE_LLM_INVOCATION_PARAMETERS": "false",
    "OPENINFERENCE_HIDE_LLM_TOOLS": "false",
}
"""What a command runs with so that its spans hold what was said, and all of it: OpenTelemetry keeps
128 attributes of a span, which a flattened conversation of 40 messages exceeds, and drops spans
while 2048 wait; most instrumentations leave texts out unless they are told otherwise."""


class Receiver(Loopback):
    """Listens on 127.0.0.1 until its block ends.

    A session that begins with a task has an address of its own; without one, each trace (or
    conversation) that comes is a session, and `named` are their names.
    """

    def __init__(
        self,
        spans: Path,
        log: CallLog,
        secrets: Secrets | None = None,
        taken: Iterable[str] = (),
        port: int = 0,
    ) -> None:
        super().__init__(port)
        self.counts: Counter[str] = Counter()
        """Requests by what became of them: traces, logs, metrics, refused, grpc."""
        self.notes = Notes()
        self.log = log
        self._secrets = secrets or Secrets({})
        make_private(spans)
        self._spans, self._file = spans, Appender(spans)
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._taken = set(taken)
        self._held: dict[str, tuple[LoggedSession, Telemetry]] = {}
        """By the name that its program was told: what is known of a session and what came."""
        self._others = Telemetry(notes=self.notes)
        """What came for no session."""
        self._traces: dict[str, LoggedSession] = {}
        self._calls = self._silent = 0

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.callback(self._file.close)
            await stack.enter_async_context(self._listening())
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    # -- sessions ------------------------------------------------------------------------------

    async def begin(self, name: str, **about: Any) -> LoggedSession:
        """Spans for a session may come."""
        session = LoggedSession(unused(name, self._taken))
        with self._lock:
            before = self._spans.stat().st_size
            about = {**about, "source": "otel", BEFORE: before}
            session.about = self.log.begin(session.name, **about)
            self._held[name] = session, Telemetry(notes=self.notes)
        return session

    @property
    def named(self) -> list[str]:
        """Traces and conversations that belong to no session that was begun."""
        with self._lock:
            told, self._others = self._others, Telemetry(notes=self.notes)
        for found in assembled(told):
            self._traces[found.name] = _named(self.log, found, self._taken)
            self._count(found)
        return list(self._traces)

    async def end(self, name: str, **end: Any) -> LoggedSession:
        """A program ended, and all that it sent has come; its calls are in the log."""
        if name in self._traces:
            session = self._traces.pop(name)
            if session.end is None:  # a span around it never ended
                end.setdefault("cut", "a span around its work never ended")
            stated = session.end or {}
        else:
            with self._lock:
                session, told = self._held.pop(name)
            stated = {}
            for found in await asyncio.to_thread(assembled, told):
                _keep(self.log, session, found)
                self._count(found)
                stated = {**found.about, **(found.end or {})}
        known = {each: stated[each] for each in _STATED if each in stated}
        known |= {each: value for each, value in end.items() if value is not None}
        _end(self.log, session, known)
        return session

    def _count(self, found: LoggedSession) -> None:
        self._calls += len(found.calls)
        self._silent += sum(call.unread == NOT_CAPTURED for call in found.calls)

    def variables(self, environ: Mapping[str, str], name: str) -> dict[str, str]:
        """What the program of a session runs with, beside `environ`, so that its spans come here
        and hold what was said."""
        session, _ = self._held[name]
        address, named = self.url, ""
        if "task_id" in session.about:
            address = f"{self.url}/session/{quote(name, safe='')}"
            named = f"{SESSION}={quote(name, safe='')}"
        before = environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        wanted = environ.get(CONTENT, "")
        own = {CONTENT: wanted} if wanted.lower() not in ("", "false", "no_content") else {}
        return {
            **CAPTURE,
            **own,
            "OTEL_EXPORTER_OTLP_ENDPOINT": address,
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{address}/v1/traces",
            "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": f"{address}/v1/logs",
            "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"{address}/v1/metrics",
            "TRACELOOP_BASE_URL": address,
            "PHOENIX_COLLECTOR_ENDPOINT": f"{address}/v1/traces",
            "OTEL_RESOURCE_ATTRIBUTES": ",".join(each for each in (before, named) if each),
        }

    def lines(self) -> list[str]:
        """What a person should know besides the counts."""
        lines = self.notes.lines()
        if self._silent:
            of = f"{self._silent} of {self._calls} model calls hold no text."
            lines.append(f"{of} {CAPTURE_ADVICE}")
        if self.counts["grpc"]:
            lines.append(
                "an exporter spoke gRPC, which is not taken. Use the one for OTLP over HTTP, as in "
                "opentelemetry.exporter.otlp.proto.http."
            )
        if self.counts["refused"]:
            lines.append(f"{self.counts['refused']} requests were no OTLP and were refused")
        return lines

    def why_silent(self) -> str:
        """Why no model call was seen, as far as one can tell here."""
        if not self.counts["traces"]:
            return (
                "no span arrived. The program has to export spans by OTLP over HTTP to "
                "OTEL_EXPORTER_OTLP_ENDPOINT, and to end by itself, so that the last are sent; an "
                "address or another exporter that is set in its code goes before the variable."
            )
        return (
            "spans arrived and no model call among them. Instrument what calls the model "
            "(openinference-instrumentation-*, opentelemetry-instrumentation-*)."
        )

    # -- requests ------------------------------------------------------------------------------

    async def _answer(self, connection: ProgramConnection, head: h11.Request) -> None:
        if head.method == b"PRI":  # how HTTP/2 begins
            self.counts["grpc"] += 1
            raise HungUp
        told = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in head.headers]
        headers = dict(told)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            if int(headers.get("content-length", 0)) > LARGEST:  # h11 has seen that it is a number
                raise RecordError("a request is too large.")
            body = await _whole(connection)
            packed, target = headers.get("content-encoding", ""), head.target.decode("latin-1")
            self._heed(told)
            status = await asyncio.to_thread(
                lambda: self.take(target, _unpacked(body, packed), kind)
            )
        except (CoaError, ValueError, EOFError, OSError, zlib.error, RecursionError):
            status = 400  # exporters do not send what was refused so a second time
        except h11.RemoteProtocolError:
            self.counts["refused"] += 1
            raise
        self.counts["refused"] += status != 200
        # An empty message says that everything was taken, and in JSON that is an empty object.
        said = b"{}" if kind == _JSON else b""
        kind = _JSON if kind == _JSON else _PROTOBUF
        await connection.answer(status, said, ("Content-Type", kind))

    def _heed(self, headers: Iterable[tuple[str, str]]) -> None:
        """Headers were seen, which may hold keys."""
        with self._lock:
            for name, value in headers:
                self._secrets.add_header(name, value)

    def take(self, path: str, body: bytes, kind: str) -> int:
        """Take one request, in a thread of its own; the HTTP status that answers it."""
        parts = [part for part in path.partition("?")[0].split("/") if part]
        signal = parts[-1] if len(parts) > 1 and parts[-2] == "v1" else ""
        if signal not in ("traces", "logs", "metrics"):
            return 404
        with self._lock:
            self.counts[signal] += 1
        if signal == "metrics":
            return 200
        if kind == _JSON:
            request = json.loads(body)
        elif kind == _PROTOBUF:
            request = from_protobuf(body, signal)
        else:
            return 415
        groups = request.get(_GROUPS[signal]) if isinstance(request, dict) else None
        if not isinstance(groups, list):
            return 200 if request == {} else 400  # an empty export is one
        name = unquote(parts[1]) if parts[0] == "session" and len(parts) == 4 else ""
        told = [_told(group, name) for group in groups if isinstance(group, dict)]
        self._heed(_headers_in(told))
        with self._or_fail():
            told = _redacted(told, self._secrets)
        with self._lock:
            with self._or_fail():
                self._file.write({_GROUPS[signal]: told})
            held = self._held.get(name)
            into = held[1] if held else self._others
            into.add({_GROUPS[signal]: told})
        return 200

    @contextmanager
    def _or_fail(self) -> Iterator[None]:
        """End the recording where something cannot be kept as it should be."""
        try:
            yield
        except RecursionError:  # it is nested too deeply: the request is refused
            raise
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._fail, error)
            raise


_GROUPS = {"traces": "resourceSpans", "logs": "resourceLogs"}


# -- what is found goes into the log ---------------------------------------------------------------


def _named(log: CallLog, found: LoggedSession, taken: set[str]) -> LoggedSession:
    """A session of its own for a trace, or a conversation, that belongs to none."""
    session = LoggedSession(unused(found.name, taken))
    session.about = log.begin(session.name, **found.about, named=found.name)
    _keep(log, session, found)
    return session


def _keep(log: CallLog, session: LoggedSession, found: LoggedSession) -> None:
    """Write down what was found of a session, as the log keeps it."""
    for call in found.calls:
        session.calls.append(log.write(replace(call, session=session.name)))
    for key, result in found.results.items():
        session.results[key] = log.result(session.name, result)
    session.tools, session.end = found.tools, found.end


def _end(log: CallLog, session: LoggedSession, end: Json) -> None:
    """Write down that a session ended, and which tools its spans declare."""
    tools = [asdict(tool) for tool in session.tools]
    session.end = log.end(session.name, **end, **({"tools": tools} if tools else {}))
    session.end.pop("tools", None)


def after_kill(spans: Path, log: CallLog, known: Sequence[LoggedSession]) -> list[LoggedSession]:
    """What programs had sent when their recorder was killed, in the log now and marked as cut.

    The sessions that never ended get the calls that are theirs. Those of traces and conversations
    of a program without tasks are new, and are returned.
    """
    killed = [each for each in known if each.end is None and BEFORE in each.about]
    if not killed or not spans.is_file():
        return []
    told = Telemetry()
    with spans.open("rb") as file:
        file.seek(min(each.about[BEFORE] for each in killed))
        lines = (line.decode(errors="replace") for line in file)
        for _, request in json_lines(spans, lines, growing=True):
            told.add(request)
    waiting = {each.about["task_id"]: each for each in killed if "task_id" in each.about}
    since = known[next(n for n, each in enumerate(known) if each is killed[0]) :]
    in_log = {each.about.get(name) for each in since for name in ("task_id", "named")}
    taken, made = {each.name for each in known}, list[LoggedSession]()
    for found in assembled(told):
        if found.name in waiting:
            session = waiting[found.name]
            if not session.calls:
                _keep(log, session, found)
        elif len(waiting) < len(killed) and found.name not in in_log:
            session = _named(log, found, taken)
            made.append(session)
        else:
            continue
        _end(log, session, {**(found.end or {}), "cut": KILLED})
    return made


# -- requests --------------------------------------------------------------------------------------


def _told(group: Json, name: str) -> Json:
    """A group of spans, with the session that its address names."""
    resource = group.get("resource")
    resource = resource if isinstance(resource, dict) else {}
    held = resource.get("attributes")
    held = [each for each in held if isinstance(each, dict)] if isinstance(held, list) else []
    if name:
        held = [each for each in held if each.get("key") != SESSION]
        held.append({"key": SESSION, "value": {"stringValue": name}})
    return {**group, "resource": {**resource, "attributes": held}}


def _headers_in(value: Any) -> Iterator[tuple[str, str]]:
    """(name, value) of what may be a header among attributes (`http.request.header.api-key`)."""
    if isinstance(value, list):
        for each in value:
            yield from _headers_in(each)
    elif isinstance(value, dict):
        if isinstance(name := value.get("key"), str):
            yield from ((name.rpartition(".")[2], text) for text in strings_in(value.get("value")))
        for each in value.values():
            yield from _headers_in(each)


def _redacted(value: Any, redact: Redact) -> Any:
    """A request with each text in it as `redact` returns it, also those inside JSON in a text."""
    if isinstance(value, list):
        return [_redacted(each, redact) for each in value]
    if not isinstance(value, dict):
        return value
    if value.get("key") == SESSION:
        return value
    made: Json = {}
    for name, each in value.items():
        texts = name in ("stringValue", "message") or (name == "name" and "spanId" in value)
        texts = texts and isinstance(each, str)
        made[name] = _redacted_text(each, redact) if texts else _redacted(each, redact)
    return made


def _redacted_text(text: str, redact: Redact) -> str:
    if text[:1] in ("{", "["):
        try:
            return json.dumps(cleaned(json.loads(text), redact), ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return redact(text)


async def _whole(connection: ProgramConnection) -> bytes:
    body = bytearray()
    async for piece in connection.body():
        body += piece
        if len(body) > LARGEST:
            raise RecordError("a request is too large.")
    return bytes(body)


def _unpacked(body: bytes, encoding: str) -> bytes:
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding not in ("gzip", "deflate"):
        raise RecordError(f"the encoding {encoding!r} is not known.")
    reader = zlib.decompressobj(zlib.MAX_WBITS | (16 if encoding == "gzip" else 0))
    unpacked = reader.decompress(body, LARGEST)
    if not reader.eof:
        raise RecordError("a packed request is cut or too large.")
    return unpacked
