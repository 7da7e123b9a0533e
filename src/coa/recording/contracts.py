"""Output contracts: the form in which agents are asked to reply.

A reply is labelled lines (`THOUGHT: ...`, `INPUT: ...`), not JSON: a small model forgets a quote or
a brace long before it forgets a word at the start of a line, a program needs no escaping, and a
reply that was cut still shows what is missing. How replies are read is in `llm_labels`
and `llm_replies`.

The contracts stand after the agents' prompts, which are the same for the rule-based experts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from coa.tools.base import Tool

CRITERIA = ("Information Conflict", "Tool Effectiveness", "Trajectory Monitoring")


ECHOES = {
    *("what to do", "what to do next", "how the results give the answer", "the reason"),
    *("one short sentence", "one sentence", "its name", "what the tool is given", "the program"),
    *("what you found, in one or two sentences", "what you could not find", "the answer alone"),
}
"""Words that only say what belongs there: a small model likes to repeat the form itself."""


def plan_contract(workers: Sequence[str]) -> str:
    return f"""Reply in exactly this form, one step a line, nothing else:
THOUGHT: one short sentence
1. {workers[0]}: what to do (after none)
2. {workers[-1]}: what to do next (after 1)
3. verifier: how the results give the answer (after 1, 2)
Every step begins with who does it: {either([*workers, "verifier"])}. At its end stand the \
numbers of the steps whose results it needs; steps with (after none) are done at the same time. \
If there is no way to answer, write one line instead: IMPOSSIBLE: the reason"""


def call_contract(tools: Sequence[Tool]) -> str:
    lines = [f"- {tool.name}: {tool.about}{_shape(tool)}" for tool in tools]
    which = "TOOL: its name\n" if len(tools) > 1 else ""
    holds = "\n```py\nthe program\n```" if _is_code(tools) else " what the tool is given"
    return (
        "You have these tools:\n" + "\n".join(lines) + "\nReply in exactly this form, nothing "
        f"else:\nTHOUGHT: one short sentence\n{which}INPUT:{holds}"
    )


def report_contract(tools: Sequence[Tool]) -> str:
    report = """When you have read what the step asks for, reply with one line:
REPORT: what you found, in one or two sentences
If it is not there, reply with one line:
MISSING: what you could not find"""
    return f"{report}\nOtherwise call a tool first. {call_contract(tools)}" if tools else report


def judge_contract(rated: bool, coding: bool) -> str:
    if rated:
        lines = "\n".join(f"{name}: good, average or poor" for name in CRITERIA)
        return f"""Reply in exactly this form, one rating for each, nothing else:
THOUGHT: one short sentence
{lines}
REASON: one sentence
Three times good approves the work. The worst rating counts otherwise: poor makes the planner plan \
again, average has the work done again."""
    again = "write again" if coding else "read again, search again, plan again"
    return f"""Reply in exactly this form, nothing else:
VERDICT: one of: approve, {again}
REASON: one sentence"""


VERIFY_CONTRACT = """When you are asked for the answer, reply in exactly this form, nothing else:
THOUGHT: one short sentence
ANSWER: the answer alone
When you are asked to check it, reply in exactly this form, nothing else:
THOUGHT: one short sentence
REASON: one sentence
SCORE: a number from 1 to 4"""


def either(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _is_code(tools: Sequence[Tool]) -> bool:
    return all(tool.body == "code" for tool in tools)


def _shape(tool: Tool) -> str:
    return f" (a JSON object by this schema: {tool.schema})" if tool.schema else ""


MAX_LINE = 300
"""Characters of a reply without labels that still can be nothing but a query or an answer."""


_ALOUD = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>", re.S | re.I)


_UNOPENED = re.compile(r"^.*</think(?:ing)?>", re.S | re.I)
"""Templates of reasoning models often end with the opening tag, so that replies do not have it."""


_PLACEHOLDER = re.compile(r"<[^<>\n]{1,60}>|\.{3}")


class Malformed(Exception):
    """A reply that cannot be read; the message tells its agent what to write."""


def said(reply: str) -> str:
    """A reply without what a model thinks aloud before it."""
    text = _UNOPENED.sub("", _ALOUD.sub("", reply)).strip()
    if not text:
        raise Malformed("Your reply is empty. Write it in the form that you were given.")
    if text.lower().startswith("<think"):
        raise Malformed("Your reply ends while you think. Think less, and reply.")
    return text


def sections(reply: str, labels: Sequence[str], last: str = "") -> dict[str, str]:
    """What stands after each label, up to the next; after `last` everything is its own."""
    if given := fields(reply):
        return _keyed(given, labels)
    names = "|".join(re.escape(label).replace(r"\ ", r"[ _]+") for label in labels)
    pattern = re.compile(
        rf"^([ \t>*#_`-]*)(?:final[ ])?({names})([ \t*_`]*[:\uff1a][ \t]*(?:\*\*|__)?)",
        re.M | re.I,
    )
    found = list(pattern.finditer(reply))
    parts: dict[str, str] = {}
    for at, match in enumerate(found):
        label = _label(match[2], labels)
        end = found[at + 1].start() if at + 1 < len(found) and label != last else len(reply)
        text = reply[match.end() : end].strip()
        if match[1].endswith("**") and "**" not in match[3]:  # bold from the label to the end
            text = text.removesuffix("**").rstrip()
        if parts.get(label, text) != text and label != "THOUGHT":
            raise Malformed(f"{label}: stands there twice. Write it once.")
        parts.setdefault(label, text)
        if label == last:
            break
    return parts


def _label(name: str, labels: Sequence[str]) -> str:
    """The label that is meant, in whatever case; empty: none of them."""
    name = " ".join(re.split(r"[ _]+", name)).casefold()
    return next((label for label in labels if label.casefold() == name), "")


def fields(reply: str) -> dict[str, Any]:
    """The JSON object that a reply is; empty: it is something else."""
    text = unfenced(re.sub(r"</?tool_call>", "", reply).strip())
    if not (text.startswith("{") and text.endswith("}")):
        return {}
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _keyed(given: Mapping[str, Any], labels: Sequence[str]) -> dict[str, str]:
    """What a JSON object says under each label, or under what calls of tools have instead."""
    also = {"name": "TOOL", "arguments": "INPUT"}
    parts: dict[str, str] = {}
    for name, value in given.items():
        if (label := _label(also.get(name, name), labels)) and value is not None:
            parts[label] = value.strip() if isinstance(value, str) else json.dumps(value)
    return parts


def unfenced(text: str) -> str:
    fence = re.fullmatch(r"```\w*\n(.*?)\n?```", text, re.S)
    return fence[1].strip() if fence else text


def line(text: str) -> str:
    return " ".join(text.split())


def is_line(text: str) -> bool:
    return "\n" not in text.strip() and len(text) <= MAX_LINE


def filled(text: str, where: str) -> str:
    if not text.strip():
        raise Malformed(f"{where} is empty. Fill it in.")
    first = text.removeprefix("```py").strip().split("\n")[0].casefold()
    if first in ECHOES or _PLACEHOLDER.fullmatch(text.strip()):
        raise Malformed(f"{where} holds only a placeholder. Fill it in.")
    return text
