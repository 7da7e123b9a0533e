"""Reads the replies of agents that are language models: labelled lines, as `agents` asks for them.

Labels may be in any case and marked up, have a wide colon, stand among other words, or be the keys
of a JSON object, as models write that were trained to call tools. A reply that has one reading is
read. Any other raises `Malformed` with a sentence for the agent that wrote it. What is read has the
form that conversion needs: a reflection holds its ratings, a check its score.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from coa.grammar.grammar import parse_ratings, parse_score
from coa.recording.agents import either
from coa.recording.recorder import CRITERIA, ratings
from coa.tools.base import Tool

MAX_STEPS = 8
MAX_LINE = 300
"""Characters of a reply without labels that still can be nothing but a query or an answer."""
Todo = Literal["", "read", "call", "plan"]
"""What a critic wants: nothing, read again, make another call, plan again."""

_ALOUD = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>", re.S | re.I)
_UNOPENED = re.compile(r"^.*</think(?:ing)?>", re.S | re.I)
"""Templates of reasoning models often end with the opening tag, so that replies do not have it."""
_PLACEHOLDER = re.compile(r"<[^<>\n]{1,60}>|\.{3}")
_ECHOES = {
    *("what to do", "what to do next", "how the results give the answer", "the reason"),
    *("one short sentence", "one sentence", "its name", "what the tool is given", "the program"),
    *("what you found, in one or two sentences", "what you could not find", "the answer alone"),
}
"""Words of the contracts that only say what belongs there: a small model likes to repeat them."""
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
_AGENTS = "planner|searcher|worker|reader|coder|reflector|critic|verifier|user"
_FENCE = re.compile(r"^[ \t]*```([^\n`]*)\n.*?^[ \t]*```[ \t]*$", re.S | re.M)
_NONE = re.compile(r"\W*(?:none|nothing|no|no steps?|n/?a)?\W*", re.I)
_UNDECIDED = re.compile(
    r"\b(?:good|average|fair|poor)\b(?:,| or| and|/|\|)+ *(?:good|average|fair|poor)\b", re.I
)
_DENIED = re.compile(r"\b(?:not|cannot|can't|don't|never)\b|\bdisapprov")
_WANTS: Mapping[Todo, str] = {
    "": r"\bapproved?\b",
    "read": r"\bread\b",
    "call": r"\b(?:search|call|write|run|try)\b",
    "plan": r"\bplan\b|\bre-?plan\b",
}


class Malformed(Exception):
    """A reply that cannot be read; the message tells its agent what to write."""


class PlannedStep(NamedTuple):
    """One step of a plan: who does it, what, and the numbers of the earlier steps it needs."""

    agent: str
    text: str
    after: frozenset[int]


class Planned(NamedTuple):
    """A plan, or why there is none."""

    thought: str = ""
    steps: tuple[PlannedStep, ...] = ()
    impossible: str = ""

    @property
    def text(self) -> str:
        """The plan as the others read it."""
        return "\n".join(f"{number}. {step.text}" for number, step in enumerate(self.steps, 1))


class Called(NamedTuple):
    """A tool call that an agent decided on."""

    tool: str
    argument: str
    thought: str = ""


class Report(NamedTuple):
    """What a reader read off the result of a tool."""

    text: str
    found: bool = True


class Judgement(NamedTuple):
    """What a critic thinks of a step; the text holds the ratings, where the team rates."""

    todo: Todo
    reason: str
    text: str
    thought: str = ""


# -- labels ----------------------------------------------------------------------------------


class _Reply:
    """A reply without what a model thinks aloud before it, and what stands after its labels."""

    def __init__(self, reply: str, *labels: str, last: str = "") -> None:
        """The text after a label ends at the next one; after `last` everything is its own."""
        self.text = _UNOPENED.sub("", _ALOUD.sub("", reply)).strip()
        if not self.text:
            raise Malformed("Your reply is empty. Write it in the form that you were given.")
        if self.text.lower().startswith("<think"):
            raise Malformed("Your reply ends while you think. Think less, and reply.")
        labels_by_name = {label.upper(): label for label in labels}
        self.parts: dict[str, str] = {}
        if given := _json_object(self.text):
            also = {"name": "TOOL", "arguments": "INPUT"}
            for key, value in given.items():
                label = labels_by_name.get(_upper(also.get(key, key)))
                if label and value is not None:
                    text = value.strip() if isinstance(value, str) else json.dumps(value)
                    self.parts[label] = text
            return
        names = "|".join(re.escape(label).replace(r"\ ", r"[ _]+") for label in labels)
        marked = rf"^([ \t>*#_`-]*)(?:final[ ])?({names})([ \t*_`]*[:\uff1a][ \t]*(?:\*\*|__)?)"
        found = list(re.finditer(marked, self.text, re.M | re.I))
        ends = [*(match.start() for match in found[1:]), len(self.text)]
        for match, end in zip(found, ends, strict=False):
            label = labels_by_name[_upper(match[2])]
            text = self.text[match.end() : None if label == last else end].strip()
            if match[1].endswith("**") and "**" not in match[3]:  # bold from the label to the end
                text = text.removesuffix("**").rstrip()
            if self.parts.get(label, text) != text and label != "THOUGHT":
                raise Malformed(f"{label}: stands there twice. Write it once.")
            self.parts.setdefault(label, text)
            if label == last:
                break

    def line(self, label: str) -> str:
        """What stands after a label, in one line; empty where there is no such label."""
        return _line(self.parts.get(label, ""))

    def filled(self, label: str, otherwise: str = "") -> str:
        return _filled(_line(self.parts.get(label, otherwise)), label)

    @property
    def is_one_line(self) -> bool:
        """Without a label, and so short that it can only be what was asked for."""
        return not self.parts and "\n" not in self.text and len(self.text) <= MAX_LINE


def _upper(name: str) -> str:
    return " ".join(re.split(r"[ _]+", name)).upper()


def _json_object(text: str) -> dict[str, Any]:
    """The JSON object that a text is; empty: it is something else."""
    text = _unfenced(re.sub(r"</?tool_call>", "", text).strip())
    if not (text.startswith("{") and text.endswith("}")):
        return {}
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _unfenced(text: str) -> str:
    fence = re.fullmatch(r"```\w*\n(.*?)\n?```", text, re.S)
    return fence[1].strip() if fence else text


def _line(text: str) -> str:
    return " ".join(text.split())


def _filled(text: str, where: str) -> str:
    """The text, unless it is empty or only repeats what the contract says of its place."""
    if not text.strip():
        raise Malformed(f"{where} is empty. Fill it in.")
    first = text.removeprefix("```py").strip().split("\n")[0].casefold()
    if first in _ECHOES or _PLACEHOLDER.fullmatch(text.strip()):
        raise Malformed(f"{where} holds only a placeholder. Fill it in.")
    return text


# -- plans -----------------------------------------------------------------------------------


def read_plan(reply: str, workers: Sequence[str], first: bool = False) -> Planned:
    """`first`: a plan that begins the work, so that somebody has to do something."""
    said = _Reply(reply, "THOUGHT", "IMPOSSIBLE", "PLAN")
    told = said.parts.get("PLAN") or said.text  # a thought may be a list as well
    lines = [(int(number), text) for number, text in _STEP.findall(told)]
    if not _NONE.fullmatch(reason := said.line("IMPOSSIBLE")):
        if lines:
            raise Malformed("Write either steps or IMPOSSIBLE:, not both.")
        return Planned(impossible=reason)
    if not lines:
        raise Malformed("There is no plan. Write numbered steps, one a line: 1. ... (after none)")
    if [number for number, _ in lines] != list(range(1, len(lines) + 1)):
        raise Malformed("Number the steps 1, 2, 3 and so on, once each.")
    if len(lines) > MAX_STEPS:
        raise Malformed(f"{len(lines)} steps are too many. Use at most {MAX_STEPS}.")
    steps = tuple(_step(number, text, workers) for number, text in lines)
    if first and all(step.agent == "verifier" for step in steps):
        raise Malformed(f"Nobody does anything. At least one step is for: {either(workers)}.")
    return Planned(_line(_STEP.split(said.parts.get("THOUGHT", ""))[0]), steps)


def _step(number: int, text: str, workers: Sequence[str]) -> PlannedStep:
    text = _line(text).rstrip("*_ ")
    after = frozenset(range(1, number))
    if found := _AFTER.search(text):
        text = text[: found.start()]
        if named := re.findall(r"\d+", found[1]):
            after = frozenset(map(int, named))
        elif _NONE.fullmatch(found[1]):
            after = frozenset()
    if not after <= frozenset(range(1, number)):
        raise Malformed(f"Step {number} can only need steps before it, 1 to {number - 1}.")
    agents = [*workers, "verifier"]
    agent = workers[0]
    if found := re.match(rf"\W*({_AGENTS})(?: agent)?\W*[:\uff1a\])-]\W*(\S.*)", text, re.I):
        agent, text = found[1].lower(), found[2]
        if agent not in agents:
            raise Malformed(f"Step {number} is for the {agent}. Steps are for: {either(agents)}.")
    return PlannedStep(agent, _filled(text, f"step {number}"), after)


# -- calls and reports -----------------------------------------------------------------------


def read_call(reply: str, tools: Sequence[Tool], made: Collection[str] = ()) -> Called:
    """`made`: arguments of calls that were made before, and would bring the same again."""
    said = _Reply(reply, "THOUGHT", "TOOL", "INPUT", last="INPUT")
    tool = _tool_of(said, tools)
    thought = said.line("THOUGHT")
    if tool.body == "code":
        argument = _program(said)
        thought = thought.partition("```")[0].strip()
    elif "INPUT" in said.parts or said.is_one_line:
        argument = _argument(said.parts.get("INPUT", said.text), tool)
    else:
        raise Malformed("There is no call. Write a line that begins with INPUT:")
    if _filled(argument, "INPUT") in made:
        raise Malformed("This call was made before and brings the same again. Write another one.")
    return Called(tool.name, argument, thought)


def _tool_of(said: _Reply, tools: Sequence[Tool]) -> Tool:
    if "TOOL" not in said.parts and len(tools) == 1:
        return tools[0]
    named = said.parts.get("TOOL", "").strip(" \t\n`*_\"'.()").lower()
    for tool in tools:
        if tool.name.lower() == named:
            return tool
    names = either([tool.name for tool in tools])
    raise Malformed(f"Write a line that begins with TOOL: and names {names}.")


def _program(said: _Reply) -> str:
    """The first fence of a reply, with its input; or what stands after INPUT, put into a fence.

    What comes after is often the output that a model imagines.
    """
    given = said.parts.get("INPUT", said.text)
    if fences := list(_FENCE.finditer(given)):
        fed = len(fences) > 1 and fences[1][1].strip() == "sh"
        return given[fences[0].start() : fences[1 if fed else 0].end()].strip()
    bare = said.parts.get("INPUT", "")
    if not bare or "```" in bare:
        raise Malformed("There is no whole program. Write it after INPUT: in a closed ```py fence.")
    return f"```py\n{bare}\n```"


def _argument(text: str, tool: Tool) -> str:
    """What a tool is given, without the call or the quotes that models put around it."""
    text = _unfenced(text.strip())
    if call := re.fullmatch(rf"{re.escape(tool.name)}\s*\((.*)\)", text, re.S):
        text = call[1].strip()
    if tool.body == "json":
        return text
    if len(given := list(_json_object(text).values())) == 1 and isinstance(given[0], str):
        text = given[0]
    text = _line(text.split("\n")[0])  # what follows is often a result that a model imagines
    for left, right in ('""', "''", "``", "\u201c\u201d", ("**", "**")):
        inner = text.removeprefix(left).removesuffix(right)
        if len(inner) == len(text) - len(left + right) and left not in inner:
            text = inner.strip()
    return text


def read_report(reply: str, tools: Sequence[Tool], made: Collection[str] = ()) -> Report | Called:
    """What a reader writes, who may call a tool before it reports."""
    said = _Reply(reply, "THOUGHT", "TOOL", "INPUT", "REPORT", "MISSING")
    calls, reports = (
        said.parts.keys() & {"TOOL", "INPUT"},
        said.parts.keys() & {"REPORT", "MISSING"},
    )
    if calls and reports:
        raise Malformed("Write either a report or a call with INPUT:, not both.")
    if calls and not tools:
        raise Malformed("You have no tool. Write a line that begins with REPORT: or MISSING:")
    if calls:
        return read_call(reply, tools, made)
    if "MISSING" not in reports or ("REPORT" in reports and _NONE.fullmatch(said.line("MISSING"))):
        return Report(said.filled("REPORT", "" if said.parts else said.text))
    if "REPORT" in reports:
        raise Malformed("Write either REPORT: or MISSING:, not both.")
    return Report(f"Not found: {said.filled('MISSING')}", False)


# -- judgements, answers and checks ----------------------------------------------------------


def read_judgement(reply: str, rated: bool) -> Judgement:
    said = _Reply(reply, "THOUGHT", "VERDICT", "REASON", *CRITERIA)
    thought, reason = said.line("THOUGHT"), said.line("REASON")
    said.parts.pop("THOUGHT", None)
    todo, found = _rated(said) if rated else (_verdict(said), {})
    if todo and not reason:
        raise Malformed("Write a line that begins with REASON: and says what is wrong.")
    reason = _filled(reason or "The work is sound.", "REASON")
    if not rated:
        return Judgement(todo, reason, reason)
    text = f"{ratings(*(found[name] for name in CRITERIA))} {reason}"
    if parse_ratings(text, CRITERIA) != found:
        raise Malformed("The reason states other ratings. Give each rating once.")
    return Judgement(todo, reason, text, thought)


def _verdict(said: _Reply) -> Todo:
    verdict = said.parts.get("VERDICT", "" if said.parts else said.text).split("\n")[0].lower()
    wants: list[Todo] = [todo for todo, words in _WANTS.items() if re.search(words, verdict)]
    if len(wants) != 1 or _DENIED.search(verdict):
        raise Malformed("Write VERDICT: and one of the words that you were given, nothing else.")
    return wants[0]


def _rated(said: _Reply) -> tuple[Todo, Mapping[str, str]]:
    """The worst rating says what is to be done."""
    lines = [f"{name}: {said.parts[name]}" for name in CRITERIA if name in said.parts]
    text = "\n".join(lines) if len(lines) == len(CRITERIA) else said.text
    found = parse_ratings(text, CRITERIA)
    if found is None or _UNDECIDED.search(text):
        names = ", ".join(CRITERIA)
        raise Malformed(f"Rate each of {names} with one word: good, average or poor.")
    worst = found.values()
    return "plan" if "poor" in worst else "read" if "average" in worst else "", found


def read_answer(reply: str) -> tuple[str, str]:
    """(thought, answer) of a verifier that suggests an answer."""
    said = _Reply(reply, "THOUGHT", "ANSWER", "REASON", "SCORE")
    if "ANSWER" not in said.parts and not said.is_one_line:
        raise Malformed("Write a line that begins with ANSWER: and holds the answer alone.")
    answer = said.parts.get("ANSWER", said.text)
    inside = _unfenced(answer)
    if inside == answer and re.search(r"\n[ \t]*\n", answer):  # often a kind word to the user
        raise Malformed("Something follows the answer. Write the answer alone after ANSWER:")
    return said.line("THOUGHT"), _filled(inside.strip("*` \t\n"), "ANSWER")


def read_check(reply: str) -> tuple[str, str, int]:
    """(thought, reason, score) of a verifier that checks an answer."""
    said = _Reply(reply, "REASON", "SCORE", "THOUGHT", "ANSWER")
    stated = f"Score: {said.line('SCORE')}" if "SCORE" in said.parts else said.text
    if (score := parse_score(stated)) is None:
        raise Malformed("Write a line that begins with SCORE: and holds a number from 1 to 4.")
    reason = said.line("REASON")
    if parse_score(reason) not in (None, score):
        raise Malformed("The reason states another score. Give the score once.")
    return said.line("THOUGHT"), reason or f"Score: {score}", score
