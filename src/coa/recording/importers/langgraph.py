"""Message lists of LangChain and LangGraph, states that hold one, and runs that LangSmith exported.

A message is read in whichever of four forms it was dumped: `messages_to_dict`, `dumpd`, as a plain
object (`model_dump`, states of the LangGraph server), or as OpenAI's API has it. Each message of a
model is a model call. A list does not say what a call was given: that is taken to be all that
stands before it, as it is where agents share a state, and a note says so. Runs of LangSmith do say
it; each trace is one session, however its runs are mixed with others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coa.errors import RecordError
from coa.io.runs import Json
from coa.recording.calls import LoggedCall, LoggedSession
from coa.recording.importers.reading import SECONDS, Fields, Notes, documents_of, moment_of, opening
from coa.recording.importers.team import declared_tool
from coa.recording.importers.work import NOT_CAPTURED, is_captured, led, text_of
from coa.recording.wire import (
    FunctionCall,
    WireExchange,
    WireMessage,
    WireRole,
    WireUsage,
    arguments_of,
)

_ROLES: dict[str, WireRole] = {
    **{"system": "system", "developer": "system", "SystemMessage": "system"},
    **{"human": "user", "user": "user", "HumanMessage": "user", "chat": "user"},
    **{"ai": "assistant", "assistant": "assistant", "AIMessage": "assistant"},
    **{"AIMessageChunk": "assistant", "HumanMessageChunk": "user"},
    **{"tool": "tool", "function": "tool", "ToolMessage": "tool", "FunctionMessage": "tool"},
    **{"ChatMessage": "user", "SystemMessageChunk": "system", "ToolMessageChunk": "tool"},
}
_REMOVES = ("remove", "RemoveMessage")
_THOUGHTS = ("reasoning", "thinking", "reasoning_content")
_CALLS = ("tool_use", "tool_call", "function_call", "server_tool_call")
"""Parts of a content that repeat what `tool_calls` says."""
_HOLDERS = ("values", "state", "output", "outputs", "result", "data")
"""Where a state or a list stands inside what programs write around it."""
_RUNS = ("task_id", "thread_id", "conversation_id")
"""What names a run, of which there may be several states."""
_IDS = (*_RUNS, "run_id", "id", "checkpoint_id")
CAPTURE_ADVICE = (
    "Inputs and outputs were hidden. Run the program without LANGSMITH_HIDE_INPUTS and "
    "LANGSMITH_HIDE_OUTPUTS, and without hide_inputs and hide_outputs of the client."
)


def detect(head: bytes, path: Path) -> bool:
    return _holds(opening(head))


def _holds(value: Any, depth: int = 0) -> bool:
    if depth > 4:
        return False
    if isinstance(value, list):
        return bool(value) and (_is_message(value[0]) or _holds(value[0], depth + 1))
    if not isinstance(value, dict) or "steps" in value:
        return False
    if _is_run(value):
        return True
    if isinstance(value.get("messages"), list):
        return _holds(value["messages"], depth + 1)
    held = [value.get("inputs"), *(value.get(name) for name in _HOLDERS)]
    return any(_holds(each, depth + 1) for each in held if isinstance(each, dict))


def _is_run(value: Json) -> bool:
    return isinstance(value.get("run_type"), str) and "inputs" in value


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    role, held = _unpacked(value)
    return role in _ROLES and bool(held.keys() & {"content", "tool_calls"})


def _unpacked(value: Json) -> tuple[str, Json]:
    """What kind of message an object is, and the object that has its fields."""
    if value.get("lc") is not None and isinstance(value.get("kwargs"), dict):
        path = value.get("id")
        return str(path[-1]) if isinstance(path, list) and path else "", value["kwargs"]
    if isinstance(value.get("data"), dict) and isinstance(value.get("type"), str):
        return value["type"], value["data"]
    role = value.get("role")
    if isinstance(role, str):
        return role, value
    return str(value.get("type") or ""), value


# -- reading ---------------------------------------------------------------------------------------


@dataclass
class _Conversation:
    held: Fields
    messages: list[Fields]

    def named(self, names: Sequence[str]) -> str:
        """The first of these ids that there is."""
        return next((text_of(self.held.held[n]) for n in names if self.held.held.get(n)), "")


def read(files: Sequence[Path], notes: Notes) -> Iterator[LoggedSession]:
    runs: list[Fields] = []
    for _path, where, value in documents_of(files, notes):
        found = list(_conversations(value, where, notes, runs))
        if not isinstance(value, dict | list):
            notes.add("values without a message left out", where)
        for number, each in enumerate(_longest(found, notes)):
            yield _session(each, f"{where}#{number + 1}" if number else where, notes)
    made = (_trace(name, held, notes) for name, held in _traces(runs).items())
    traces = [session for session in made if session is not None]
    calls = [call for session in traces for call in session.calls]
    if calls and all(call.unread for call in calls):
        where = ", ".join(path.name for path in files)
        raise RecordError(f"{where}: {len(calls)} model calls and no text of any. {CAPTURE_ADVICE}")
    yield from traces


def _conversations(
    value: Any, where: str, notes: Notes, runs: list[Fields], depth: int = 0
) -> Iterator[_Conversation]:
    """The lists of messages in a value; runs of LangSmith are put to those of their trace."""
    if depth > 6:
        notes.add("values that are nested too deeply left out", where)
        return
    if isinstance(value, list):
        if any(map(_is_message, value)):
            held = Fields({"messages": value}, where, notes)
            yield _Conversation(held, held.objects("messages"))
            return
        for number, each in enumerate(value, start=1):
            if isinstance(each, dict | list):
                yield from _conversations(each, f"{where}: {number}", notes, runs, depth + 1)
            else:
                notes.add("values without a message left out", f"{where}: {number}")
        return
    if not isinstance(value, dict):
        return
    held = Fields(value, where, notes)
    if _is_run(value):
        runs.append(held)
    elif isinstance(value.get("messages"), list):
        yield _Conversation(held, held.objects("messages"))
    elif isinstance(value.get("inputs"), dict) or isinstance(value.get("input"), dict):
        yield from _row(held)
    else:
        inner = next((n for n in _HOLDERS if isinstance(value.get(n), dict | list)), "")
        if inner:
            yield from _conversations(value[inner], held.at(inner), notes, runs, depth + 1)
        else:
            notes.add("values without a message left out", where)


def _row(held: Fields) -> Iterator[_Conversation]:
    """A row with what went in and what came out: of a dataset, or of a run without its type."""
    given = held.object("inputs" if "inputs" in held else "input")
    made = held.object("outputs" if "outputs" in held else "output")
    before = given.objects("messages") if "messages" in given else []
    after = made.objects("messages") if "messages" in made else []
    if "message" in made:
        after = [*after, made.object("message")]
    if "output" in made and _is_message(made.value("output")):
        after = [*after, made.object("output")]
    if before and [m.held for m in after[: len(before)]] == [m.held for m in before]:
        before = []
    if before or after:
        yield _Conversation(held, [*before, *after])
    else:
        held.notes.add("values without a message left out", held.where)


def _longest(found: list[_Conversation], notes: Notes) -> Iterator[_Conversation]:
    """Without those states that another one of the same file goes on from (a state's history)."""
    chains = [[*_so_far(each)] for each in found]
    known = {digest for chain in chains for digest in chain[:-1]}
    for each, chain in zip(found, chains, strict=True):
        if chain[-1] in known:
            notes.add("states that another one goes on from left out")
        else:
            known.add(chain[-1])
            yield each


def _so_far(each: _Conversation) -> Iterator[bytes]:
    """For each message what its run has said up to it, as a digest; the first one is of nothing."""
    digest = hashlib.sha256(each.named(_RUNS).encode("utf-8", "surrogatepass"))
    yield digest.digest()
    for message in each.messages:
        digest.update(f"{message.held}\0".encode("utf-8", "surrogatepass"))
        yield digest.digest()


# -- a list of messages --------------------------------------------------------------------------


def _session(each: _Conversation, where: str, notes: Notes) -> LoggedSession:
    messages = list(_messages(each.messages, notes))
    asked = next((m.text for m, _ in messages if m.role == "user" and m.text.strip()), "")
    name, stated = each.named(_IDS) or where, each.held.held.get("question")
    question = stated if isinstance(stated, str) and stated else asked.strip()
    about: Json = {"task_id": name, "question": question}
    about |= {"source": "langgraph", SECONDS: []}
    session = LoggedSession(name, about, end={})
    plain = [message for message, _ in messages]
    system, rest = led("", plain)
    begun = len(plain) - len(rest)
    for at, (message, held) in enumerate(messages):
        if message.role != "assistant":
            continue
        exchange = _exchange(held, message, system, plain[begun:at])
        session.calls.append(
            LoggedCall(name, "langchain", exchange, float(at), at + 0.5, agent=message.name)
        )
    if session.calls:
        notes.add("conversations whose calls are taken to have seen all messages before", where)
    else:
        notes.add("conversations without a message of a model", where)
    made = {call.id for message in plain for call in message.calls}
    for message, held in messages:
        if message.role == "tool" and message.answers not in made:
            notes.add("results of no call that is there", held.where)
        elif message.role == "tool":
            session.results.setdefault(message.answers, message)
    return session


def _exchange(
    held: Fields, reply: WireMessage, system: str, before: Sequence[WireMessage]
) -> WireExchange:
    about = held.object("response_metadata")
    model = about.text("model_name", "model", "model_id")
    stop = about.text("finish_reason", "stop_reason")
    return WireExchange(model, system, (), tuple(before), reply, _usage(held, about), stop)


def _usage(held: Fields, about: Fields) -> WireUsage:
    counted = held.object("usage_metadata")
    if counted.held:
        cached = counted.object("input_token_details").count("cache_read")
        return WireUsage(counted.count("input_tokens"), cached, counted.count("output_tokens"))
    older = about.object("token_usage") if "token_usage" in about else about.object("usage")
    return WireUsage(
        older.count("prompt_tokens", "input_tokens"),
        older.object("prompt_tokens_details").count("cached_tokens"),
        older.count("completion_tokens", "output_tokens"),
    )


def _messages(given: Sequence[Fields], notes: Notes) -> Iterator[tuple[WireMessage, Fields]]:
    """(message, the object that has its fields) of each, once."""
    seen: dict[str, Json] = {}
    for each in given:
        role, held = _unpacked(each.held)
        fields = Fields(held, each.where, notes)
        if each.held.get("lc") not in (None, 1):
            notes.add("messages of an unknown version of dumpd, read as version 1", each.where)
        if role in _REMOVES:
            notes.add("messages that only remove others left out", each.where)
            continue
        if role not in _ROLES:
            notes.add("messages of an unknown role left out", each.where)
            continue
        name = held.get("id")
        if isinstance(name, str) and name and seen.setdefault(name, held) is not held:
            if seen[name] == held:
                notes.add("messages that stand there twice left out", each.where)
                continue
            notes.add("messages that share their id", each.where)
        yield _message(_ROLES[role], fields), fields


def _message(role: WireRole, held: Fields) -> WireMessage:
    text, thought, other = _content(held)
    extra = held.object("additional_kwargs")
    own = [held.value("reasoning_content"), extra.value("reasoning_content")]
    thought = next((each for each in own if isinstance(each, str) and each), thought)
    name = held.text("name")
    if role == "tool":
        failed = held.value("status") == "error"
        answers = held.text("tool_call_id")
        return WireMessage("tool", text, answers=answers, failed=failed, name=name, other=other)
    calls: list[FunctionCall] = []
    if role == "assistant":
        made = held.objects("tool_calls") or extra.objects("tool_calls")
        calls = [_call(each) for each in (*made, *held.objects("invalid_tool_calls"))]
        if not calls and "function_call" in extra:
            calls = [_call(extra.object("function_call"))]
    return WireMessage(role, text, thought, tuple(calls), name=name, other=other)


def _call(held: Fields) -> FunctionCall:
    """A call as LangChain has it (name, args, id), or as OpenAI's API does."""
    inner = held.object("function") if "function" in held else held
    given = inner.value("args") if "args" in inner else inner.value("arguments")
    name = inner.text("name")
    if not name:
        held.notes.add("calls of a tool without a name", held.where)
    return FunctionCall(held.text("id"), name, arguments_of(given))


def _content(held: Fields) -> tuple[str, str, tuple[str, ...]]:
    """(text, reasoning, kinds of the parts that are neither) of a message."""
    value = held.value("content")
    if value is None or isinstance(value, str):
        return value or "", "", ()
    if not isinstance(value, list):
        held.wrong("content", "a text or a list of parts")
        return text_of(value), "", ()
    said: list[str] = []
    thought: list[str] = []
    other: list[str] = []
    for part in value:
        if isinstance(part, str):
            said.append(part)
            continue
        if not isinstance(part, dict):
            held.notes.add("parts of a content that are none", held.where)
            continue
        kind = part.get("type") if isinstance(part.get("type"), str) else "text"
        text = part.get("text", part.get(kind))
        if kind in ("text", "output_text", "input_text", "refusal") and isinstance(text, str):
            said.append(text)
        elif kind in _THOUGHTS:
            thought += [each for each in (part.get(n) for n in _THOUGHTS) if isinstance(each, str)]
        elif kind not in _CALLS:
            other.append(str(kind))
            held.notes.add("parts that are no text left out", held.where)
    return "\n".join(said), "\n".join(thought), tuple(other)


# -- runs of LangSmith ---------------------------------------------------------------------------


def _traces(runs: Sequence[Fields]) -> dict[str, list[Fields]]:
    """The runs of each trace; one that does not name its trace is of the one of its parents."""
    parents = {run.held.get("id"): run for run in runs if isinstance(run.held.get("id"), str)}
    found: dict[str, list[Fields]] = {}
    for run in runs:
        top, seen = run, {run.text("id")}
        while not top.held.get("trace_id") and (above := top.text("parent_run_id")) not in seen:
            seen.add(above)
            if above not in parents:
                break
            top = parents[above]
        name = top.text("trace_id", "parent_run_id", "id") or run.where
        found.setdefault(name, []).append(run)
    return found


def _trace(name: str, runs: list[Fields], notes: Notes) -> LoggedSession | None:
    """The session of a trace: the model calls among its runs, in the order of their end."""
    known: dict[str, Fields] = {}
    for run in runs:
        own = run.text("id")
        if own and (other := known.setdefault(own, run)) is not run:
            notes.add("runs that share their id, the first that ended taken", run.where)
            if "end_time" in run and "end_time" not in other:
                known[own] = run
    runs = [run for run in runs if known.get(run.text("id"), run) is run]
    for run in runs:
        parent = run.text("parent_run_id")
        if parent and parent not in known:
            notes.add("runs whose parent is not there", run.where)
    root = next((run for run in runs if not run.text("parent_run_id")), None)
    session = LoggedSession(name, {"task_id": name, "source": "langgraph"})
    models = [run for run in runs if run.text("run_type") == "llm"]
    times = [_times(run) for run in models]
    if not all(times):
        notes.add("traces whose runs have no time, in the order of the file", runs[0].where)
        times = [(float(place), place + 0.5) for place in range(len(models))]
        session.about[SECONDS] = []
    for run, (begun, ended) in zip(models, filter(None, times), strict=True):
        session.calls.append(_llm_run(run, name, begun, ended))
    if hidden := sum(call.unread == NOT_CAPTURED for call in session.calls):
        session.about["gaps"] = {"text_not_captured": hidden}
    for run in runs:
        if run.text("run_type") == "tool":
            result = _found_message(run.object("outputs").held)
            if result is not None:
                message = _message("tool", Fields(result[1], run.where, notes))
                session.results.setdefault(message.answers, message)
    if not session.calls:
        notes.add("traces without a model call left out", runs[0].where)
        return None
    session.calls.sort(key=lambda call: call.ended)
    if root is None:
        notes.add("traces whose root is not there", runs[0].where)
    elif root.text("end_time") or "outputs" in root:
        session.end = {}
        if error := root.value("error"):
            session.end = {"error": "the run ended with an error"} if error else {}
    return session


def _llm_run(run: Fields, session: str, begun: float, ended: float) -> LoggedCall:
    given = run.object("inputs").value("messages")
    if isinstance(given, list) and given and isinstance(given[0], list):
        if len(given) > 1:
            run.notes.add("runs with several prompts, the first taken", run.where)
        given = given[0]
    asked = Fields({"messages": given if isinstance(given, list) else []}, run.where, run.notes)
    sent = (message for message, _ in _messages(asked.objects("messages"), run.notes))
    system, messages = led("", sent)
    found = _found_message(run.object("outputs").held)
    extra = run.object("extra")
    about, params = extra.object("metadata"), extra.object("invocation_params")
    tools = tuple(map(declared_tool, params.objects("tools")))
    if found is None:
        exchange = WireExchange("", system, tools, messages)
        run.notes.add("runs of a model without a reply", run.where)
    else:
        held = Fields(found[1], run.where, run.notes)
        reply = _message("assistant", held)
        exchange = _exchange(held, reply, system, messages)
        model = exchange.model or about.text("ls_model_name") or params.text("model", "model_name")
        exchange = replace(exchange, model=model, tools=tools)
    agent = about.text("lc_agent_name") or _node(about.text("langgraph_checkpoint_ns"))
    status = 200 if found else 0
    unread = "" if is_captured(exchange) else NOT_CAPTURED
    return LoggedCall(
        session, "langchain", exchange, begun, ended, status, unread=unread, agent=agent
    )


def _node(namespace: str) -> str:
    """The agent of a namespace such as researcher:UUID|agent:UUID."""
    nodes = [part.partition(":")[0] for part in namespace.split("|") if part]
    return nodes[-2] if len(nodes) > 1 else ""


def _times(run: Fields) -> tuple[float, float] | None:
    """When a run began and ended; one that did not end has its beginning alone."""
    begun, ended = moment_of(run.text("start_time")), moment_of(run.text("end_time"))
    return None if begun is None else (begun.timestamp(), max(begun, ended or begun).timestamp())


def _found_message(value: Any, depth: int = 0) -> tuple[str, Json] | None:
    """The first message inside the outputs of a run."""
    if depth > 8:
        return None
    if isinstance(value, dict):
        if _is_message(value):
            return _unpacked(value)
        inner: Sequence[Any] = list(value.values())
    else:
        inner = value if isinstance(value, list) else ()
    return next((found for each in inner if (found := _found_message(each, depth + 1))), None)
