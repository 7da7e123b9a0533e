"""Spans and log events as OpenTelemetry writes them, in protobuf and in JSON.

In: what an exporter sends (OTLP, protobuf or JSON), what the collector's file exporter, the SDKs'
console exporters and Phoenix write. Out: `Span` and `LogEvent`, with attributes as plain values.

Protobuf is turned into OTLP's own JSON and then read as such, so there is one reader. It is done
by hand, with a table of the fields that are needed: the schema is frozen (a number never changes
its meaning), and the `protobuf` package would be a dependency whose version the program that is
recorded beside us often pins.

All of it is data of strangers. A span that cannot be read is counted and left out; a file of
which nothing can be read is an error.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coa.errors import MissingExtra, RecordError
from coa.io.runs import Json
from coa.recording.importers.reading import Notes, head_of, moment_of, note_cut, open_bytes

NANO = 1_000_000_000


@dataclass(frozen=True, slots=True)
class LogEvent:
    """What was said at one moment: an event of a span, or a log record that belongs to one."""

    name: str
    attributes: Json
    body: Any = None
    trace: str = ""
    span: str = ""
    at: int = 0
    """Nanoseconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work, with the one that it is a part of."""

    trace: str
    id: str
    parent: str = ""
    name: str = ""
    begun: int = 0
    """Nanoseconds since the epoch, as `ended`."""
    ended: int | None = None
    """None: it never ended."""
    attributes: Json = field(default_factory=dict)
    events: tuple[LogEvent, ...] = ()
    error: str = ""
    """What its status says, where that is an error."""
    resource: Json = field(default_factory=dict)
    scope: str = ""
    """Who wrote it: the name of an instrumentation."""
    parent_here: bool | None = None
    """Whether the parent is a span of the same process; None: nobody said."""
    schema: str = ""
    """Which conventions it says to follow: an address that ends in their version."""


WRONG = (RecordError, ValueError, TypeError, AttributeError, OverflowError, RecursionError)
"""What data of strangers may make a reader of it raise."""


@dataclass(slots=True)
class Telemetry:
    """What a file or a connection held."""

    spans: list[Span] = field(default_factory=list)
    logs: list[LogEvent] = field(default_factory=list)
    notes: Notes = field(default_factory=Notes)
    """What was left out, and why."""

    def add(self, document: Any) -> bool:
        """Take what one JSON document holds; False: it holds neither spans nor logs."""
        if isinstance(document, list):
            return sum(map(self.add, document)) > 0  # all of them, not up to the first
        if not isinstance(document, dict):
            return False
        inner = document.get("trace")
        if isinstance(inner, dict) and _first(inner, *_RESOURCE_SPANS) is not None:
            document = inner  # as Grafana's Tempo answers
        if (of_spans := _first(document, *_RESOURCE_SPANS)) is not None:
            for group in self._groups(of_spans):
                with self.reading("groups of spans"):
                    self._add_spans(group)
        if (of_logs := _first(document, *_RESOURCE_LOGS)) is not None:
            for group in self._groups(of_logs):
                with self.reading("groups of log records"):
                    self._add_logs(group)
        if of_spans is not None or of_logs is not None:
            return True
        if isinstance(document.get("data"), list):  # a page of Phoenix's REST interface
            return self.add(document["data"])
        if is_otlp(document):  # a page of Phoenix's OTLP interface holds bare ones
            with self.reading("spans"):
                self.spans.append(_span(document, {}, ""))
            return True
        if not is_single(document):
            return False
        with self.reading("spans"):
            self.spans.append(_single(document))
        return True

    def _groups(self, held: Any) -> Iterator[Json]:
        with self.reading("lists of groups"):
            yield from _dicts(held)

    def _add_spans(self, group: Json) -> None:
        resource = _attributes(group.get("resource"))
        for scoped in _dicts(_first(group, *_SCOPE_SPANS)):
            scope, schema = _scope(scoped), _first(scoped, "schemaUrl", "schema_url")
            schema = schema if isinstance(schema, str) else ""
            for span in _dicts(scoped.get("spans")):
                with self.reading("spans"):
                    self.spans.append(replace(_span(span, resource, scope), schema=schema))

    def _add_logs(self, group: Json) -> None:
        for scoped in _dicts(_first(group, "scopeLogs", "scope_logs")):
            for record in _dicts(_first(scoped, "logRecords", "log_records")):
                with self.reading("log records"):
                    self.logs.append(_log(record))

    @contextmanager
    def reading(self, kind: str) -> Iterator[None]:
        """Data of strangers may be anything; one record that cannot be read is left out."""
        try:
            yield
        except WRONG as wrong:
            self.notes.add(f"{kind} that cannot be read left out", type(wrong).__name__)


_RESOURCE_SPANS = ("resourceSpans", "resource_spans", "batches")
_RESOURCE_LOGS = ("resourceLogs", "resource_logs")
_SCOPE_SPANS = ("scopeSpans", "scope_spans", "instrumentationLibrarySpans")
"""Names of one thing: in OTLP's JSON, as protobuf's own JSON may have it, and before 2022."""


def _first(record: Json, *names: str) -> Any:
    return next((record[name] for name in names if name in record), None)


def _dicts(value: Any) -> Iterator[Json]:
    """The objects in a list; what else stands there is no span."""
    if value is not None and not isinstance(value, list):
        raise RecordError(f"found {type(value).__name__}, expected a list of objects.")
    return (each for each in value or () if isinstance(each, dict))


def _scope(scoped: Json) -> str:
    scope = _first(scoped, "scope", "instrumentationLibrary")
    name = scope.get("name") if isinstance(scope, dict) else ""
    return name if isinstance(name, str) else ""


def _span(record: Json, resource: Json, scope: str) -> Span:
    """A span of OTLP."""
    status = record.get("status") or {}
    flags = _whole(record.get("flags")) or 0
    ended = _time(_first(record, "endTimeUnixNano", "end_time_unix_nano"))
    trace, own = (
        _id(_first(record, *names)) for names in (("traceId", "trace_id"), ("spanId", "span_id"))
    )
    if not trace or not own:
        raise RecordError("a span has no id.")
    return Span(
        trace,
        own,
        _id(_first(record, "parentSpanId", "parent_span_id")),
        str(record.get("name") or ""),
        _time(_first(record, "startTimeUnixNano", "start_time_unix_nano")),
        ended or None,
        _attributes(record),
        tuple(_event(each) for each in _dicts(record.get("events"))),
        _error(status.get("code"), status.get("message")),
        resource,
        scope,
        None if not flags & _SAYS_WHERE else not flags & _ELSEWHERE,
    )


_SAYS_WHERE, _ELSEWHERE = 0x100, 0x200
"""Flags of a span: they say where its parent is; it is in another process."""


def _error(code: Any, message: Any) -> str:
    """What a status says; empty when it is no error."""
    if not str(code).upper().endswith(("ERROR", "2")):
        return ""
    return message if isinstance(message, str) and message else "error"


def _event(record: Json) -> LogEvent:
    at = _time(_first(record, "timeUnixNano", "time_unix_nano"))
    return LogEvent(str(record.get("name") or ""), _attributes(record), at=at)


def _log(record: Json) -> LogEvent:
    attributes = _attributes(record)
    name = _first(record, "eventName", "event_name") or attributes.get("event.name") or ""
    times = ("timeUnixNano", "observedTimeUnixNano", "time_unix_nano", "observed_time_unix_nano")
    return LogEvent(
        str(name),
        attributes,
        _value(record.get("body")),
        _id(_first(record, "traceId", "trace_id")),
        _id(_first(record, "spanId", "span_id")),
        next((at for each in times if (at := _time(record.get(each)))), 0),
    )


def _attributes(record: Any) -> Json:
    """Attributes of a span, an event or a resource, as plain values."""
    held = record.get("attributes") if isinstance(record, dict) else None
    if isinstance(held, dict):
        return held
    return {str(each["key"]): _value(each.get("value")) for each in _dicts(held) if "key" in each}


def _value(given: Any) -> Any:
    """The plain value of an AnyValue."""
    if not isinstance(given, dict):
        return given
    told = [(kind, value) for kind, value in given.items() if value is not None]
    if len(told) != 1:
        return given or None
    ((kind, value),) = told
    kind = kind.removesuffix("Value").removesuffix("_value")
    if kind == "int":
        return _whole(value)
    if kind == "array":
        return [_value(each) for each in (value or {}).get("values") or ()]
    if kind == "kvlist":
        return _attributes({"attributes": (value or {}).get("values") or []})
    if kind == "double":
        return float(value)
    if kind in ("string", "bool", "bytes"):
        return value
    return given


def _whole(value: Any) -> int | None:
    """A whole number, which JSON of protobuf writes as text."""
    if isinstance(value, str) and value.strip():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _time(value: Any) -> int:
    """Nanoseconds since the epoch, as 64 bits hold them; 0: not known."""
    at = _whole(value) or 0
    return at if 0 < at < 1 << 64 else 0


def _id(value: Any) -> str:
    """An id in hexadecimal; protobuf's own JSON has it in base 64, the SDKs' texts begin with 0x.
    Zeros mean that there is none."""
    if not isinstance(value, str):
        return ""
    text = value.strip().removeprefix("0x").lower()
    if len(value) in (12, 24) and value.endswith("="):
        with suppress(binascii.Error):
            text = base64.b64decode(value, validate=True).hex()
    return text if text.strip("0") else ""


# -- spans one by one: console exporters, Phoenix -----------------------------------------------


def is_otlp(record: Json) -> bool:
    """Whether this is one span of OTLP, without the groups around it."""
    ids = _first(record, "spanId", "span_id"), _first(record, "traceId", "trace_id")
    return all(isinstance(each, str) for each in ids) and (
        "startTimeUnixNano" in record or "start_time_unix_nano" in record
    )


def is_single(record: Json) -> bool:
    """Whether this is one span as an SDK's console exporter or Phoenix writes it."""
    context = record.get("context")
    return (isinstance(context, dict) and "trace_id" in context) or "context.trace_id" in record


def _single(record: Json) -> Span:
    """Such a span; a row of Phoenix's table has a column for each attribute."""
    context = record.get("context")
    if not isinstance(context, dict):
        context = {name: record.get(f"context.{name}") for name in ("trace_id", "span_id")}
    attributes = record.get("attributes")
    if not isinstance(attributes, dict):
        prefix = "attributes."
        attributes = {
            name.removeprefix(prefix): value
            for name, value in record.items()
            if name.startswith(prefix) and value is not None
        }
    if record.get("span_kind") and "openinference.span.kind" not in attributes:
        attributes = {**attributes, "openinference.span.kind": record["span_kind"]}
    status = record.get("status") if isinstance(record.get("status"), dict) else {}
    resource = record.get("resource")
    ended = moment(record.get("end_time"))
    trace, own = _id(context.get("trace_id")), _id(context.get("span_id"))
    if not trace or not own:
        raise RecordError("a span has no id.")
    assert isinstance(status, dict), status
    code = status.get("status_code", record.get("status_code"))
    message = status.get("description", record.get("status_message"))
    return Span(
        trace,
        own,
        _id(record.get("parent_id")),
        str(record.get("name") or ""),
        moment(record.get("start_time")) or 0,
        ended,
        attributes,
        tuple(
            LogEvent(
                str(each.get("name") or ""),
                _attributes(each),
                at=moment(each.get("timestamp")) or 0,
            )
            for each in _dicts(record.get("events"))
        ),
        _error(code, message),
        _attributes(resource) if isinstance(resource, dict) else {},
    )


def moment(value: Any) -> int | None:
    """Nanoseconds since the epoch of a time as text, or of the milliseconds that tables hold."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 64:
        return int(value * 10 ** max(0, 19 - len(str(value))))
    when = moment_of(value)
    if when is None and isinstance(value, str) and value:
        raise RecordError("a time is none.")
    if when is None:
        return None
    whole = int(when.replace(microsecond=0).timestamp())
    return whole * NANO + when.microsecond * 1000


# -- protobuf ------------------------------------------------------------------------------------

_Field = tuple[str, str, bool]
"""Name in JSON; kind, or the name of a message; whether it may repeat."""

_SCHEMA: Mapping[str, Mapping[int, _Field]] = {
    "traces": {1: ("resourceSpans", "ResourceSpans", True)},
    "logs": {1: ("resourceLogs", "ResourceLogs", True)},
    "ResourceSpans": {1: ("resource", "Resource", False), 2: ("scopeSpans", "ScopeSpans", True)},
    "ResourceLogs": {1: ("resource", "Resource", False), 2: ("scopeLogs", "ScopeLogs", True)},
    "Resource": {1: ("attributes", "KeyValue", True)},
    "ScopeSpans": {
        1: ("scope", "Scope", False),
        2: ("spans", "Span", True),
        3: ("schemaUrl", "text", False),
    },
    "ScopeLogs": {1: ("scope", "Scope", False), 2: ("logRecords", "LogRecord", True)},
    "Scope": {1: ("name", "text", False), 2: ("version", "text", False)},
    "Span": {
        1: ("traceId", "id", False),
        2: ("spanId", "id", False),
        4: ("parentSpanId", "id", False),
        5: ("name", "text", False),
        6: ("kind", "varint", False),
        7: ("startTimeUnixNano", "fixed64", False),
        8: ("endTimeUnixNano", "fixed64", False),
        9: ("attributes", "KeyValue", True),
        11: ("events", "Event", True),
        15: ("status", "Status", False),
        16: ("flags", "fixed32", False),
    },
    "Event": {
        1: ("timeUnixNano", "fixed64", False),
        2: ("name", "text", False),
        3: ("attributes", "KeyValue", True),
    },
    "Status": {2: ("message", "text", False), 3: ("code", "varint", False)},
    "LogRecord": {
        1: ("timeUnixNano", "fixed64", False),
        11: ("observedTimeUnixNano", "fixed64", False),
        2: ("severityNumber", "varint", False),
        5: ("body", "AnyValue", False),
        6: ("attributes", "KeyValue", True),
        9: ("traceId", "id", False),
        10: ("spanId", "id", False),
        12: ("eventName", "text", False),
    },
    "KeyValue": {1: ("key", "text", False), 2: ("value", "AnyValue", False)},
    "AnyValue": {
        1: ("stringValue", "text", False),
        2: ("boolValue", "bool", False),
        3: ("intValue", "signed", False),
        4: ("doubleValue", "double", False),
        5: ("arrayValue", "ArrayValue", False),
        6: ("kvlistValue", "KeyValueList", False),
        7: ("bytesValue", "bytes", False),
    },
    "ArrayValue": {1: ("values", "AnyValue", True)},
    "KeyValueList": {1: ("values", "KeyValue", True)},
}
"""By message and field number; what is not here (links, counts of what was dropped) is passed
over, as protobuf has it for fields that a reader does not know."""

_DEEPEST = 100
"""Messages within messages, as protobuf's own readers allow."""


def from_protobuf(octets: bytes, message: str, depth: int = 0) -> Json:
    """The JSON form of a message: "traces" or "logs" for what an exporter sends."""
    if depth > _DEEPEST:
        raise RecordError("a protobuf message is nested too deeply.")
    known, found, at = _SCHEMA[message], dict[str, Any](), 0
    while at < len(octets):
        key, at = _varint(octets, at)
        value, at = _wire_value(octets, at, key & 7)
        if (key >> 3) not in known:
            continue
        name, kind, repeats = known[key >> 3]
        if _WIRE.get(kind, 2) != key & 7:
            raise RecordError(f"field {name} of a {message} has the wire type {key & 7}.")
        read = _plain(value, kind, depth)
        if repeats:
            found.setdefault(name, []).append(read)
        else:
            found[name] = read
    return found


_WIRE = {"varint": 0, "signed": 0, "bool": 0, "fixed64": 1, "double": 1, "fixed32": 5}
"""Wire types of kinds; all others are of type 2, which has a length."""


def _plain(value: Any, kind: str, depth: int) -> Any:
    if kind in _SCHEMA:
        return from_protobuf(value, kind, depth + 1)
    if kind == "text":
        return value.decode("utf-8", "replace")
    if kind == "id":
        return value.hex()
    if kind == "bytes":
        return base64.b64encode(value).decode("ascii")
    if kind == "double":
        return struct.unpack("<d", value.to_bytes(8, "little"))[0]
    if kind == "bool":
        return bool(value)
    return value - (1 << 64) if kind == "signed" and value >> 63 else value


def _varint(octets: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(octets) or shift > 63:
            raise RecordError("a protobuf message is cut in the middle of a number.")
        byte = octets[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at


def _wire_value(octets: bytes, at: int, wire: int) -> tuple[Any, int]:
    if wire == 0:
        return _varint(octets, at)
    if wire == 2:
        length, at = _varint(octets, at)
    elif wire in (1, 5):
        length = 8 if wire == 1 else 4
    else:
        raise RecordError(f"a protobuf message has a field of wire type {wire}.")
    if at + length > len(octets):
        raise RecordError("a protobuf message is cut in the middle of a field.")
    piece = octets[at : at + length]
    return piece if wire == 2 else int.from_bytes(piece, "little"), at + length


# -- files ---------------------------------------------------------------------------------------

_ZSTD, _GZIP, _PARQUET = b"\x28\xb5\x2f\xfd", b"\x1f\x8b", b"PAR1"
CUT = "files that end in the middle of a record"


def read_telemetry(files: Sequence[Path], notes: Notes) -> Telemetry:
    """All spans and log events of these files, in whichever of the forms they are."""
    found = Telemetry(notes=notes)
    for path in files:
        try:
            _add_file(found, path)
        except RecordError as wrong:  # the others of a folder may well be sound
            if len(files) == 1:
                raise
            notes.add(f"files left out ({str(wrong).removeprefix(f'{path}: ')})", path.name)
    return found


def _add_file(found: Telemetry, path: Path) -> None:
    before = len(found.spans) + len(found.logs)
    head = head_of(path, 64)
    if head.startswith(_PARQUET):
        for row in _rows(path):
            found.add(row)
    elif _ZSTD in head[:8]:  # of the collector each message is packed, with its length before it
        raise RecordError(
            f"{path}: is packed with zstd, expected plain or gzip. Write it without "
            "`compression`, or unpack it first."
        )
    elif is_text(head):
        for where, document in json_documents(path, found.notes):
            with found.reading("documents"):
                if not found.add(document):
                    found.notes.add("documents without spans left out", where)
    elif head.strip():
        _add_binary(found, path)
    if len(found.spans) + len(found.logs) == before:
        raise no_span(
            str(path),
            found.notes,
            "spans of OpenTelemetry: OTLP in JSON or protobuf, what an SDK's console exporter "
            "prints, or an export of Phoenix",
        )


def no_span(where: str, notes: Notes, expected: str) -> RecordError:
    """What to raise where nothing was found, be it that a file was cut before its first span."""
    cut = " What is there ends in the middle of a record: it is cut." if CUT in notes.counts else ""
    return RecordError(f"{where}: found no span, expected {expected}.{cut}")


def is_text(head: bytes) -> bool:
    """Whether a file that begins so is JSON."""
    return head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[")


def begins_protobuf(head: bytes) -> bool:
    """Whether a file that begins so is protobuf of OpenTelemetry, with or without a length before
    it: as far as it is there, it has fields of these messages, and a trace's id among them."""
    starts = {0, 4, _after_varint(head)}
    return any(_has_trace(head[at:], kind) for at in starts for kind in ("traces", "logs"))


def _has_trace(octets: bytes, message: str, depth: int = 0) -> bool:
    known, at = _SCHEMA[message], 0
    try:
        while at < len(octets) and depth < 5:
            key, at = _varint(octets, at)
            name, kind, _ = known.get(key >> 3, ("", "", False))
            if not name or _WIRE.get(kind, 2) != key & 7:
                return False
            length, start = _varint(octets, at) if key & 7 == 2 else (0, at)
            if name == "traceId":
                return length == 16
            if kind in _SCHEMA and _has_trace(octets[start : start + length], kind, depth + 1):
                return True
            _, at = _wire_value(octets, at, key & 7)
    except RecordError:  # here the head ends
        return False
    return False


def _after_varint(octets: bytes) -> int:
    """How many bytes the number takes that these begin with."""
    return next((at + 1 for at, byte in enumerate(octets[:10]) if byte < 0x80), 0)


def begins_table(head: bytes, path: Path) -> bool:
    """Whether this is a parquet that Phoenix's table of spans was written to."""
    if not head.startswith(_PARQUET):
        return False
    try:
        import pyarrow.parquet as parquet

        return "context.trace_id" in parquet.read_schema(path).names
    except Exception:  # not installed, or no parquet after all: another reader will say so
        return False


def json_documents(path: Path, notes: Notes) -> Iterator[tuple[str, Any]]:
    """(place, value) of the JSON values of a file: one a line, one in all, or one after another
    over several lines each, as console exporters print them.

    What is no JSON is passed over up to the next line that begins a value, and counted. Of a list
    that is cut at the end of the file, the elements that are whole are taken.
    """
    text = _content(path, notes).decode("utf-8-sig", "replace")
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        if text[at] in " \t\r\n,]":
            at += 1
            continue
        where = f"{path.name}: character {at}"
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            following = [at + 1] if text[at] == "[" else []
            following += [p + 1 for sign in "{[" if (p := text.find(f"\n{sign}", at)) >= 0]
            if text[at] != "[":
                cut = not following
                notes.add(CUT if cut else "lines that are no JSON left out", where)
            at = min(following, default=len(text))
            continue
        yield where, value


def _content(path: Path, notes: Notes) -> bytes:
    """All of a file; of a gzip that was cut, what came before the cut."""
    content = bytearray()
    with open_bytes(path) as file:
        try:
            while piece := file.read(1 << 20):
                content += piece
        except (OSError, EOFError, zlib.error) as error:
            if not content:
                raise RecordError(f"{path}: not a whole gzip file ({error}).") from None
            notes.add("gzip files that are damaged, read up to there", path.name)
        note_cut(path, file, notes)
    return bytes(content)


def _add_binary(found: Telemetry, path: Path) -> None:
    """One message, or several with their lengths before them: four bytes as the collector writes
    them, or a varint as protobuf's libraries do."""
    octets = _content(path, found.notes)
    for length_at in (_fixed, _varint, None):
        messages, cut = _parted(octets, length_at) if length_at else ([octets], False)
        requests = [_request(each) for each in messages]
        if requests and None not in requests:
            for each in requests:
                found.add(each)
            found.notes.add(CUT, path.name, times=cut)
            return
    raise RecordError(f"{path}: is neither JSON nor protobuf of OpenTelemetry; it may be damaged.")


def _request(octets: bytes) -> Json | None:
    """What an exporter sent, of whichever kind; None: it is neither.

    A message of the one kind may be read as the other without an error, so ids decide.
    """
    for kind, inner, records in (
        ("traces", "scopeSpans", "spans"),
        ("logs", "scopeLogs", "logRecords"),
    ):
        try:
            read = from_protobuf(octets, kind)
        except RecordError:
            continue
        groups: list[Json] = next(iter(read.values()), [])
        held = [each for g in groups for s in g.get(inner, ()) for each in s.get(records, ())]
        if held and all(len(each.get("traceId", "")) in (0, 32) for each in held):
            return read
    return None


def _fixed(octets: bytes, at: int) -> tuple[int, int]:
    return int.from_bytes(octets[at : at + 4], "big"), at + 4


def _parted(
    octets: bytes, length_at: Callable[[bytes, int], tuple[int, int]]
) -> tuple[list[bytes], bool]:
    """Messages that each have their length before them; whether the last one is cut."""
    pieces, at = list[bytes](), 0
    with suppress(RecordError):
        while at < len(octets):
            length, start = length_at(octets, at)
            if not length or start + length > len(octets):
                break
            pieces.append(octets[start : start + length])
            at = start + length
    return pieces, at < len(octets)


def _rows(path: Path) -> Iterator[Json]:
    """Rows of Phoenix's table of spans."""
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise MissingExtra("Reading parquet", "export") from None
    try:
        table = parquet.read_table(path)
    except Exception as exc:
        raise RecordError(f"{path}: is no parquet that can be read: {exc}") from None
    yield from table.to_pylist()
