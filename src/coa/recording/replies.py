"""The forms of the replies that agents of language models give: JSON objects, each by a schema.

A server that can is made to follow the schema; any other model is told it by one worked example,
and its reply is held against the schema here. A reply that does not fit raises `Malformed` with a
sentence for the agent that wrote it. What is read has the form that conversion needs: a reflection
holds its ratings, a check its score.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from coa.errors import ToolMistake
from coa.grammar.grammar import parse_ratings, parse_score
from coa.io.runs import Json
from coa.recording.recorder import CRITERIA, ratings
from coa.tools.arguments import plausible, read_arguments, shape_of, without_words
from coa.tools.base import Tool

MAX_STEPS = 8
T = TypeVar("T")
Todo = Literal["", "read", "call", "plan"]
"""What a critic wants: nothing, read again, make another call, plan again."""

_ALOUD = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>", re.S | re.I)
_UNOPENED = re.compile(r"^.*</think(?:ing)?>", re.S | re.I)
"""Templates of reasoning models often end with the opening tag, so that replies do not have it."""


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


@dataclass(frozen=True)
class ReplyForm(Generic[T]):
    """What an agent replies: a schema, what it means, and one worked example of it: what the agent
    was given, and its reply."""

    schema: Json
    given: str
    example: Json
    mean: Callable[[Json], T]

    def read(self, reply: str, cut: bool = False) -> T:
        """What a reply means; `cut`: it ended because it was too long, so nothing is repaired."""
        text = _UNOPENED.sub("", _ALOUD.sub("", reply)).strip()
        if cut and not _is_whole(text):
            raise Malformed("Your reply was cut because it is too long. Write a shorter one.")
        if "{" not in text:  # a bare value would be taken for the only field that has to be there
            found = "is no JSON object" if text else "is empty"
            raise Malformed(f"Your reply {found}. Expected {shape_of(self.schema)}")
        try:
            said = read_arguments(text, self._loose)
        except ToolMistake as mistake:
            wrong = str(mistake).replace("The arguments", "Your reply", 1)
            raise Malformed(wrong.replace("The argument is", "Your reply is", 1)) from None
        if said == self.example:
            raise Malformed("That is the example. Write what fits your own work.")
        empty = dict.fromkeys(self.schema["properties"].keys() - said.keys(), "")
        return self.mean({**empty, **{name: _trimmed(value) for name, value in said.items()}})

    @property
    def _loose(self) -> Json:
        """What is asked of a model that follows no schema: a field more, one less that may be
        empty, or a longer text is no reason to ask again."""
        fields = self.schema["properties"]
        wanted = [name for name in fields if fields[name].get("minLength") != 0]
        loose = without_words(self.schema, ("maxLength", "additionalProperties"))
        return {**loose, "required": wanted}


def _is_whole(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _trimmed(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


def _line(text: str) -> str:
    return " ".join(text.split())


def _text(longest: int = 300, least: int = 1) -> Json:
    return {"type": "string", "minLength": least, "maxLength": longest}


def _object(properties: Mapping[str, Any]) -> Json:
    named = {"properties": dict(properties), "required": [*properties]}
    return {"type": "object", **named, "additionalProperties": False}


def _filled(text: str, name: str) -> str:
    if not text:
        raise Malformed(f"{name} is empty. Fill it in.")
    return text


THOUGHT = {"thought": _text(least=0)}
ARLEN = "the town of Arlen"
"""What all worked examples are about; no task is."""


# -- plans -----------------------------------------------------------------------------------


def plan_form(
    workers: Sequence[str], whole: bool = True, first: bool = False
) -> ReplyForm[Planned]:
    """Steps, and how their results give the answer; `whole` is False for a change of one step.
    `first`: it begins the work, so that somebody has to do something."""
    agents = {"agent": {"enum": [*workers]}} if len(workers) > 1 else {}
    number = {"type": "integer", "minimum": 1, "maximum": MAX_STEPS}
    after = {"type": "array", "items": number, "maxItems": MAX_STEPS}
    step = _object({**agents, "task": _text(), "after": after})
    most = MAX_STEPS if whole else 1
    combine = {"combine": _text(least=0)} if whole else {}
    steps = {"type": "array", "items": step, "maxItems": most}

    def mean(said: Json) -> Planned:
        last = _line(said.get("combine", ""))
        if not said["steps"] and not last:
            return Planned(impossible=_filled(_line(said["thought"]), "thought"))
        if not said["steps"] and first:
            raise Malformed("There are no steps, so nobody does anything. Write at least one.")
        told = [
            PlannedStep(
                each.get("agent", workers[0]),
                _filled(_line(each["task"]), f"the task of step {at}"),
                frozenset(map(int, each["after"])),
            )
            for at, each in enumerate(said["steps"], 1)
        ]
        for at, each in enumerate(told, 1):
            if whole and not each.after <= frozenset(range(1, at)):
                raise Malformed(f"Step {at} can only need steps before it, 1 to {at - 1}.")
        if whole:
            all_before = frozenset(range(1, len(told) + 1))
            told.append(PlannedStep("verifier", _filled(last, "combine"), all_before))
        return Planned(_line(said["thought"]), tuple(told))

    who = [{"agent": name} if agents else {} for name in (workers[0], workers[-1])]
    asked = f"the question 'In which year was the founder of {ARLEN} born?'"
    tasks = [f"founder of {ARLEN}", "year in which this founder was born"]
    if workers[-1] == "coder":
        asked = f"the question 'How old was {ARLEN} in 1900?'"
        tasks = [f"year in which {ARLEN} was founded", "print 1900 minus that year"]
    if workers[0] == "coder":
        asked = "the problem 'Print the sum of the squares of 1 to 9.'"
        tasks = ["compute the sum of the squares of 1 to 9", "print it as a number"]
    shown: Json = {
        "thought": "The second step needs the first.",
        "steps": [
            {**who[0], "task": tasks[0], "after": []},
            {**who[1], "task": tasks[1], "after": [1]},
        ][: len(tasks) if whole else 1],
        **({"combine": "The result of step 2 is the answer."} if whole else {}),
    }
    return ReplyForm(_object({**THOUGHT, "steps": steps, **combine}), asked, shown, mean)


# -- calls and reports -----------------------------------------------------------------------


def call_form(tools: Sequence[Tool]) -> ReplyForm[Called]:
    """A thought and a call: the input of the only tool, or a tool by its name with its input."""
    shared: Json = {}
    shapes = []
    for each in tools:
        schema = _input(each)
        shared |= schema.pop("$defs", {})  # references begin at the root
        shapes.append(schema)
    if len(tools) == 1:
        properties = {_field(tools[0]): shapes[0]}
    else:
        options = [
            _object({"tool": {"const": each.name}, _field(each): shape})
            for each, shape in zip(tools, shapes, strict=True)
        ]
        properties = {"call": {"anyOf": options}}
    by_name = {each.name: each for each in tools}

    def mean(said: Json) -> Called:
        call = said if len(tools) == 1 else said["call"]
        tool = tools[0] if len(tools) == 1 else by_name[call["tool"]]
        return Called(tool.name, _argument(call[_field(tool)], tool), _line(said["thought"]))

    first = {_field(tools[0]): _shown(tools[0])}
    shown = first if len(tools) == 1 else {"call": {"tool": tools[0].name, **first}}
    schema = _object({**THOUGHT, **properties})
    asked = {"text": f"founder of {ARLEN}", "code": "print 12 times 34"}.get(tools[0].body, "")
    given = f"the step '{asked or f'use {tools[0].name}'}'"
    example = {"thought": f"I call {tools[0].name} for it.", **shown}
    return ReplyForm(schema | ({"$defs": shared} if shared else {}), given, example, mean)


def _field(tool: Tool) -> str:
    return "program" if tool.body == "code" else "input"


def _input(tool: Tool) -> Json:
    if tool.body == "json":
        return dict(json.loads(tool.schema)) if tool.schema else {"type": "object"}
    return _text(4000) if tool.body == "code" else _text()


def _shown(tool: Tool) -> Any:
    """The input of the worked example."""
    if tool.body == "json":
        return plausible(json.loads(tool.schema)) if tool.schema else {}
    return "print(12 * 34)" if tool.body == "code" else "founder of Arlen"


def _argument(given: Any, tool: Tool) -> str:
    if tool.body == "json":
        return json.dumps(given, ensure_ascii=False)
    text = _filled(given.strip(), _field(tool))
    if tool.body == "code":
        return text if "```" in text else f"```py\n{text}\n```"
    return _line(text)


def report_form(tools: Sequence[Tool]) -> ReplyForm[Report | Called]:
    """What a reader found; one with a tool may open something before it reports."""
    opens = {"open": _text(least=0)} if tools else {}

    def mean(said: Json) -> Report | Called:
        if wanted := _line(said.get("open", "")):
            return Called(tools[0].name, wanted, _line(said["thought"]))
        text = _filled(_line(said["report"]), "report")
        return Report(text if said["found"] else f"Not found: {text}", said["found"])

    fields = {**THOUGHT, **opens, "found": {"type": "boolean"}, "report": _text(1000, least=0)}
    given = f"the step 'founder of {ARLEN}' and the passage 'Arlen was founded by Mira Holt.'"
    shown: Json = {"thought": "The passage is about Arlen."} | ({"open": ""} if tools else {})
    shown |= {"found": True, "report": "The founder of Arlen is Mira Holt."}
    return ReplyForm(_object(fields), given, shown, mean)


# -- judgements, answers and checks ----------------------------------------------------------

_VERDICTS: dict[str, Todo] = {
    "approve": "",
    "read again": "read",
    "search again": "call",
    "write again": "call",
    "plan again": "plan",
}


def judge_form(rated: bool, coding: bool) -> ReplyForm[Judgement]:
    """A reason and a verdict; or, in a team that rates, a rating of each criterion."""
    given = "the passage 'Arlen was founded by Mira Holt.' and a report that says so"
    if coding:
        given = "the problem 'Print 12 times 34.', a program that prints 12 * 34, and its output"
    if rated:
        rating = {"enum": ["good", "average", "poor"]}
        fields = {**THOUGHT, **dict.fromkeys(CRITERIA, rating), "reason": _text()}
        shown: Json = {"thought": "The report is about Arlen.", **dict.fromkeys(CRITERIA, "good")}
        return ReplyForm(_object(fields), given, shown | {"reason": "A passage states it."}, _rated)
    known = ("write again",) if coding else ("read again", "search again", "plan again")
    fields = {"reason": _text(), "verdict": {"enum": ["approve", *known]}}

    def mean(said: Json) -> Judgement:
        reason = _filled(_line(said["reason"]), "reason")
        return Judgement(_VERDICTS[said["verdict"]], reason, reason)

    shown = {"reason": "The passage states that Mira Holt founded Arlen."}
    if coding:
        shown = {"reason": "The program ran and prints the product of 12 and 34."}
    return ReplyForm(_object(fields), given, shown | {"verdict": "approve"}, mean)


def _rated(said: Json) -> Judgement:
    """The worst rating says what is to be done."""
    found = {name: said[name] for name in CRITERIA}
    reason = _filled(_line(said["reason"]), "reason")
    text = f"{ratings(*found.values())} {reason}"
    if parse_ratings(text, CRITERIA) != found:
        raise Malformed("The reason states other ratings. Give each rating once.")
    worst = found.values()
    todo: Todo = "plan" if "poor" in worst else "read" if "average" in worst else ""
    return Judgement(todo, reason, text, _line(said["thought"]))


def answer_form() -> ReplyForm[tuple[str, str]]:
    """(thought, answer) of a verifier that suggests an answer."""
    return ReplyForm(
        _object({**THOUGHT, "answer": _text(2000)}),
        "the report 'The founder of Arlen is Mira Holt.'",
        {"thought": "The report names the founder.", "answer": "Mira Holt"},
        lambda said: (_line(said["thought"]), _filled(said["answer"], "answer")),
    )


def check_form() -> ReplyForm[tuple[str, int]]:
    """(reason, score) of a verifier that checks an answer."""

    def mean(said: Json) -> tuple[str, int]:
        reason, score = _filled(_line(said["reason"]), "reason"), int(said["score"])
        if parse_score(reason) not in (None, score):
            raise Malformed("The reason states another score. Give the score once.")
        return reason, score

    schema = _object({"reason": _text(), "score": {"enum": [1, 2, 3, 4]}})
    shown = {"reason": "The report states the founder of Arlen.", "score": 4}
    return ReplyForm(schema, "the answer 'Mira Holt'", shown, mean)
