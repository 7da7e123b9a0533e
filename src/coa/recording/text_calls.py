"""Calls of tools that a program writes as text, read as calls.

Not every framework speaks of tools in the fields of the API. smolagents repeats native calls as
"Calling tools:" and their results as "Observation:"; its code-writing agents write a program where
others write a call (programs.py reads it); CrewAI and older LangChain agents write
"Action: ... Action Input: ...", "Observation: ..." and "Final Answer: ...". Here such texts become
the calls and results that they are, where nothing else can be meant; every other text stays text.
Likewise what a model thinks aloud, between marks that its server leaves in the reply.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from coa.io.runs import Json
from coa.recording.episode import ToolSpec
from coa.recording.programs import PYTHON, around_program, functions_in, program_in
from coa.recording.wire import FunctionCall, WireExchange, WireMessage, arguments_of

FINAL = "final_answer"
"""The call that a "Final Answer:" becomes."""
_CALLING = "Calling tools:\n"
_OBSERVED = "Observation:\n"
_FAILED = re.compile(r"(?:\A|\n)Call id: (?P<id>[^\n]*)\nError:\n|\AError:\n")
_LOST = re.compile(r"\n(?=Error:\n)")
_ADVICE = "\nNow let's retry: take care not to repeat previous errors!"
"""What smolagents puts after the text of an error."""
_ASKS = re.compile(
    r"\n(?=Now write your updated facts below, taking|"
    r"Based on the above, please provide an answer to the following user task:)"
)
"""What smolagents asks beside a conversation, for a new plan or a last answer."""
_ACTION = re.compile(
    r"^[ \t]*(?:\*\*)?Action:?(?:\*\*)?:?[ \t]*(?P<name>[^\n]+?)[ \t]*\n+"
    r"[ \t]*(?:\*\*)?Action Input:?(?:\*\*)?:?[ \t]*(?P<input>.*?)[ \t]*"
    r"(?=\n+[ \t]*Observation:|\Z)",
    re.M | re.S,
)
_ANSWER = re.compile(r"^[ \t]*(?:\*\*)?Final Answer:(?:\*\*)?[ \t]*(?P<text>.*)\Z", re.M | re.S)
_SEEN = re.compile(r"\n+[ \t]*Observation:[ \t]*")


_ALOUD = re.compile(
    r"\A(?:\s*<think(?:ing)?>)?(?P<thought>(?:(?!<think).)*?)</think(?:ing)?>\s*", re.S
)
"""Templates of reasoning models often end with the opening mark, so that replies do not have it."""


_DECLARED = re.compile(
    r"^Tool Name: (?P<name>[^\n]+)\nTool Arguments: (?P<schema>\{[^\n]*\})\n"
    r"Tool Description: (?P<about>.*?)(?=\n(?:Tool Name: |\n)|\Z)",
    re.M | re.S,
)
"""How CrewAI describes a tool to a model that takes no native ones."""


def tools_in(prompt: str) -> Iterator[ToolSpec]:
    """The tools that a prompt describes, where they are not declared."""
    for found in _DECLARED.finditer(prompt):
        try:
            schema = ast.literal_eval(found["schema"])
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            schema = _input(found["schema"])
        declared = json.dumps(schema, sort_keys=True) if isinstance(schema, dict) else ""
        yield ToolSpec(found["name"].strip(), found["about"].strip(), "json", declared)


# -- what a model wrote ------------------------------------------------------------------------


def thought_apart(message: WireMessage) -> WireMessage:
    """A message with what a model thought aloud before its words as its reasoning."""
    if message.role != "assistant" or "</think" not in message.text:
        return message
    if (found := _ALOUD.match(message.text)) is None:
        return message
    thought = "\n".join(filter(None, (message.reasoning, found["thought"].strip())))
    return replace(message, text=message.text[found.end() :], reasoning=thought)


def read_reply(reply: WireMessage, exchange: WireExchange) -> WireMessage:
    """A reply with the calls that it writes as text; its text stays as it is."""
    if reply.calls or exchange.tools or not reply.text:
        return reply
    if functions_in(exchange.system):
        code = program_in(reply.text)
        return replace(reply, calls=(FunctionCall("", PYTHON, code),)) if code else reply
    prompts = [exchange.system, *(each.text for each in exchange.messages if each.role == "user")]
    if any("Action Input:" in each for each in prompts):
        return replace(reply, calls=tuple(_action(reply.text, prompts)))
    if any("Final Answer:" in each for each in prompts) and (ends := _ANSWER.search(reply.text)):
        return replace(reply, calls=(_final(ends),))
    return reply


def said_beside(reply: WireMessage, read: WireMessage) -> str:
    """What a reply says beside its calls."""
    if not read.calls or reply.calls:
        return reply.text
    if read.calls[0].name == PYTHON:
        return around_program(reply.text)
    found = _ANSWER.search(reply.text) or _ACTION.search(reply.text)
    before = reply.text[: found.start()] if found else reply.text
    return before.strip().removeprefix("Thought:").strip().strip("`").strip()


def _action(text: str, prompts: Sequence[str]) -> Iterator[FunctionCall]:
    """The one call that a text in the form of ReAct asks for."""
    if ends := _ANSWER.search(text):
        yield _final(ends)
    elif len(found := list(_ACTION.finditer(text))) == 1:
        name = found[0]["name"].strip("`*'\" ")
        if any(name in prompt for prompt in prompts):
            yield FunctionCall("", name, _input(found[0]["input"]))


def _final(found: re.Match[str]) -> FunctionCall:
    return FunctionCall("", FINAL, {"answer": found["text"].strip().removesuffix("```").strip()})


def _input(text: str) -> Json | str:
    return arguments_of(text.strip().strip("`").strip())


# -- what a program sends ----------------------------------------------------------------------


def read_conversation(messages: Sequence[WireMessage]) -> tuple[WireMessage, ...]:
    """A conversation with calls and results that are written as text read as such."""
    found: list[WireMessage] = []
    for message in messages:
        last = found[-1] if found else None
        message = thought_apart(message)
        if message.role == "assistant" and not message.calls:
            found += _said(message)
        elif message.role == "user" and last and last.role == "assistant":
            found += _observed(message, last.calls)
        elif message.role == "user" and _ADVICE in message.text:
            # The reply was left out, so the error is joined to the job that stands before it.
            found += (replace(message, text=text) for text in _LOST.split(message.text))
        else:
            found.append(message)
    return tuple(found)


def lost_error(message: WireMessage) -> str:
    """What went wrong with a reply that smolagents left out of the conversation."""
    if message.role != "user" or not message.text.startswith("Error:\n"):
        return ""
    return message.text.removeprefix("Error:\n").partition(_ADVICE)[0].strip()


def _said(message: WireMessage) -> Iterator[WireMessage]:
    text = message.text
    before, marked, after = text.rpartition(_CALLING)
    if marked and (not before or before.endswith("\n")) and (calls := _listed(after)):
        yield replace(message, text=before.strip(), calls=calls)
        return
    action = _ACTION.search(text)
    seen = _SEEN.search(text, action.end()) if action else None
    if action is None or seen is None:
        yield message
        return
    name = action["name"].strip("`*'\" ")
    called = FunctionCall("", name, _input(action["input"]))
    yield replace(message, text=text[: seen.start()].rstrip(), calls=(called,))
    yield WireMessage("tool", text[seen.end() :].strip())


def _listed(text: str) -> tuple[FunctionCall, ...]:
    """The calls of a list as Python prints it; none where it is something else."""
    try:
        listed = ast.literal_eval(text.strip())
        made = [(str(each["id"]), each["function"]) for each in listed]
        return tuple(FunctionCall(at, str(f["name"]), _arguments(f["arguments"])) for at, f in made)
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError):
        return ()


def _arguments(given: Any) -> Json | str:
    if isinstance(given, dict):
        return given
    return _input(given) if isinstance(given, str) else json.dumps(given, default=str)


def _observed(message: WireMessage, calls: Sequence[FunctionCall]) -> Iterator[WireMessage]:
    """The results that a message of the user is; several in one text are told apart only where
    each can be but one line."""
    text = message.text
    if asks := _ASKS.search(text):  # its next message, joined to this one
        asked = replace(message, text=text[asks.start() :].strip())
        yield from _observed(replace(message, text=text[: asks.start()]), calls)
        yield asked
        return
    if not text.startswith(("Observation:", "Call id: ", "Error:\n")):
        yield message
        return
    lost = _LOST.search(text)
    if (
        lost and "Call id: " not in text[: lost.start()].rpartition("\n")[2]
    ):  # that of a later reply, which itself was left out
        yield from _observed(replace(message, text=text[: lost.start()]), calls)
        yield replace(message, text=text[lost.start() :].strip())
        return
    failed = _FAILED.search(text)
    seen = text.removeprefix(_OBSERVED).removeprefix("Observation:").strip()
    if failed:
        error, _, _ = text[failed.end() :].partition(_ADVICE)
        shown = text[: failed.start()].removeprefix(_OBSERVED).strip()
        seen = "\n".join(each for each in (shown, error.strip()) if each)
    lines = seen.split("\n")
    if len(calls) == 1:
        yield replace(message, role="tool", text=seen, answers=calls[0].id, failed=bool(failed))
    elif failed or len(lines) != len(calls):
        yield replace(message, role="tool", text=seen, failed=bool(failed))
    else:
        for line, call in zip(lines, calls, strict=True):
            yield replace(message, role="tool", text=line, answers=call.id)
