"""Spans from files: what real instrumentations wrote, in every form, and files of strangers."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coa.errors import RecordError
from coa.recording.calls import LoggedSession
from coa.recording.episode import ToolUse
from coa.recording.graph import episode_of
from coa.recording.importers import FORMATS, agents_sdk, openinference, spans
from coa.recording.importers.otlp import Telemetry, from_protobuf, read_telemetry
from coa.recording.importers.reading import Notes, head_of
from otlp_messages import BEGUN, calling, model, protobuf, request, span, text

HERE = Path(__file__).parent
CAPTURES = HERE / "span_captures"
ANSWER, FOUND = "Ada owes 108.0 euros.", "Ada owes 120 dollars."
WORK = ["manager", "researcher", "researcher", "manager", "manager"]
NAMED = (
    *("smolagents", "openai-agents", "openai-agents.traces", "openai-agents-chat", "langgraph"),
    *("openai-agents-chat.traces", "pydantic-ai-2", "pydantic-ai-5"),
)
"""Captures in which every call has its agent."""
BARE = (
    *("openai-genai", "openai-genai-events", "openai-openllmetry", "openai-openllmetry-legacy"),
    "openai-openinference",
)
"""Of a team without a framework: nothing in its spans names an agent."""


def read(*files: Path, notes: Notes | None = None) -> list[LoggedSession]:
    head = head_of(files[0], 65536)
    told = [each for each in FORMATS if each.load().detect(head, files[0])]
    assert len(told) == 1, (files[0], told)
    return list(told[0].load().read(files, notes or Notes()))  # type: ignore[arg-type]


def captured(name: str) -> LoggedSession:
    notes = Notes()
    (session,) = read(CAPTURES / f"{name}.jsonl.gz", notes=notes)
    assert not notes.counts
    assert session.end is not None
    return session


def called(session: LoggedSession) -> list[str]:
    return [call.name for each in session.calls for call in _said(each).calls]


def _said(call: Any) -> Any:
    assert call.exchange.reply is not None
    return call.exchange.reply


# -- what real instrumentations write ------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMED, *BARE])
def test_a_real_team_is_read_call_by_call(name: str) -> None:
    session = captured(name)
    calls = session.calls
    assert [call.agent for call in calls] == (WORK if name in NAMED else [""] * 5)
    assert all(call.ended >= call.begun > 1.7e9 for call in calls)
    assert [call.ended for call in calls] == sorted(call.ended for call in calls)
    asking, looking, found, converting, answering = (call.exchange for call in calls)
    assert asking.model == "gpt-4o"
    assert "euros" in asking.messages[-1].text
    assert "dollars" in looking.messages[-1].text
    assert found.messages[-1].text.endswith("120 USD")
    assert _said(calls[3]).calls[0].arguments == {"amount": 120, "currency": "EUR"}
    assert all(call.exchange.usage.prompt and call.exchange.usage.sampled for call in calls)
    assert asking.system == converting.system == answering.system != looking.system
    ends = [called(session)[-1:] == ["final_answer"], _said(calls[4]).text == ANSWER]
    assert any(ends)
    assert len({exchange.tools for exchange in (asking, converting, answering)}) == 1


@pytest.mark.parametrize("name", NAMED)
def test_tool_spans_say_what_came_back(name: str) -> None:
    session = captured(name)
    results = {
        call.name: session.results[call.id].text
        for each in session.calls
        for call in _said(each).calls
        if call.id in session.results
    }
    asked = next(each for each in results if "researcher" in each)
    assert results.pop(asked) == FOUND
    assert results["lookup"] == "120 USD"
    assert results["convert"] == "108.0"
    assert not any(result.failed for result in session.results.values())


@pytest.mark.parametrize("name", [*NAMED, *BARE])
def test_what_is_said_comes_back_word_for_word(name: str) -> None:
    """The graph finds whose words stand where by this."""
    if name in ("smolagents", "openai-genai-events"):
        return  # the one tells of calls in a text, the other leaves the text beside calls out
    session = captured(name)
    replies = [_said(call) for call in session.calls]
    for call in session.calls:
        for message in call.exchange.messages:
            if message.role == "assistant":
                assert any(
                    (message.text, message.calls) == (each.text, each.calls) for each in replies
                )


def test_smolagents_messages_are_as_its_model_was_sent_them() -> None:
    """Its own roles are the assistant's and the user's, and messages of one role are joined, as
    the proxy sees them."""
    session = captured("smolagents")
    messages = session.calls[2].exchange.messages
    assert [each.role for each in messages] == ["user", "assistant", "user"]
    assert messages[1].text.startswith("I look Ada up.\nCalling tools:\n[{'id': 'call_lookup_0'")
    assert messages[2].text == "Observation:\n120 USD"
    assert session.about["question"] == "How much does Ada owe, in euros?"
    assert session.end == {"answer": ANSWER}


def test_what_a_program_of_an_agent_ran_is_told_by_its_spans() -> None:
    session = captured("smolagents-code")
    team = ["manager", "researcher", "researcher", "manager"]
    assert [call.agent for call in session.calls] == team
    used = [[each.name for each in call.used] for call in session.calls]
    assert used == [["researcher", "convert"], ["lookup"], ["final_answer"], ["final_answer"]]
    asked, converted = session.calls[0].used
    assert asked.arguments == {"task": "How much does Ada owe, in dollars?"}
    assert converted.arguments == {"amount": 120, "currency": "EUR"}, "a loop's variable, by name"
    assert session.results[asked.id].text == FOUND
    assert session.results[converted.id].text == "108.0"
    assert {tool.name for tool in session.tools} == {"lookup", "convert", "final_answer"}
    schema = json.loads(next(tool.schema for tool in session.tools if tool.name == "convert"))
    assert schema["required"] == ["amount", "currency"]


def test_a_handoff_is_a_call_and_another_agents_reply() -> None:
    for name in ("openai-agents-handoff", "openai-agents-handoff.traces"):
        session = captured(name)
        assert [call.agent for call in session.calls] == ["manager", "researcher"]
        assert called(session) == ["transfer_to_researcher"]
        assert session.calls[1].exchange.messages[-1].role == "tool"


@pytest.mark.parametrize("form", ["console", "pb"])
def test_one_run_is_the_same_in_every_form(form: str) -> None:
    """The console exporter rounds to microseconds."""
    (told,) = read(CAPTURES / "pydantic-ai-5.jsonl.gz")
    (other,) = read(CAPTURES / f"pydantic-ai-5.{form}.gz")
    assert [call.exchange for call in told.calls] == [call.exchange for call in other.calls]
    assert [call.agent for call in told.calls] == [call.agent for call in other.calls]
    for one, another in zip(told.calls, other.calls, strict=True):
        assert one.ended == pytest.approx(another.ended, abs=2e-6)
    assert (told.name, told.results, told.end) == (other.name, other.results, other.end)


def test_the_agents_sdk_exports_responses_without_their_text(tmp_path: Path) -> None:
    lines = _lines("openai-agents.traces")
    for line in lines:
        for name in ("input", "response"):
            if line.get("span_data", {}).get("type") == "response":
                line["span_data"].pop(name)
    path = tmp_path / "traces.jsonl"
    _write(path, lines)
    with pytest.raises(RecordError, match=r"5 model calls and no text of any.*docs/otel\.md"):
        read(path)
    whole = _lines("openai-agents.traces")
    _write(path, [*lines[:1], *whole[1:]])
    (session,) = read(path)
    assert session.about["gaps"] == {"text_not_captured": 1}
    assert session.calls[0].unread == "no text was captured"
    assert session.calls[0].exchange.usage.prompt is not None


def test_group_ids_and_conversations_join_traces(tmp_path: Path) -> None:
    lines = _lines("openai-agents.traces")
    told = json.dumps(lines).replace(': "trace_', ': "trace_b').replace(': "span_', ': "span_b')
    again = json.loads(told)
    for record in (*lines, *again):
        if "span_data" not in record:
            record["group_id"] = "a talk"
    path, notes = tmp_path / "traces.jsonl", Notes()
    _write(path, [*lines, *again])
    (session,) = read(path, notes=notes)
    assert session.name == "a talk"
    assert len(session.calls) == 10
    assert list(notes.counts) == ["traces that share a conversation read as one session"]


# -- Phoenix ---------------------------------------------------------------------------------------


def _phoenix(name: str, nested: bool) -> list[dict[str, Any]]:
    """Spans as Phoenix's REST interface returns them; `nested`: with messages in lists again."""
    rows = []
    for each in read_telemetry([CAPTURES / f"{name}.jsonl.gz"], Notes()).spans:
        held = dict(each.attributes)
        kind = held.pop("openinference.span.kind")
        if nested:
            found: dict[int, dict[str, Any]] = {}
            for key in [key for key in held if key.startswith("llm.input_messages.")]:
                number, _, rest = key.removeprefix("llm.input_messages.").partition(".")
                found.setdefault(int(number), {})[rest] = held.pop(key)
            held["llm.input_messages"] = [found[number] for number in sorted(found)]
            if "metadata" in held:
                held["metadata"] = json.loads(held["metadata"])
        rows.append(
            {
                "id": "U3Bhbjox",
                "name": each.name,
                "context": {"trace_id": each.trace, "span_id": each.id},
                "span_kind": kind,
                "parent_id": each.parent or None,
                "start_time": _iso(each.begun),
                "end_time": _iso(each.ended or 0),
                "status_code": "OK",
                "status_message": "",
                "attributes": held,
                "events": [],
            }
        )
    return rows


def _iso(nanoseconds: int) -> str:
    from datetime import UTC, datetime

    whole, rest = divmod(nanoseconds, 10**9)
    at = datetime.fromtimestamp(whole, UTC).replace(microsecond=rest // 1000)
    return at.isoformat()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("name", ["langgraph", "smolagents", "smolagents-code"])
def test_exports_of_phoenix_are_the_same(tmp_path: Path, name: str, nested: bool) -> None:
    path, rows = tmp_path / "spans.json", _phoenix(name, nested)
    for document in ({"data": rows, "next_cursor": None}, rows):
        path.write_text(json.dumps(document, indent=1))
        (session,) = read(path)
        told = captured(name)
        assert [call.exchange for call in session.calls] == [call.exchange for call in told.calls]
        assert [call.agent for call in session.calls] == [call.agent for call in told.calls]
        assert session.results == told.results


def test_a_table_of_phoenix_is_the_same(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = []
    for row in _phoenix("langgraph", nested=True):
        context, held = row.pop("context"), row.pop("attributes")
        if "metadata" in held:  # a column has one type
            held["metadata"] = json.dumps(held["metadata"])
        row |= {f"context.{name}": value for name, value in context.items()}
        row |= {f"attributes.{name}": value for name, value in held.items()}
        row.pop("events")
        rows.append(row)
    names = sorted({name for row in rows for name in row})
    path = tmp_path / "spans.parquet"
    table = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    parquet.write_table(table, path)
    (session,) = read(path)
    told = captured("langgraph")
    assert [call.exchange for call in session.calls] == [call.exchange for call in told.calls]
    assert [call.agent for call in session.calls] == [call.agent for call in told.calls]


# -- what can be wrong with spans ------------------------------------------------------------------

ASKED = [text("system", "You look up."), text("user", "What?")]
SAID = calling("look", "c1", q="x")
LATER = [*ASKED, SAID, {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1"}]}]
TOOL = {
    "gen_ai.operation.name": "execute_tool",
    "gen_ai.tool.name": "look",
    "gen_ai.tool.call.id": "c1",
    "gen_ai.tool.call.result": "found",
}


def team(**more: Any) -> list[dict[str, Any]]:
    """An agent that looks something up and answers; `more` is what all its spans have."""
    agent = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "finder"}
    spans = [
        span(1, at=(0, 9), held=agent),
        model(2, 1, (1, 2), ASKED, SAID),
        span(3, 1, (3, 4), held=TOOL),
        model(4, 1, (5, 6), LATER, text("assistant", "It is found.")),
    ]
    return [{**each, **more} for each in spans]


def _lines(name: str) -> list[Any]:
    whole = gzip.decompress((CAPTURES / f"{name}.jsonl.gz").read_bytes()).decode()
    return [json.loads(line) for line in whole.splitlines()]


def _write(path: Path, lines: list[Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def sessions(path: Path, *requests: Any) -> tuple[list[LoggedSession], dict[str, int]]:
    _write(path, list(requests))
    notes = Notes()
    return read(path, notes=notes), notes.counts


def test_two_traces_interleaved_and_out_of_order_are_told_apart(tmp_path: Path) -> None:
    one, two = team(traceId="a" * 32), team(traceId="b" * 32)
    for each in two:
        each["startTimeUnixNano"] = str(int(each["startTimeUnixNano"]) + 10**8)
    mixed = [*one, *two]
    random.Random(3).shuffle(mixed)
    found, counts = sessions(tmp_path / "s.jsonl", *(request(each) for each in mixed))
    assert [each.name for each in found] == ["a" * 32, "b" * 32]
    for session in found:
        assert [_said(call).text for call in session.calls] == ["", "It is found."]
        assert session.results["c1"].text == "found"
        assert session.end == {}
    assert not counts


def test_batches_that_were_sent_again_count_once(tmp_path: Path) -> None:
    (session,), counts = sessions(tmp_path / "s.jsonl", request(*team()), request(*team()[1:]))
    assert len(session.calls) == 2
    assert counts == {"spans that were sent again counted once": 3}


def test_ids_that_repeat_are_two_spans(tmp_path: Path) -> None:
    other = model(2, 1, (7, 8), ASKED, text("assistant", "Another."))
    (session,), counts = sessions(tmp_path / "s.jsonl", request(*team(), other | {"name": "b"}))
    assert [_said(call).text for call in session.calls] == ["", "It is found.", "Another."]
    assert counts == {"ids of spans that repeat": 1}


def test_ids_of_calls_that_repeat_have_no_result_of_a_tool_span(tmp_path: Path) -> None:
    again = model(5, 1, (7, 8), ASKED, SAID)
    (session,), _ = sessions(tmp_path / "s.jsonl", request(*team(), again))
    assert session.results == {}
    assert session.about["gaps"] == {"ids_repeat": 1}


@pytest.mark.parametrize(("flags", "cut", "lost"), [(0x101, True, 1), (0x301, False, 0)])
def test_a_parent_that_never_came_means_a_cut(
    tmp_path: Path, flags: int, cut: bool, lost: int
) -> None:
    """Unless it is in another process, or nobody says where it is."""
    (session,), _ = sessions(tmp_path / "s.jsonl", request(*team(flags=flags)[1:]))
    assert (session.end is None) is cut
    assert session.about.get("gaps", {}).get("parent_missing", 0) == 3 * lost
    assert [call.agent for call in session.calls] == ["", ""]


def test_without_a_word_of_where_the_parent_is_it_is_counted_only(tmp_path: Path) -> None:
    (session,), _ = sessions(tmp_path / "s.jsonl", request(*team(flags=1)[1:]))
    assert session.end == {}
    assert session.about["gaps"] == {"parent_missing": 3}


def test_a_span_that_never_ended_means_a_cut(tmp_path: Path) -> None:
    held = team()
    del held[3]["endTimeUnixNano"]
    (session,), _ = sessions(tmp_path / "s.jsonl", request(*held))
    assert session.end is None
    assert session.about["gaps"] == {"span_unended": 1}
    assert {call.cut for call in session.calls} == {"", "its span never ended"}


def test_spans_of_logfire_that_only_began_are_not_counted_twice(tmp_path: Path) -> None:
    held = team()
    begun = {"logfire.span_type": "pending_span", "logfire.pending_parent_id": "0" * 16}
    pending = span(77, 1, (0, 0), held={**begun, "gen_ai.operation.name": "invoke_agent"})
    (session,), _ = sessions(tmp_path / "s.jsonl", request(*held, pending))
    assert (len(session.calls), session.end) == (2, {})
    (session,), _ = sessions(tmp_path / "s.jsonl", request(*held[1:], pending))
    assert (len(session.calls), session.end) == (2, None)


def test_parents_in_a_circle_are_read_all_the_same(tmp_path: Path) -> None:
    held = team()
    held[0]["parentSpanId"] = held[1]["spanId"]
    (session,), _ = sessions(tmp_path / "s.jsonl", request(*held))
    assert len(session.calls) == 2


def test_one_call_that_two_instrumentations_note_counts_once(tmp_path: Path) -> None:
    inner = model(
        9, 2, (1.1, 1.9), ASKED, SAID, **{"gen_ai.tool.definitions": '[{"name": "look"}]'}
    )
    (session,), _ = sessions(tmp_path / "s.jsonl", request(*team(), inner))
    assert len(session.calls) == 2
    assert [tool.name for tool in session.calls[0].exchange.tools] == ["look"], "it says more"


def test_a_span_around_several_calls_is_none_itself(tmp_path: Path) -> None:
    loop = model(2, 0, (0, 9), ASKED, text("assistant", "It is found."))
    inside = [model(3, 2, (1, 2), ASKED, SAID), model(4, 2, (3, 4), LATER, text("assistant", "It"))]
    (session,), _ = sessions(tmp_path / "s.jsonl", request(loop, *inside))
    assert [_said(call).text for call in session.calls] == ["", "It"]


def test_a_call_that_failed_and_a_tool_that_failed_say_so(tmp_path: Path) -> None:
    failed = span(
        5,
        1,
        (2.1, 2.2),
        held={
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "m",
            "gen_ai.input.messages": json.dumps(ASKED),
            "error.type": "429",
        },
        error="slow down",
    )
    broken = span(3, 1, (3, 4), held={**TOOL, "gen_ai.tool.call.result": ""}, error="KeyError: 'x'")
    held = team()
    (session,), _ = sessions(tmp_path / "s.jsonl", request(*held[:2], failed, broken, held[3]))
    assert [call.status for call in session.calls] == [200, 429, 200]
    assert session.calls[1].exchange.reply is None
    assert not session.calls[1].answered
    assert session.results["c1"].failed
    assert session.results["c1"].text == "KeyError: 'x'"


def test_results_without_ids_go_to_the_call_with_these_arguments(tmp_path: Path) -> None:
    """Tools of one reply may run in any order."""
    parts = [
        {"type": "tool_call", "id": each, "name": "look", "arguments": {"q": each}} for each in "ab"
    ]
    asking = model(2, 1, (1, 2), ASKED, {"role": "assistant", "parts": parts})
    ran = [
        span(
            10 + place,
            1,
            (3 + place, 4 + place),
            held={
                "gen_ai.tool.name": "look",
                "gen_ai.tool.call.arguments": json.dumps({"q": each}),
                "gen_ai.tool.call.result": f"result of {each}",
            },
        )
        for place, each in enumerate("ba")
    ]
    (session,), _ = sessions(tmp_path / "s.jsonl", request(team()[0], asking, *ran))
    assert {key: each.text for key, each in session.results.items()} == {
        "a": "result of a",
        "b": "result of b",
    }


# -- conventions that are not known ----------------------------------------------------------------

NEWER = "spans of conventions of a version that is not known, read as 1.44"


def following(address: Any, *spans: Any) -> Any:
    """A request of spans that say to follow these conventions."""
    sent = request(*spans)
    sent["resourceSpans"][0]["scopeSpans"][0]["schemaUrl"] = address
    return sent


@pytest.mark.parametrize(
    ("address", "known"),
    [
        ("https://opentelemetry.io/schemas/1.28.0", True),
        ("https://opentelemetry.io/schemas/1.44.0", True),
        ("https://opentelemetry.io/schemas/1.45.0", False),
        ("https://opentelemetry.io/schemas/2.0.0", False),
        ("https://opentelemetry.io/schemas/gen-ai/0.1.0", False),
        ("", True),
        (7, True),
    ],
)
def test_conventions_of_a_version_that_is_not_known_are_read_as_the_newest_and_counted(
    tmp_path: Path, address: Any, known: bool
) -> None:
    web = span(7, 1, (3, 4), held={"http.request.method": "GET"})  # those are no business of ours
    (session,), counts = sessions(tmp_path / "s.jsonl", following(address, *team(), web))
    assert [_said(call).text for call in session.calls] == ["", "It is found."]
    assert counts == ({} if known else {NEWER: 4})


def test_conventions_are_told_by_protobuf_too() -> None:
    address = b"https://opentelemetry.io/schemas/2.0.0"
    scoped = b"\x1a" + bytes([len(address)]) + address
    group = b"\x12" + bytes([len(scoped)]) + scoped
    read = from_protobuf(b"\x0a" + bytes([len(group)]) + group, "traces")
    assert read["resourceSpans"][0]["scopeSpans"][0]["schemaUrl"] == address.decode()


def test_operations_that_are_not_known_are_model_calls_by_what_they_say_or_nothing(
    tmp_path: Path,
) -> None:
    held = team()
    _set(held[1], "gen_ai.operation.name", "converse")
    dance = span(7, 1, (3, 4), held={"gen_ai.operation.name": "dance"})
    plan = span(8, 1, (3, 4), held={"gen_ai.operation.name": "plan"})
    (session,), counts = sessions(tmp_path / "s.jsonl", request(*held, dance, plan))
    assert [call.agent for call in session.calls] == ["finder", "finder"]
    assert session.results["c1"].text == "found"
    assert counts == {
        "operations that are not known, read as model calls": 1,
        "operations that are not known, of which only the place is read": 1,
    }


def _set(held: Any, name: str, value: str | None) -> None:
    """Give a span of OTLP another attribute, or none."""
    held["attributes"] = [each for each in held["attributes"] if each["key"] != name]
    if value is not None:
        held["attributes"].append({"key": name, "value": {"stringValue": value}})


@pytest.mark.parametrize(
    ("name", "strange"),
    [
        ("gen_ai.input.messages", [{"role": "user", "items": ["What?"]}]),
        ("gen_ai.output.messages", [{"role": "assistant", "words": "It is found."}]),
        ("gen_ai.input.messages", [{"role": "user", "parts": [{"type": "text", "value": "x"}]}]),
    ],
)
def test_messages_of_a_form_that_is_not_known_are_counted(
    tmp_path: Path, name: str, strange: Any
) -> None:
    held = team()
    _set(held[3], name, json.dumps(strange))
    (session,), counts = sessions(tmp_path / "s.jsonl", request(*held))
    assert counts == {"model calls with messages of a form that is not known": 1}
    assert len(session.calls) == 2 and "gaps" not in session.about
    assert episode_of(session).meta["gaps"]["not_text"] == 1


def test_messages_that_are_all_of_a_form_that_is_not_known_are_no_content_capture_that_is_off(
    tmp_path: Path,
) -> None:
    held = team()
    for each in (held[1], held[3]):
        _set(each, "gen_ai.input.messages", json.dumps([{"role": "user", "items": ["What?"]}]))
        _set(each, "gen_ai.output.messages", json.dumps([{"role": "assistant", "items": ["x"]}]))
    message = r"2 model calls and no text of any: their messages are of a form that is not known\."
    with pytest.raises(RecordError, match=message):
        sessions(tmp_path / "s.jsonl", request(*held))
    for each in (held[1], held[3]):  # they may have gone to attributes of another name
        for name in ("gen_ai.input.messages", "gen_ai.output.messages"):
            _set(each, name, None)
    address = "https://opentelemetry.io/schemas/2.0.0"
    with pytest.raises(RecordError, match=r"no text of any\..*conventions are of a version not"):
        sessions(tmp_path / "s.jsonl", following(address, *held))


def test_messages_with_roles_alone_are_content_capture_that_is_off(tmp_path: Path) -> None:
    held = team()
    for each in (held[1], held[3]):
        _set(each, "gen_ai.input.messages", json.dumps([{"role": "user", "parts": []}]))
        _set(each, "gen_ai.output.messages", json.dumps([{"role": "assistant", "content": None}]))
    with pytest.raises(RecordError, match=r"2 model calls and no text.*Content capture was off"):
        sessions(tmp_path / "s.jsonl", request(*held))


def test_spans_of_openinference_of_an_unknown_kind_are_model_calls_by_what_they_say_or_nothing(
    tmp_path: Path,
) -> None:
    rows, told = _phoenix("langgraph", nested=False), captured("langgraph")
    first = next(row for row in rows if row["span_kind"] == "LLM")
    chain = next(row for row in rows if row["span_kind"] == "CHAIN" and not row["parent_id"])
    first["span_kind"], chain["span_kind"] = "CONVERSE", "DANCE"
    (session,), counts = sessions(tmp_path / "s.jsonl", *rows)
    assert [call.exchange for call in session.calls] == [call.exchange for call in told.calls]
    assert counts == {
        "spans of an unknown kind, read as model calls": 1,
        "spans of an unknown kind, of which only the place is read": 1,
    }


def test_messages_of_openinference_of_an_unknown_form_are_counted(tmp_path: Path) -> None:
    rows = _phoenix("langgraph", nested=False)
    said = "llm.output_messages.0.message"
    held = next(
        row["attributes"] for row in rows if row["attributes"].get(f"{said}.content") == ANSWER
    )
    held[f"{said}.words"] = held.pop(f"{said}.content")
    (session,), counts = sessions(tmp_path / "s.jsonl", *rows)
    assert counts == {"model calls with messages of a form that is not known": 1}
    assert len(session.calls) == 5


def test_of_two_conventions_in_one_span_that_which_is_known_counts(tmp_path: Path) -> None:
    held = team()
    for each in held:
        _set(each, "openinference.span.kind", "DANCE")
    (session,), counts = sessions(tmp_path / "s.jsonl", request(*held))
    assert [call.agent for call in session.calls] == ["finder", "finder"] and not counts
    assert session.results["c1"].text == "found"


# -- references to nothing -------------------------------------------------------------------------


def test_a_tool_that_ran_for_a_call_that_no_reply_makes_is_a_gap(tmp_path: Path) -> None:
    stray = span(7, 1, (3, 4), held={**TOOL, "gen_ai.tool.call.id": "nobody"})
    (session,), counts = sessions(tmp_path / "s.jsonl", request(*team(), stray))
    assert session.about["gaps"] == {"call_missing": 1} and not counts
    episode = episode_of(session)
    assert [use.tool for use in episode.events if isinstance(use, ToolUse)] == ["look"]
    rows = _phoenix("langgraph", nested=False)
    tool = next(row["attributes"] for row in rows if row["span_kind"] == "TOOL")
    tool["output.value"] = tool["output.value"].replace("call_lookup", "nobody")
    (session,), _ = sessions(tmp_path / "p.jsonl", *rows)
    assert session.about["gaps"] == {"call_missing": 1}


def test_links_to_nothing_change_nothing(tmp_path: Path) -> None:
    link = {"traceId": "f" * 32, "spanId": "f" * 16}
    (session,), counts = sessions(tmp_path / "s.jsonl", request(*team(links=[link])))
    assert (len(session.calls), session.end, counts) == (2, {}, {})
    assert "gaps" not in session.about


def test_log_records_of_a_span_that_is_not_there_are_counted(tmp_path: Path) -> None:
    body = {"name": "gen_ai.user.message", "traceId": "f" * 32, "spanId": "f" * 16}
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": [body]}]}]}
    (session,), counts = sessions(tmp_path / "s.jsonl", request(*team()), logs)
    assert len(session.calls) == 2
    assert counts == {"log records of no span left out": 1}


# -- summaries in place of earlier turns -----------------------------------------------------------


def _summed_up(*parts: Any, **held: Any) -> list[Any]:
    """A run in which a server sums up what came before, `parts` being how it says so."""
    spoken = {"role": "assistant", "parts": [*parts, *SAID["parts"]]}
    kept = [*ASKED, spoken, LATER[-1], text("user", "And now?")]
    answer = {"role": "assistant", "parts": [*held.get("also", ()), _text("It is found again.")]}
    return [
        team()[0],
        model(2, 1, (1, 2), [*ASKED, text("assistant", "Let me think about that.")], spoken),
        span(3, 1, (3, 4), held=TOOL),
        model(4, 1, (5, 6), kept, answer),
    ]


def _text(words: str) -> Any:
    return {"type": "text", "content": words}


def test_a_summary_stands_in_place_of_the_turns_before_it_and_nobody_said_it(
    tmp_path: Path,
) -> None:
    part = {"type": "compaction", "id": "cmp", "content": "They look for something."}
    (session,), counts = sessions(tmp_path / "s.jsonl", request(*_summed_up(part)))
    first, second = (call.exchange for call in session.calls)
    assert not counts and "gaps" not in session.about
    assert (first.reply.text, first.reply.other) == ("", ()) if first.reply else False
    assert (second.system, [(m.role, m.text) for m in second.messages]) == (
        "You look up.",
        [
            ("user", "They look for something."),
            ("assistant", ""),
            ("tool", ""),
            ("user", "And now?"),
        ],
    )
    episode = episode_of(session)
    assert [m.text for _, m in episode.model_calls()] == ["", "It is found again."]
    assert [use.tool for use in episode.events if isinstance(use, ToolUse)] == ["look"]
    assert "gaps" not in episode.meta and episode.answer == "It is found again."
    place = episode.calls[1]
    given = [message.text for message in episode.messages_of(place)]
    assert "They look for something." in given and "What?" not in given


def test_a_summary_that_its_server_does_not_show_is_a_gap_by_its_own_name(tmp_path: Path) -> None:
    for part in ({"type": "compaction"}, {"type": "compaction", "id": "cmp", "content": None}):
        (session,), counts = sessions(tmp_path / "s.jsonl", request(*_summed_up(part, also=[part])))
        assert session.about["gaps"] == {"summary_hidden": 1} and not counts
        assert session.calls[1].exchange.messages[0].text == "What?"
        assert episode_of(session).meta["gaps"] == {"summary_hidden": 1}


def test_a_reply_that_is_nothing_but_a_summary_is_a_call_that_was_answered(tmp_path: Path) -> None:
    part = {"type": "compaction", "content": "They look for something."}
    held = team()
    alone = model(5, 1, (2.1, 2.2), ASKED, {"role": "assistant", "parts": [part]})
    (session,), _ = sessions(tmp_path / "s.jsonl", request(*held, alone))
    assert [call.answered for call in session.calls] == [True] * 3
    assert "call_failed" not in episode_of(session).meta.get("gaps", {})


# The same trouble in files that are no OTLP: traces of the Agents SDK, and exports of Phoenix.

FORMS: dict[str, Callable[[], list[Any]]] = {
    "openai-agents.traces": lambda: _lines("openai-agents.traces"),
    "langgraph": lambda: _phoenix("langgraph", nested=False),
}


def _other_trace(lines: list[Any]) -> list[Any]:
    """The same run as another trace."""
    own = lines[0].get("trace_id") or lines[0]["context"]["trace_id"]
    other = own[:-8] + "0000abcd"
    made: list[Any] = json.loads(json.dumps(lines).replace(own, other))
    return made


@pytest.mark.parametrize("form", FORMS)
def test_interleaved_traces_of_other_files_are_told_apart(tmp_path: Path, form: str) -> None:
    lines = FORMS[form]()
    mixed = [*lines, *_other_trace(lines)]
    random.Random(5).shuffle(mixed)
    found, counts = sessions(tmp_path / "s.jsonl", *mixed)
    told = captured(form)
    assert len({each.name for each in found}) == 2 and not counts
    for session in found:
        assert [call.exchange for call in session.calls] == [call.exchange for call in told.calls]
        assert [call.agent for call in session.calls] == WORK
        assert (session.results, session.end) == (told.results, told.end)


@pytest.mark.parametrize("form", FORMS)
def test_spans_of_other_files_that_stand_there_twice_count_once(tmp_path: Path, form: str) -> None:
    lines = FORMS[form]()
    (session,), counts = sessions(tmp_path / "s.jsonl", *lines, *lines)
    assert [call.exchange for call in session.calls] == [c.exchange for c in captured(form).calls]
    spans_of = [each for each in lines if each.get("object") != "trace"]
    assert counts == {"spans that were sent again counted once": len(spans_of)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("timed", [True, False])
def test_spans_of_other_files_that_only_share_their_id_are_kept_apart(
    tmp_path: Path, form: str, timed: bool
) -> None:
    """Be it that nobody knows when they began."""
    lines, told = FORMS[form](), captured(form)
    models = [
        each
        for each in lines
        if each.get("span_kind") == "LLM" or each.get("span_data", {}).get("type") == "response"
    ]
    for each in (models[0], models[-1]):
        if "context" in each:
            each["context"]["span_id"] = models[0]["context"]["span_id"]
        else:
            each["id"] = models[0]["id"]
        if not timed:
            each |= {"start_time": None, "started_at": None, "name": "call"}
    (session,), counts = sessions(tmp_path / "s.jsonl", *lines)
    assert counts == {"ids of spans that repeat": 1}
    assert [call.exchange for call in session.calls] == [call.exchange for call in told.calls]
    assert [call.agent for call in session.calls] == WORK


@pytest.mark.parametrize(("form", "ended"), [("openai-agents.traces", None), ("langgraph", {})])
def test_parents_that_are_missing_in_other_files_are_counted(
    tmp_path: Path, form: str, ended: Any
) -> None:
    """The SDK writes all spans of its process, so that one that is missing means a cut."""
    lines = FORMS[form]()
    roots = {each.get("id") for each in lines if not each.get("parent_id")}
    tops = (
        {(each.get("context") or {}).get("span_id") for each in lines if not each["parent_id"]}
        if form == "langgraph"
        else roots
    )
    rest = [
        each for each in lines if each.get("object") == "trace" or each["parent_id"] is not None
    ]
    children = sum(each.get("parent_id") in tops for each in rest)
    (session,), counts = sessions(tmp_path / "s.jsonl", *rest)
    assert len(session.calls) == 5 and not counts
    assert session.about["gaps"] == {"parent_missing": children} and children
    assert session.end == ended


@pytest.mark.parametrize("form", FORMS)
def test_other_files_that_are_cut_keep_what_is_whole_or_say_so(tmp_path: Path, form: str) -> None:
    lines, path, notes = FORMS[form](), tmp_path / "s.json", Notes()
    _write(path, lines)
    path.write_bytes(path.read_bytes()[:-60])
    assert len(read(path, notes=notes)) == 1
    assert notes.counts == {"files that end in the middle of a record": 1}
    whole = gzip.compress("".join(json.dumps(each) + "\n" for each in lines).encode(), mtime=0)
    path.write_bytes(whole[:-20])
    notes = Notes()
    assert len(read(path, notes=notes)) == 1
    assert notes.counts["gzip files that are cut, read up to there"] == 1
    path.write_text(json.dumps({"data": lines}, indent=1)[:-60])
    reader = openinference if form == "langgraph" else agents_sdk
    with pytest.raises(RecordError, match=r"no span, .* ends in the middle of a record: it is cut"):
        list(reader.read([path], Notes()))


def test_phoenix_without_texts_is_content_capture_that_is_off(tmp_path: Path) -> None:
    rows = _phoenix("langgraph", nested=False)
    for row in rows:
        held = row["attributes"]
        said = ("llm.input_messages", "llm.output_messages", "input.", "output.")
        row["attributes"] = {n: v for n, v in held.items() if not n.startswith(said)}
    with pytest.raises(RecordError, match=r"5 model calls and no text.*OPENINFERENCE_HIDE_\*"):
        sessions(tmp_path / "s.jsonl", *rows)


def test_generations_whose_texts_were_hidden_say_what_hid_them(tmp_path: Path) -> None:
    lines = _lines("openai-agents-chat.traces")
    for line in lines:
        if line.get("span_data", {}).get("type") == "generation":
            line["span_data"] |= {"input": None, "output": None}
    with pytest.raises(RecordError, match=r"no text of any.*trace_include_sensitive_data=False"):
        sessions(tmp_path / "s.jsonl", *lines)


def test_spans_of_a_type_that_is_new_are_counted(tmp_path: Path) -> None:
    lines = _lines("openai-agents.traces")
    turns = [line for line in lines if line.get("span_data", {}).get("type") == "custom"]
    for line in turns:
        line["span_data"]["type"] = "dance"
    (session,), counts = sessions(tmp_path / "s.jsonl", *lines)
    assert counts == {"spans of an unknown type, of which only the place is read": len(turns)}
    assert [call.agent for call in session.calls] == WORK


def test_a_handoff_to_nobody_is_a_gap(tmp_path: Path) -> None:
    lines = _lines("openai-agents-handoff.traces")
    gone = [line for line in lines if "researcher" in json.dumps(line.get("span_data", {}))]
    inner = {line["id"] for line in lines if line.get("span_data", {}).get("name") == "researcher"}
    kept = [
        line for line in lines if line.get("parent_id") not in inner and line["id"] not in inner
    ]
    kept = [line for line in kept if not (line in gone and line["span_data"]["type"] == "handoff")]
    found, _ = sessions(tmp_path / "s.jsonl", *kept)
    (session,) = found
    session.calls = [call for call in session.calls if call.agent == "manager"]
    episode = episode_of(session)
    assert episode.meta["gaps"]["result_missing"] == 1
    assert [agent.name for agent in episode.agents] == ["manager"]


def test_a_run_whose_outermost_span_failed_is_no_success(tmp_path: Path) -> None:
    held = team()
    held[0]["status"] = {"code": 2, "message": "ValueError: secret words"}
    (session,), _ = sessions(tmp_path / "s.jsonl", request(*held))
    assert session.end == {"error": "the run ended with an error"}
    held[0].pop("status")
    held[2]["status"] = {"code": 2, "message": "a tool that failed"}
    (session,), _ = sessions(tmp_path / "s.jsonl", request(*held))
    assert session.end == {}


@pytest.mark.parametrize("at", [None, "", "-5", "1" + "0" * 400])
def test_times_that_are_none_are_no_seconds(tmp_path: Path, at: Any) -> None:
    held = team()
    for each in held:
        each["startTimeUnixNano"] = at
    (session,), _ = sessions(tmp_path / "s.jsonl", request(*held))
    assert len(session.calls) == 2
    assert session.about["seconds_known"] == []


def test_what_a_tool_is_said_to_have_printed_may_be_no_text_of_python(tmp_path: Path) -> None:
    printed = {"openinference.span.kind": "TOOL", "tool.name": "look"}
    printed["output.value"] = r"content='\N{no such name}' tool_call_id='c1'"
    held = [*team()[:2], span(3, 1, (3, 4), held=printed), team()[3]]
    (session,), counts = sessions(tmp_path / "s.jsonl", request(*held))
    assert len(session.calls) == 2
    assert counts == {"spans whose content cannot be read left out (SyntaxError)": 1}


def test_a_span_that_is_nested_too_deeply_is_left_out() -> None:
    deep: Any = {"stringValue": "x"}
    for _ in range(3000):
        deep = {"arrayValue": {"values": [deep]}}
    held = team()
    held[2]["attributes"].append({"key": "deep", "value": deep})
    found = Telemetry()
    assert found.add(request(*held)) and len(found.spans) == 3
    assert found.notes.lines() == ["spans that cannot be read left out: 1 (first: RecursionError)"]


def test_content_capture_that_is_off_says_what_to_set(tmp_path: Path) -> None:
    held = team()
    for each in held:
        each["attributes"] = [a for a in each["attributes"] if "messages" not in a["key"]]
    with pytest.raises(
        RecordError,
        match=r"2 model calls and no text of any\. Content capture was off\. Run the program with "
        r"OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=SPAN_ONLY",
    ):
        sessions(tmp_path / "s.jsonl", request(*held))
    (session,), _ = sessions(tmp_path / "s.jsonl", request(*held[:2], *team()[2:]))
    assert session.about["gaps"] == {"text_not_captured": 1}


def test_openinference_that_hides_texts_is_content_capture_that_is_off(tmp_path: Path) -> None:
    held = {
        "openinference.span.kind": "LLM",
        "input.value": "__REDACTED__",
        "output.value": "__REDACTED__",
        "llm.model_name": "m",
    }
    with pytest.raises(RecordError, match=r"1 model calls and no text.*OPENINFERENCE_HIDE_\*"):
        sessions(tmp_path / "s.jsonl", request(span(1, held=held)))


def test_spans_without_a_model_call_say_who_wrote_them(tmp_path: Path) -> None:
    with pytest.raises(
        RecordError, match=r"found 1 spans \(written by tests\) and no model call among them"
    ):
        sessions(tmp_path / "s.jsonl", request(span(1, held={"http.method": "GET"})))


def test_calls_with_nothing_around_them_are_noted(tmp_path: Path) -> None:
    each = [
        request(model(2, 0, (n, n + 1), ASKED, SAID) | {"traceId": f"{n + 1:032x}"})
        for n in range(3)
    ]
    found, counts = sessions(tmp_path / "s.jsonl", *each)
    assert len(found) == 3
    ((kind, times),) = counts.items()
    assert (kind[:54], times) == ("traces of one model call with nothing around it (if one", 3) or (
        kind.startswith("traces of one model call") and times == 3
    )


def test_a_cut_file_keeps_what_is_whole(tmp_path: Path) -> None:
    path, notes = tmp_path / "s.jsonl", Notes()
    whole = "".join(json.dumps(request(each)) + "\n" for each in team())
    path.write_text("no JSON at all\n" + whole[:-40])
    with pytest.raises(AssertionError):
        read(path)  # what it begins with is no JSON, so that nobody takes it
    path.write_text(whole[:200].replace("{", "{{", 1).replace("\n", "") + "\n" + whole[:-40])
    (session,) = list(spans.read([path], notes))
    assert isinstance(session, LoggedSession)
    assert len(session.calls) == 1
    assert notes.counts == {
        "lines that are no JSON left out": 1,
        "files that end in the middle of a record": 1,
    }


@pytest.mark.parametrize("framing", ["collector", "varint", "alone"])
def test_protobuf_is_read_in_every_framing(tmp_path: Path, framing: str) -> None:
    path = tmp_path / "s.pb"
    more = {"list": ["a", "b"], "yes": True, "less": -3, "half": 0.5, "in": {"a": 1}}
    held = [request(*team()[:2]), request(span(8, 1, held=more), *team()[2:])]
    sent = [protobuf(each) for each in held]
    if framing == "collector":
        path.write_bytes(b"".join(len(each).to_bytes(4, "big") + each for each in sent))
    elif framing == "varint":
        from otlp_messages import _number

        path.write_bytes(b"".join(_number(len(each)) + each for each in sent))
    else:
        path.write_bytes(b"".join(sent))
    (session,) = read(path)
    other = tmp_path / "s.jsonl"
    _write(other, held)
    (told,) = read(other)
    assert (session.calls, session.results) == (told.calls, told.results)
    found = read_telemetry([path], Notes()).spans
    assert next(each.attributes for each in found if each.id.endswith("8")) == more
    assert [each.begun for each in found][:1] == [BEGUN]


def test_protobuf_that_is_cut_keeps_what_is_whole(tmp_path: Path) -> None:
    path, notes = tmp_path / "s.pb", Notes()
    sent = [protobuf(request(each)) for each in team()]
    path.write_bytes(b"".join(len(each).to_bytes(4, "big") + each for each in sent)[:-5])
    (session,) = read(path, notes=notes)
    assert len(session.calls) == 1
    assert notes.counts == {"files that end in the middle of a record": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "found no span, expected spans of OpenTelemetry"),
        (b"[]", "found no span"),
        (b'{"resourceSpans": []}', "found no span"),
        (b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"name": 1}]}]}]}', "found no span"),
        (b"\x00\x01\x02nothing", "neither JSON nor protobuf of OpenTelemetry"),
        (b"\x28\xb5\x2f\xfd0000", "is packed with zstd, expected plain or gzip"),
        (b"PAR1 and no more", "is no parquet that can be read"),
        (b"\x1f\x8b\x08\x00cut", "not a whole gzip file"),
    ],
)
def test_a_file_without_spans_says_what_was_expected(
    tmp_path: Path, content: bytes, message: str
) -> None:
    if content[:4] == b"PAR1":
        pytest.importorskip("pyarrow")
    path = tmp_path / "s"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=message):
        list(spans.read([path], Notes()))
    with pytest.raises(RecordError):
        list(agents_sdk.read([path], Notes()))


def test_a_bad_file_among_several_is_left_out(tmp_path: Path) -> None:
    good, bad, notes = tmp_path / "a.jsonl", tmp_path / "b.jsonl", Notes()
    _write(good, [request(*team())])
    bad.write_text("{}\n")
    assert len(read(good, bad, notes=notes)) == 1
    assert any(kind.startswith("files left out (found no span") for kind in notes.counts)


def test_a_trace_may_be_spread_over_files(tmp_path: Path) -> None:
    one, two = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    _write(one, [request(*team()[:2])])
    _write(two, [request(*team()[2:])])
    (session,) = read(one, two)
    assert (len(session.calls), session.end) == (2, {})


@pytest.mark.parametrize(
    "name",
    [
        "smolagents-code",
        "langgraph",
        "pydantic-ai-5",
        "openai-genai-events",
        "openai-agents.traces",
    ],
)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 10**9))
def test_files_that_were_tampered_with_raise_nothing_but_record_errors(
    tmp_path_factory: pytest.TempPathFactory, name: str, seed: int
) -> None:
    rng = random.Random(seed)
    documents = _lines(name)
    places: list[tuple[Any, Any]] = []

    def collect(held: Any) -> None:
        for key in range(len(held)) if isinstance(held, list) else list(held):
            places.append((held, key))
            if isinstance(held[key], dict | list):
                collect(held[key])

    collect(documents)
    for _ in range(rng.randint(1, 12)):
        held, key = rng.choice(places)
        if isinstance(held, dict) and key not in held:
            continue
        if isinstance(held, list) and key >= len(held):
            continue
        if rng.random() < 0.2:
            del held[key]
        else:
            held[key] = rng.choice(_ODD)(rng)
    folder = tmp_path_factory.mktemp("tampered")
    path = folder / "s.jsonl"
    written = "".join(json.dumps(line) + "\n" for line in documents)
    path.write_text(written[: rng.randint(1, len(written))] if rng.random() < 0.3 else written)
    reader = agents_sdk if name.endswith("traces") else rng.choice([spans, openinference])
    try:
        for session in reader.read([path], Notes()):
            assert isinstance(session, LoggedSession)
            assert all(call.exchange.reply is None or call.answered for call in session.calls)
    except RecordError as wrong:
        assert str(path) in str(wrong) or path.name in str(wrong)


_ODD: tuple[Callable[[random.Random], Any], ...] = (
    lambda rng: None,
    lambda rng: rng.choice([0, -1, 10**30, 10**400, 1.5, float("inf"), True]),
    lambda rng: rng.choice(["", "{", "[1,", "\ud800", "x" * 50, "[" * 2000]),
    lambda rng: rng.choice([[], {}, [[]], [None], {"": {}}, [{"parts": 3}], {"content": [1]}]),
)


@settings(max_examples=150, deadline=None)
@given(put=st.binary(max_size=200), at=st.integers(0, 2000), cut=st.booleans())
def test_tampered_protobuf_raises_nothing_but_record_errors(put: bytes, at: int, cut: bool) -> None:
    sent = protobuf(request(*team()))
    place = at % len(sent)
    sent = sent[:place] if cut else sent[:place] + put + sent[place + len(put) :]
    for kind in ("traces", "logs"):
        try:
            from_protobuf(sent, kind)
        except RecordError as wrong:
            assert "protobuf" in str(wrong) or "wire type" in str(wrong)
