"""How agents' replies are read: by their labels (`llm_labels`), or as text with only one reading.

Everything else is `Malformed`, with a sentence for the agent that wrote it. What was read has the
form that conversion needs: a reflection holds its ratings, a check its score.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from coa.grammar.grammar import parse_ratings, parse_score
from coa.recording.contracts import (
    CRITERIA,
    Malformed,
    either,
    fields,
    filled,
    is_line,
    line,
    said,
    sections,
    unfenced,
)
from coa.recording.recorder import ratings as ratings
from coa.tools.base import Tool

MAX_STEPS = 8
Todo = Literal["", "read", "call", "plan"]
"""What a critic wants: nothing, read again, make another call, plan again."""

_MARKS = r"[ \t>*_#-]*(?:step[ \t]+)?"
_STEP = re.compile(
    rf"^{_MARKS}(\d{{1,2}})[ \t*_]*[.):][ \t*_]*(\S.*(?:\n(?=[ \t])(?!{_MARKS}\d).*\S.*)*)$",
    re.M | re.I,
)
"""With the indented lines that go on with it."""
_AFTER = re.compile(
    r"[ \t]*[(\[\uff08][ \t]*(?:after|needs|depends on)[ \t:\uff1a]*(?:steps?[ \t]*)?"
    r"([^)\]\uff09]*)[)\]\uff09][ \t.]*$",
    re.I,
)
_NAMED = re.compile(
    r"^[*_`\[(]*([A-Za-z][A-Za-z ]{0,20}?)(?: agent)?[*_`]*(?:[ \t]*[:\uff1a]|[\])]|[ \t]+-+)"
    r"[*_`:]*[ \t]*(\S.*)$"
)
_FENCE = re.compile(r"^[ \t]*```([^\n`]*)\n.*?^[ \t]*```[ \t]*$", re.S | re.M)
_NONE = re.compile(r"\W*(?:none|nothing|no|n/?a)?\W*", re.I)
_UNDECIDED = re.compile(
    r"\b(?:good|average|fair|poor)\b(?:,| or| and|/|\|)+ *(?:good|average|fair|poor)\b", re.I
)
_WANTS: Mapping[Todo, str] = {
    "": r"\bapproved?\b",
    "read": r"\bread\b",
    "call": r"\b(?:search|call|write|run|try)\b",
    "plan": r"\bplan\b|\bre-?plan\b",
}


class PlannedStep(NamedTuple):
    """One step of a plan: who does it, what, and which earlier steps it needs."""

    agent: str
    text: str
    after: frozenset[int]
    """Numbers of steps, from 1."""


@dataclass(frozen=True)
class Planned:
    thought: str
    steps: tuple[PlannedStep, ...]
    impossible: str = ""
    """Why there is no plan."""

    @property
    def text(self) -> str:
        """The plan as the others read it."""
        return "\n".join(f"{number}. {step.text}" for number, step in enumerate(self.steps, 1))


class Called(NamedTuple):
    """An agent decides on a tool call."""

    thought: str
    tool: str
    argument: str


class Report(NamedTuple):
    text: str
    found: bool = True


class Judgement(NamedTuple):
    """What a critic thinks of a step."""

    todo: Todo
    reason: str
    ratings: Mapping[str, str]
    """Empty where the team does not rate."""
    thought: str = ""

    @property
    def text(self) -> str:
        """With the ratings, in the form that grammars read."""
        if not self.ratings:
            return self.reason
        return f"{ratings(*(self.ratings[name] for name in CRITERIA))} {self.reason}"


class Suggestion(NamedTuple):
    thought: str
    answer: str


class Check(NamedTuple):
    thought: str
    reason: str
    score: int

    @property
    def text(self) -> str:
        """Without the score, which chains get where they have a place for it."""
        return self.reason or f"Score: {self.score}"


# -- how replies are read --------------------------------------------------------------------


def read_plan(reply: str, workers: Sequence[str], first: bool = False) -> Planned:
    """`first`: a plan that begins the work, so that somebody has to do something."""
    reply = said(reply)
    parts = sections(reply, ("THOUGHT", "IMPOSSIBLE", "PLAN", "STEPS"))
    told = parts.get("PLAN") or parts.get("STEPS") or reply  # a thought may be a list as well
    lines = [(int(number), text) for number, text in _STEP.findall(told)]
    if not _NONE.fullmatch(reason := parts.get("IMPOSSIBLE", "")):
        if lines:
            raise Malformed("Write either steps or IMPOSSIBLE:, not both.")
        return Planned("", (), line(reason))
    if not lines:
        raise Malformed("There is no plan. Write numbered steps, one a line: 1. ... (after none)")
    if [number for number, _ in lines] != list(range(1, len(lines) + 1)):
        raise Malformed("Number the steps 1, 2, 3 and so on, once each.")
    if len(lines) > MAX_STEPS:
        raise Malformed(f"{len(lines)} steps are too many. Use at most {MAX_STEPS}.")
    steps = tuple(_step(number, text, workers) for number, text in lines)
    if first and all(step.agent == "verifier" for step in steps):
        raise Malformed(f"Nobody does anything. At least one step is for: {either(workers)}.")
    thought = _STEP.split(parts.get("THOUGHT", ""))[0]
    return Planned(line(thought), steps)


def _step(number: int, text: str, workers: Sequence[str]) -> PlannedStep:
    text = line(text).rstrip("*_ ")
    after = frozenset(range(1, number))
    if found := _AFTER.search(text):
        text = text[: found.start()]
        if re.search(r"\d", found[1]):
            after = frozenset(int(each) for each in re.findall(r"\d+", found[1]))
        elif re.fullmatch(r"\W*(?:none|nothing|no steps?|-)?\W*", found[1], re.I):
            after = frozenset()
    if not after <= frozenset(range(1, number)):
        raise Malformed(f"Step {number} can only need steps before it, 1 to {number - 1}.")
    agents = [*workers, "verifier"]
    agent = workers[0]
    if found := _NAMED.match(text):
        name = found[1].strip().lower()
        if name in agents:
            agent, text = name, found[2]
        elif name in ("planner", "reader", "reflector", "critic", "searcher", "coder", "user"):
            raise Malformed(f"Step {number} is for the {name}. Steps are for: {either(agents)}.")
    return PlannedStep(agent, filled(text, f"step {number}"), after)


def read_call(reply: str, tools: Sequence[Tool], made: Collection[str] = ()) -> Called:
    """`made`: arguments of calls that were made before, and would bring the same again."""
    reply = said(reply)
    parts = sections(reply, ("THOUGHT", "TOOL", "INPUT"), last="INPUT")
    tool = _tool_of(parts, tools)
    thought = line(parts.get("THOUGHT", ""))
    if tool.body == "code":
        argument = _program(reply, parts)
        thought = thought.partition("```")[0].strip()
    elif "INPUT" in parts:
        argument = _argument(parts["INPUT"], tool)
    elif not parts and is_line(reply):
        argument, thought = _argument(reply, tool), ""
    else:
        raise Malformed("There is no call. Write a line that begins with INPUT:")
    argument = filled(argument, "INPUT")
    if argument in made:
        raise Malformed("This call was made before and brings the same again. Write another one.")
    return Called(thought, tool.name, argument)


def _tool_of(parts: Mapping[str, str], tools: Sequence[Tool]) -> Tool:
    if "TOOL" not in parts and len(tools) == 1:
        return tools[0]
    named = parts.get("TOOL", "").strip(" \t\n`*_\"'.()").lower()
    for tool in tools:
        if tool.name.lower() == named:
            return tool
    names = either([tool.name for tool in tools])
    raise Malformed(f"Write a line that begins with TOOL: and names {names}.")


def _program(reply: str, parts: Mapping[str, str]) -> str:
    """The first fence of a reply, with its input; or what stands after INPUT, put into a fence.

    What comes after is often the output that a model imagines.
    """
    given = parts.get("INPUT", reply)
    if fences := list(_FENCE.finditer(given)):
        fed = len(fences) > 1 and fences[1][1].strip() == "sh"
        return given[fences[0].start() : fences[1 if fed else 0].end()].strip()
    bare = parts.get("INPUT", "").strip()
    if not bare or "```" in bare:
        raise Malformed("There is no whole program. Write it after INPUT: in a closed ```py fence.")
    return f"```py\n{bare}\n```"


def _argument(text: str, tool: Tool) -> str:
    text = unfenced(text.strip())
    if call := re.fullmatch(rf"{re.escape(tool.name)}\s*\((.*)\)", text, re.S):
        text = call[1].strip()
    if tool.body == "json":
        return text
    named = re.fullmatch(r"\w+\s*=\s*([\"'])(.*)\1", text, re.S)
    if named and named[1] not in named[2]:
        text = named[2]
    elif len(given := list(fields(text).values())) == 1 and isinstance(given[0], str):
        text = given[0]
    text = line(text.split("\n")[0])  # what follows is often a result that a model imagines
    for left, right in ('""', "''", "``", "\u201c\u201d", ("**", "**")):
        inner = text.removeprefix(left).removesuffix(right)
        if len(inner) == len(text) - len(left + right) and left not in inner:
            text = inner.strip()
    return text


def read_report(reply: str) -> Report:
    reply = said(reply)
    parts = sections(reply, ("REPORT", "MISSING", "THOUGHT"))
    if "REPORT" in parts and _NONE.fullmatch(parts.get("MISSING", "")):
        parts.pop("MISSING", None)
    if "REPORT" in parts and "MISSING" in parts:
        raise Malformed("Write either REPORT: or MISSING:, not both.")
    if "MISSING" in parts:
        return Report(f"Not found: {filled(line(parts['MISSING']), 'MISSING')}", False)
    text = parts.get("REPORT", "" if parts else reply)
    return Report(filled(line(text), "REPORT"))


def read_report_or_call(
    reply: str, tools: Sequence[Tool], made: Collection[str] = ()
) -> Report | Called:
    """What an agent writes that may call a tool before it reports."""
    labels = sections(said(reply), ("THOUGHT", "TOOL", "INPUT", "REPORT", "MISSING")).keys()
    calls, reports = labels & {"TOOL", "INPUT"}, labels & {"REPORT", "MISSING"}
    if calls and reports:
        raise Malformed("Write either a report or a call with INPUT:, not both.")
    if calls and not tools:
        raise Malformed("You have no tool. Write a line that begins with REPORT: or MISSING:")
    return read_call(reply, tools, made) if calls else read_report(reply)


def read_judgement(reply: str, rated: bool) -> Judgement:
    reply = said(reply)
    parts = sections(reply, ("THOUGHT", "VERDICT", "REASON", *CRITERIA))
    reason, thought = line(parts.get("REASON", "")), line(parts.pop("THOUGHT", ""))
    if rated:
        lines = [f"{name}: {parts[name]}" for name in CRITERIA if name in parts]
        stated = "\n".join(lines) if len(lines) == len(CRITERIA) else reply
        return _rated(stated, reason)._replace(thought=thought)
    verdict = parts.get("VERDICT", "" if parts else reply).split("\n")[0].lower()
    wants: list[Todo] = [todo for todo, words in _WANTS.items() if re.search(words, verdict)]
    denied = re.search(r"\b(?:not|cannot|can't|don't|never)\b|\bdisapprov", verdict)
    if len(wants) != 1 or denied:
        raise Malformed("Write VERDICT: and one of the words that you were given, nothing else.")
    if wants[0] and not reason:
        raise Malformed("Write a line that begins with REASON: and says what is wrong.")
    return Judgement(wants[0], filled(reason or "The work is sound.", "REASON"), {})


def _rated(text: str, reason: str) -> Judgement:
    found = parse_ratings(text, CRITERIA)
    if found is None or _UNDECIDED.search(text):
        names = ", ".join(CRITERIA)
        raise Malformed(f"Rate each of {names} with one word: good, average or poor.")
    worst = set(found.values())
    todo: Todo = "plan" if "poor" in worst else "read" if "average" in worst else ""
    if todo and not reason:
        raise Malformed("Write a line that begins with REASON: and says what is wrong.")
    judged = Judgement(todo, filled(reason or "The work is sound.", "REASON"), found)
    if parse_ratings(judged.text, CRITERIA) != found:
        raise Malformed("The reason states other ratings. Give each rating once.")
    return judged


def read_suggestion(reply: str) -> Suggestion:
    reply = said(reply)
    parts = sections(reply, ("THOUGHT", "ANSWER", "REASON", "SCORE"))
    if "ANSWER" not in parts and (parts or not is_line(reply)):
        raise Malformed("Write a line that begins with ANSWER: and holds the answer alone.")
    answer = parts.get("ANSWER", reply).strip()
    inside = unfenced(answer)
    if inside == answer and re.search(r"\n[ \t]*\n", answer):  # often a kind word to the user
        raise Malformed("Something follows the answer. Write the answer alone after ANSWER:")
    answer = filled(inside.strip("*` \t\n"), "ANSWER")
    return Suggestion(line(parts.get("THOUGHT", "")), answer)


def read_check(reply: str) -> Check:
    reply = said(reply)
    parts = sections(reply, ("REASON", "SCORE", "THOUGHT", "ANSWER"))
    score = parse_score(f"Score: {line(parts['SCORE'])}" if "SCORE" in parts else reply)
    if score is None:
        raise Malformed("Write a line that begins with SCORE: and holds a number from 1 to 4.")
    check = Check(line(parts.get("THOUGHT", "")), line(parts.get("REASON", "")), score)
    if parse_score(check.reason) not in (None, score):
        raise Malformed("The reason states another score. Give the score once.")
    return check
