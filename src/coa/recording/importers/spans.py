"""From spans to sessions: what belongs to one run of a team, in which order, and whose it is.

In: spans in any order, of several traces, some of them twice or without their parents. Out: a
`LoggedSession` for each trace, or for the traces that share a conversation, with its model calls in
the order in which they were answered, each with the agent around it, and the results of tools.

- A span that was sent again (exporters do, when an answer is late) counts once.
- Two instrumentations may note one model call, one inside the other: it counts once.
- A result belongs to a call by its id. Where there is none it is the call of that tool, with these
  arguments, in the reply before it of the same agent. An agent that writes programs makes no calls:
  what ran after its reply and is named in it is what the reply used (`LoggedCall.used`).
- A parent in this process that never arrived was never ended, so the program was cut.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from coa.errors import RecordError
from coa.recording.calls import LoggedCall, LoggedSession
from coa.recording.episode import Episode, ToolSpec
from coa.recording.importers import agents_sdk, genai, openinference
from coa.recording.importers.otlp import (
    NANO,
    WRONG,
    LogEvent,
    Span,
    Telemetry,
    begins_protobuf,
    is_otlp,
    is_single,
    is_text,
    read_telemetry,
)
from coa.recording.importers.reading import SECONDS, Notes, opening
from coa.recording.importers.work import (
    NOT_CAPTURED,
    OTHER,
    STRANGE,
    TracedWork,
    is_captured,
    is_strange,
)
from coa.recording.wire import FunctionCall, WireExchange, WireMessage

SESSION = "coa.session"
"""Of a resource: the session that the receiver of `coa record --otel` was told."""
CAPTURE_ADVICE = (
    "Content capture was off. Run the program with "
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=SPAN_ONLY and "
    "OTEL_SEMCONV_STABILITY_OPT_IN=gen_ai_latest_experimental, which `coa record --otel` sets "
    "(instrumentations older than version 1.37 of the conventions take the first as true; "
    "OpenInference: without OPENINFERENCE_HIDE_*; OpenLLMetry: TRACELOOP_TRACE_CONTENT=true; "
    "pydantic-ai and Logfire: include_content=True)."
)
_SLACK = 2_000_000
"""Nanoseconds by which a tool may seem to begin before the reply that asks for it; some files have
times in milliseconds."""


def detect(head: bytes, path: Path) -> bool:
    """Whether this is OTLP, or what a console exporter prints; Phoenix's files are told apart."""
    if not is_text(head):
        return begins_protobuf(head)
    begins = opening(head)
    begins = begins[0] if isinstance(begins, list) and begins else begins
    if not isinstance(begins, dict) or openinference.detect(head, path):
        return False
    inner = begins.get("trace")
    names = {*begins, *(inner if isinstance(inner, dict) else ())}
    return bool(names & _NAMES) or is_single(begins) or is_otlp(begins)


_NAMES = {"resourceSpans", "resource_spans", "resourceLogs", "resource_logs", "batches"}


def read(files: Sequence[Path], notes: Notes) -> Iterator[LoggedSession | Episode]:
    yield from sessions_of(read_telemetry(files, notes), ", ".join(path.name for path in files))


def sessions_of(
    found: Telemetry, where: str, source: str = "otel", groups: Mapping[str, str] | None = None
) -> list[LoggedSession]:
    """The sessions of a file; one without a model call, or without any text, is an error."""
    sessions = assembled(found, source, groups)
    if not sessions:
        scopes = ", ".join(sorted({span.scope for span in found.spans if span.scope})[:5])
        by = f" (written by {scopes})" if scopes else ""
        raise RecordError(
            f"{where}: found {len(found.spans)} spans{by} and no model call among them, expected "
            "spans of OpenTelemetry's conventions for generative AI or of OpenInference."
        )
    unread = [call.unread for each in sessions for call in each.calls]
    if STRANGE in unread and {*unread} <= {STRANGE, NOT_CAPTURED}:
        raise RecordError(
            f"{where}: {len(unread)} model calls and no text of any: their messages are {STRANGE}. "
            f"Known are GenAI conventions up to 1.{genai.NEWEST}, OpenInference and OpenLLMetry."
        )
    if {*unread} == {NOT_CAPTURED}:
        advice = advice_of(source)
        if genai.NEWER in found.notes.counts:
            advice += " Or it stands elsewhere: their conventions are of a version not known here."
        raise RecordError(f"{where}: {len(unread)} model calls and no text of any. {advice}")
    return sessions


def advice_of(source: str) -> str:
    """What to do where no text was captured."""
    return agents_sdk.CAPTURE_ADVICE if source == agents_sdk.SCOPE else CAPTURE_ADVICE


def assembled(
    found: Telemetry, source: str = "otel", groups: Mapping[str, str] | None = None
) -> list[LoggedSession]:
    """The sessions of these spans; `groups` are conversations by trace, where a file says so."""
    notes = found.notes
    spans = _unique(_without_pending([*found.spans, *_told_in_logs(found)]), notes)
    logs: dict[tuple[str, str], list[LogEvent]] = {}
    for event in found.logs:
        logs.setdefault((event.trace, event.span), []).append(event)
    nodes: dict[str, list[_Node]] = {}
    for span in spans:
        work = _work(span, logs.get((span.trace, span.id), ()), notes)
        if work.odd:
            notes.add(work.odd, span.trace[:8])
        if work.kind == "model" and is_strange(work.exchange):
            notes.add(f"model calls with messages {STRANGE}", span.trace[:8])
        nodes.setdefault(_trace_of(span), []).append(_Node(span, work))
    sessions = []
    for name, traces in _grouped(nodes, groups or {}, notes).items():
        session = _session(name, source, [_Tree(nodes[trace]) for trace in traces])
        if session.calls:
            sessions.append(session)
        else:
            notes.add("traces without a model call left out", name)
    alone = sum(len(each.calls) == 1 and not each.calls[0].agent for each in sessions)
    if len(sessions) > 2 and alone == len(sessions):
        notes.add(
            "traces of one model call with nothing around it (if one run made several of them, "
            "open a span around a run, or record with --tasks)",
            times=alone,
        )
    return sessions


# -- before the tree -----------------------------------------------------------------------------


def _without_pending(spans: Sequence[Span]) -> list[Span]:
    """Logfire sends a span when it begins, as a child of itself; one that is followed by no real
    one never ended."""
    kind, parent = "logfire.span_type", "logfire.pending_parent_id"
    pending = [span for span in spans if span.attributes.get(kind) == "pending_span"]
    if not pending:
        return list(spans)
    rest = [span for span in spans if span.attributes.get(kind) != "pending_span"]
    real = {(span.trace, span.id) for span in rest}
    for span in pending:
        if (span.trace, span.parent) not in real:
            above = str(span.attributes.get(parent) or "")
            above = above if above.strip("0") else ""
            rest.append(replace(span, id=span.parent, parent=above, ended=None))
    return rest


def _told_in_logs(found: Telemetry) -> Iterator[Span]:
    """Model calls that only a log record tells of, its span having gone elsewhere."""
    known = {(span.trace, span.id) for span in found.spans}
    for number, event in enumerate(found.logs):
        if (event.trace, event.span) in known:
            continue
        if event.name != genai.DETAILS:
            found.notes.add("log records of no span left out", event.trace[:8])
            continue
        attributes = {"gen_ai.operation.name": "chat", **event.attributes}
        own = event.span or f"log-{number}"
        yield Span(event.trace or "logs", own, "", event.name, event.at, event.at, attributes)


def _unique(spans: Sequence[Span], notes: Notes) -> list[Span]:
    """Each span once. One that came again is the same; if it ended meanwhile, the later counts.
    Two that are not the same may have one id all the same, and are kept apart."""
    kept: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        same = kept.setdefault((_trace_of(span), span.id), [])
        for place, other in enumerate(same):
            if _is_again(span, other):
                if _completeness(span) > _completeness(other):
                    same[place] = span
                notes.add("spans that were sent again counted once", span.trace[:8])
                break
        else:
            if same:
                notes.add("ids of spans that repeat", span.trace[:8])
                span = replace(span, id=f"{span.id}#{len(same)}")
            same.append(span)
    return [span for same in kept.values() for span in same]


def _is_again(span: Span, other: Span) -> bool:
    """Whether two spans with one id are one: it may have ended, and learnt more, in between."""
    if span.begun != other.begun:
        return False
    if (span.ended is None) != (other.ended is None):
        return True
    same = (span.name, span.ended) == (other.name, other.ended)
    return same and (bool(span.begun) or span.attributes == other.attributes)


def _trace_of(span: Span) -> str:
    """Which trace it belongs to. Programs that each record a task may have been told one trace (by
    TRACEPARENT), which is none of theirs."""
    session = span.resource.get(SESSION)
    return f"{session} {span.trace}" if session else span.trace


def _completeness(span: Span) -> tuple[bool, int, int]:
    return span.ended is not None, len(span.attributes), len(span.events)


def _work(span: Span, logs: Sequence[LogEvent], notes: Notes) -> TracedWork:
    try:
        if span.scope == agents_sdk.SCOPE:
            return agents_sdk.read_span(span)
        told = openinference.read_span(span)
        if told is None or told.unread or told.odd:  # some instrumentations write both conventions
            other = genai.read_span(span, logs)
            kinds = ("model",) if told and told.unread else ("model", "agent", "tool")
            known = other.kind in kinds and not other.unread
            return other if told is None or known else told
        return told
    except (*WRONG, KeyError, SyntaxError) as wrong:
        kind = f"spans whose content cannot be read left out ({type(wrong).__name__})"
        notes.add(kind, span.trace[:8])
        return OTHER


# -- which traces are one session ------------------------------------------------------------------


def _grouped(
    nodes: Mapping[str, list[_Node]], groups: Mapping[str, str], notes: Notes
) -> dict[str, list[str]]:
    """The traces of each session, by its name, in the order in which sessions began.

    Traces that share a conversation are one session, and a trace is never parted: agents of one
    team may each have a conversation of their own. What the receiver was told goes before.
    """
    begun = {trace: min(node.span.begun for node in held) for trace, held in nodes.items()}
    traces = sorted(nodes, key=lambda trace: begun[trace])
    of_conversation: dict[str, str] = {}
    head = {trace: trace for trace in traces}

    def first_of(trace: str) -> str:
        while head[trace] != trace:
            trace = head[trace]
        return trace

    named: dict[str, str] = {}
    talks: dict[str, set[str]] = {}
    for trace in traces:
        told = next((s for n in nodes[trace] if (s := n.span.resource.get(SESSION))), None)
        shared = {node.work.conversation for node in nodes[trace]} | {groups.get(trace, "")}
        talks[trace] = set() if told else shared - {""}
        keys = [f"session {told}"] if told else [f"talk {each}" for each in talks[trace]]
        if told:
            named[trace] = str(told)
        for key in keys:
            other = first_of(of_conversation.setdefault(key, trace))
            mine = first_of(trace)
            early, late = sorted((mine, other), key=lambda each: (begun[each], each))
            head[late] = early
    found: dict[str, list[str]] = {}
    for trace in traces:
        found.setdefault(first_of(trace), []).append(trace)
    for first, together in found.items():
        if first in named:
            continue
        if len(together) > 1:
            notes.add("traces that share a conversation read as one session", first, len(together))
        if len(only := set().union(*(talks[trace] for trace in together))) == 1:
            named[first] = next(iter(only))
    return {named.get(first, first): together for first, together in found.items()}


# -- one trace -------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Node:
    """A span among those that it is a part of and that are a part of it."""

    span: Span
    work: TracedWork
    parent: _Node | None = None
    children: list[_Node] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)
    """Places of those calls of a reply that have their result."""
    used: list[FunctionCall] = field(default_factory=list)

    @property
    def ended(self) -> int:
        return self.span.begun if self.span.ended is None else self.span.ended

    def above(self) -> Iterator[_Node]:
        node = self.parent
        while node is not None:
            yield node
            node = node.parent

    def inside(self) -> Iterator[_Node]:
        """What it is made of, but not the work of agents and tools in it."""
        held = list(self.children)
        while held:
            node = held.pop()
            yield node
            held += node.children if node.work.kind in ("model", "other") else ()

    @property
    def exchange(self) -> WireExchange:
        assert self.work.exchange is not None, self.work
        return self.work.exchange

    @property
    def agent(self) -> str:
        """Whose work it is."""
        named = (node.work.agent for node in self.above() if node.work.kind == "agent")
        return self.work.agent or next((name for name in named if name), "")

    @property
    def scope(self) -> _Node | None:
        """The agent at work around it."""
        return next((node for node in self.above() if node.work.kind == "agent"), None)

    @property
    def in_tool(self) -> bool:
        """Whether a tool made it, not the agent around it."""
        kinds = (node.work.kind for node in self.above() if node.work.kind in ("agent", "tool"))
        return next(kinds, "") == "tool"


class _Tree:
    """The spans of one trace, with what is missing of it."""

    def __init__(self, nodes: Sequence[_Node]) -> None:
        self.nodes = sorted(nodes, key=lambda node: (node.span.begun, node.ended))
        by_id = {node.span.id: node for node in nodes}
        self.lost = self.cut = 0
        for node in self.nodes:
            parent = by_id.get(node.span.parent)
            if parent is not None and parent is not node and node not in parent.above():
                node.parent = parent
                parent.children.append(node)
            elif node.span.parent:
                self.lost += node.span.parent_here is not False
                self.cut += node.span.parent_here is True
        self.unended = sum(node.span.ended is None for node in self.nodes)

    @cached_property
    def calls(self) -> list[_Node]:
        """The model calls, each once, in the order in which they were answered."""
        dropped: set[_Node] = set()
        for node in self.nodes:
            if node.work.kind != "model" or node in dropped:
                continue
            inside = [each for each in node.inside() if each.work.kind == "model"]
            answered = [each for each in inside if each.exchange.reply is not None]
            if len(answered) > 1:  # it is a loop of calls, not one
                dropped.add(node)
            elif inside:
                best = max([node, *answered], key=lambda each: _wealth(each.exchange))
                dropped.update(each for each in (node, *inside) if each is not best)
        found = [node for node in self.nodes if node.work.kind == "model" and node not in dropped]
        for node in self.nodes:  # an agent elsewhere, of which only its own span tells
            elsewhere = node.work.kind == "agent" and node.work.exchange is not None
            if elsewhere and not any(
                each.work.kind in ("model", "agent") for each in node.inside()
            ):
                found.append(node)
        return sorted(found, key=lambda node: (node.ended, node.span.begun))


def _wealth(exchange: WireExchange) -> tuple[bool, bool, bool]:
    """How much a span tells of a call."""
    return is_captured(exchange), bool(exchange.tools), exchange.usage.sampled is not None


def _session(name: str, source: str, forest: Sequence[_Tree]) -> LoggedSession:
    calls = sorted((n for tree in forest for n in tree.calls), key=lambda n: n.ended)
    nodes = [node for tree in forest for node in tree.nodes]
    session = LoggedSession(name, {"source": source})
    service = str(nodes[0].span.resource.get("service.name") or "")
    if service and not service.startswith("unknown_service"):
        session.about["team"] = service
    gaps: Counter[str] = Counter()
    gaps["parent_missing"] = sum(tree.lost for tree in forest)
    gaps["span_unended"] = sum(tree.unended for tree in forest)
    gaps["text_not_captured"] = sum(node.work.unread == NOT_CAPTURED for node in calls)
    gaps.update(node.work.gap for node in calls if node.work.gap)
    _find_results(session, nodes, calls, gaps)
    session.calls = [_call(name, node) for node in calls]
    session.tools = _tools(nodes)
    outermost = [n for n in nodes if n.work.kind == "agent" and n.scope is None and not n.in_tool]
    asked = next((n.work.arguments for n in outermost if isinstance(n.work.arguments, str)), "")
    answers = [n.work.result for n in sorted(outermost, key=lambda n: n.ended)]
    if asked:
        session.about["question"] = asked
    if not all(node.span.begun for node in calls):
        session.about[SECONDS] = []
    if gaps := +gaps:
        session.about["gaps"] = dict(gaps)
    if not any(tree.cut or tree.unended for tree in forest):
        session.end = {"answer": answers[-1]} if answers and answers[-1] is not None else {}
        around = outermost or [node for node in nodes if node.parent is None]
        if max(around, key=lambda node: node.ended).span.error:
            session.end["error"] = "the run ended with an error"
    return session


def _call(session: str, node: _Node) -> LoggedCall:
    span, exchange = node.span, node.exchange
    code = str(span.attributes.get("error.type") or span.attributes.get("http.status_code") or "")
    failed = bool(span.error) and exchange.reply is None
    cut = "its span never ended" if span.ended is None else ""
    return LoggedCall(
        session,
        "spans",
        exchange,
        span.begun / NANO,
        node.ended / NANO,
        status=(int(code) if code.isdecimal() else 0) if failed else 200,
        cut=cut or ("it ended with an error" if span.error and not failed else ""),
        unread=node.work.unread,
        agent=node.agent,
        used=tuple(node.used),
    )


def _tools(nodes: Sequence[_Node]) -> list[ToolSpec]:
    """Tools that spans declare, each once, as the one that says most."""
    found: dict[str, ToolSpec] = {}
    for node in nodes:
        for tool in node.work.tools:
            held = found.get(tool.name)
            if held is None or len(tool.schema) > len(held.schema):
                found[tool.name] = tool
    return list(found.values())


# -- results ---------------------------------------------------------------------------------------


def _find_results(
    session: LoggedSession, nodes: Sequence[_Node], calls: Sequence[_Node], gaps: Counter[str]
) -> None:
    """Put the results of tools and agents to the calls that they are of."""
    asked = [call.id for node in calls if (said := node.exchange.reply) for call in said.calls]
    times = Counter(asked)
    all_read = not any(node.work.unread for node in calls)  # else it may stand in one of those
    for node in nodes:
        if node.work.kind == "other" or node in calls:
            continue
        own = node.work.call
        if not own and not node.in_tool and node.scope is not node and node.work.kind != "model":
            own = _asked_by(node, calls)
        if not own or node.work.kind == "model":
            continue
        if all_read and node.work.call and own not in times:
            gaps["call_missing"] += 1
        if times[own] > 1:  # a server that numbers the calls of each reply
            gaps["ids_repeat"] += 1
            continue
        failed = bool(node.span.error)
        text = node.work.result
        if text is None and not failed:
            continue
        text = node.span.error if text is None else text
        session.results[own] = WireMessage("tool", text, answers=own, failed=failed)


def _asked_by(node: _Node, calls: Sequence[_Node]) -> str:
    """The id of the call that a tool or an agent without one was run for; empty: nobody asked."""
    work = node.work
    name = work.tool if work.kind == "tool" else work.agent
    before = [
        call
        for call in calls
        if call.ended <= node.span.begun + _SLACK and call.scope is node.scope
    ]
    if not name or not before:
        return ""
    asking = before[-1]
    said = asking.exchange.reply
    if said is None:
        return ""
    open_calls = [
        (place, call)
        for place, call in enumerate(said.calls)
        if place not in asking.taken and call.name == name
    ]
    # Of several calls of one tool, the one with these arguments; tools may run in any order.
    fitting = [
        each for each in open_calls if work.kind == "tool" and each[1].arguments == work.arguments
    ]
    if chosen := (fitting or open_calls)[:1]:
        place, call = chosen[0]
        asking.taken.add(place)
        return call.id
    if not said.calls and re.search(rf"\b{re.escape(name)}\s*\(", said.text):
        given: Any = work.arguments
        given = {"task": given} if work.kind == "agent" and isinstance(given, str) else given
        asking.used.append(FunctionCall(node.span.id, name, given))
        return node.span.id
    return ""
