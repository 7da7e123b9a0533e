"""The rule-based team for tools that it never saw: a planner, a worker and a verifier.

They read the question and the declarations of the tools, and nothing else. Which tool is meant is
told by the words that question and declaration share and by what kind of work the verbs name;
which argument a value is for, by the words before it (`reader`). What one call returns feeds the
next: the code of a record that was found, of another one that it refers to. A call that is refused
is made again as the message asks. Where no tool does what is asked, or something is missing, the
answer says so. The same rules are the baseline without a model, also on the tasks of the Berkeley
Function Calling Leaderboard.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from coa.environments.toolbox.reader import (
    Argument,
    ReadArguments,
    read,
    slots_of,
    value_for,
    values_in,
)
from coa.environments.toolbox.tasks import MISSING, NO_TOOL
from coa.io.runs import Json
from coa.recording.episode import USER
from coa.recording.recorder import EpisodeRecorder
from coa.tools.arguments import words_of
from coa.tools.choice import overlaps

TRIES = 3
"""Of one call."""
DONE = "done"
"""The answer where a call returned nothing to answer with."""
_WORK: dict[str, frozenset[str]] = {
    work: frozenset(said.split())
    for work, said in {
        "create": "create add register new open enter submit insert post",
        "update": "update set change edit modify adjust correct patch put",
        "remove": "delete remove cancel close withdraw drop erase destroy",
        "list": "list search filter query select browse count all matching many",
        "find": "find locate resolve identify turn",
        "compute": "calculate estimate compute quote work predict out",
        "get": "get fetch show read retrieve describe view lookup look detail returns",
    }.items()
}
_VERBS = frozenset(word for said in _WORK.values() for word in said)
_FILL = frozenset(
    "the a an of by with from for to its it is are and or at on in one this that what which how "
    "much many data record detail return answer given their all every each tool function f p x arg "
    "into than if when so id code number reference name value me my i need tell please give you "
    "your be have has there do does can will as info information api v".split()
)
_ASKED: tuple[tuple[str, str], ...] = (
    ("compare", r"\bwhich\b.*\b(?:higher|larger|lower|smaller)\b|\bcompare\b"),
    ("list", r"\bhow many\b|\bcount the\b|\bthe number of [\w ]+ with\b"),
    ("remove", r"\b(?:cancel|delete|remove)\b|\btake it out\b|\bno longer need\b"),
    (
        "update",
        r"^(?:[^.!?]{0,20}[.!:] )?(?:first )?(?:set|change|please correct|update)\b|from now on"
        r"|\bnow has the\b|\bcorrect\b.*\breceipt\b",
    ),
    ("create", r"\b(?:register|create|add|enter|open) (?:a|an|it|the|new)\b|\bwe have a new\b"),
    ("compute", r"\b(?:calculate|work out|estimate)\b|\bgiven\b|\bi have\b|\bhow much is\b"),
)
_DOES: tuple[tuple[str, str], ...] = (
    ("find", r"^look for\b|^find the \w+ of\b|^turn\b|\bgiven its\b"),
    ("compute", r"^(?:calculate|estimate|work out|compute)\b|^returns the .*\bfor the given\b"),
    ("list", r"^(?:list|search|count|all)\b|\bhow many\b"),
    ("get", r"^(?:look up|details|show|get)\b|\bwith the given\b"),
)
"""Kinds of work by what a description says."""
_SUBJECTS = (
    r"\b(?:one|new) ([a-z]+(?: [a-z]+)?)",
    r"\ban? (?!new\b|receipt\b)([a-z]+(?: [a-z]+)?)",
    r"\b(?:of|for|list|calculate|returns|out|delete) the (?!given\b)([a-z]+(?: [a-z]+)?)",
    r"\b(?:search|list|all) (?!the\b)([a-z]+)",
)
"""Where a description names what a tool is about, the surest first."""
_EXAMPLE = re.compile(r"(?:as in|such as|like|e\.g\.) '?([^\s']+?)'?\.?$")
_AS = re.compile(
    r"\bthe (?P<field>[\w -]{2,40}?) of (?P<one>[^,;]{2,60}?) as "
    r"(?P<into>[\w ]{2,40}?)(?= and |[,.;:?!)]|$)"
)
_CODE = re.compile(r"[A-Z]{2,4}-\d{4,5}")
"""Of a record; other codes are values like any other."""


@dataclass(frozen=True)
class Known:
    """What the declaration of a tool tells."""

    declaration: Json

    @property
    def name(self) -> str:
        return str(self.declaration["name"])

    @property
    def about(self) -> str:
        return str(self.declaration.get("description") or "")

    @cached_property
    def slots(self) -> list[Argument]:
        return slots_of(self.declaration)

    @cached_property
    def words(self) -> list[str]:
        arguments = [word for slot in self.slots for word in words_of(f"{slot.path} {slot.about}")]
        return words_of(self.name) * 2 + words_of(self.about) + arguments

    @cached_property
    def named(self) -> list[str]:
        """The words of its name, also of one that glues its verb to what follows."""
        found, told = [], set(words_of(self.about))
        for word in words_of(self.name):
            verb = next((v for v in _BY_LENGTH if word.startswith(v) and word != v), "")
            inside = [each for each in sorted(told) if len(each) > 2 and each in word[len(verb) :]]
            found += [verb, *inside] if verb and inside and word not in told else [word]
        return found

    @cached_property
    def work(self) -> str:
        """What kind of work it does; by its name first, else by what its description says."""
        named = _verb_of(self.named)
        said = (work for work, form in _DOES if re.search(form, self.about, re.I))
        return named or next(said, "") or _verb_of(words_of(self.about)[:3]) or "get"

    @cached_property
    def subject(self) -> frozenset[str]:
        """The words for what it is about: of its name, or where that says nothing, of the place
        where its description names it."""
        named = frozenset(w for w in self.named if len(w) > 2) - _VERBS - _FILL
        if named and {*self.named} & {*words_of(self.about)}:
            return named
        for form in _SUBJECTS:
            if found := re.search(form, self.about, re.I):
                said = frozenset(words_of(found[1])) - _VERBS - _FILL
                if said:
                    return said
        return named

    @cached_property
    def key(self) -> Argument | None:
        """The argument that tells which record is meant."""
        keys = [slot for slot in self.slots if slot.is_key and slot.required]
        own = [s for s in keys if {*words_of(f"{s.path} {s.about}")} & self.subject]
        return next(iter(own or keys), None)


def _verb_of(told: Sequence[str]) -> str:
    """The kind of work that most of these words name; empty where none does."""
    scores = {work: sum(word in verbs for word in told) for work, verbs in _WORK.items()}
    best = max(scores, key=lambda work: scores[work])
    return best if scores[best] else ""


_BY_LENGTH = sorted(_VERBS, key=len, reverse=True)


class ToolTeam:
    """Works with the tools that a task declares; see the module's docstring."""

    async def work(self, recorder: EpisodeRecorder) -> None:
        declared = recorder.episode.meta.get("tools") or []
        await _Worker(recorder, [Known(each) for each in declared]).work()


class _Lacks(Exception):
    """A call lacks an argument that must be given."""

    def __init__(self, tool: Known, slot: Argument) -> None:
        super().__init__(slot.path)
        self.tool, self.name = tool, slot.path.rpartition(".")[2]


class _NoTool(Exception):
    """No tool does what is asked."""


class _Worker:
    def __init__(self, recorder: EpisodeRecorder, tools: Sequence[Known]) -> None:
        self.recorder, self.tools = recorder, tools
        self.question = recorder.episode.question
        self.planned = False
        self.spent: set[str] = set()
        """Values that were told to find a record."""
        self.said = words_of(self.question)
        self.told = {*self.said, *map("".join, zip(self.said, self.said[1:], strict=False))}
        """The words of the question, and what two of them would be as one."""

    async def work(self) -> None:
        try:
            answer, thought = await self._answer()
        except _NoTool:
            answer, thought = NO_TOOL, "None of the tools does this."
        except _Lacks as lacks:
            answer = MISSING.format(lacks.name)
            thought = f"{lacks.tool.name} needs {lacks.name}, which is not told."
        if answer is None:
            refused = thought.startswith("Error:")  # what it says is of this task only
            self.recorder.fail("a tool refused the call" if refused else thought)
            return
        if not self.planned:
            self.recorder.say("planner", "verifier", thought, part="plan")
            thought = ""
        self.recorder.say("verifier", USER, answer, thought, part="verdict", score=4)
        self.recorder.episode.answer = answer

    async def _answer(self) -> tuple[str | None, str]:
        asked = self._asked()
        if asked == "compare" and self._fitting("get"):
            return await self._compare()
        if asked == "list" and self._fitting("list"):
            if self._fitting("update") and re.search(dict(_ASKED)["update"], self.question, re.I):
                await self._change(self._chosen("update"))
            filtered = self._chosen("list")
            told = self.question
            if self.planned:  # the filter is told behind the change
                told = re.split(r"\bhow many\b|\bcount\b|\bsay\b", told, flags=re.I)[-1]
            return self._told(await self._call(filtered, self._arguments(filtered, told)), "count")
        if asked in ("update", "remove") and self._fitting(asked):
            return self._told(await self._change(self._chosen(asked)), "receipt")
        if asked == "create" and self._fitting("create"):
            tool = self._chosen("create")
            return self._told(await self._call(tool, self._arguments(tool, self.question)))
        return await self._look_up(asked)

    def _asked(self) -> str:
        """What kind of work the question asks for."""
        for work, form in _ASKED:
            if re.search(form, self.question, re.I | re.S):
                return work
        return "get"

    # -- which tool -------------------------------------------------------------------------

    def _fitting(self, *works: str) -> list[Known]:
        """Tools of these kinds of work that are about something that the question names; where it
        only tells a code, those that have something to do with its words."""
        alike = [tool for tool in self.tools if tool.work in works]
        fitting = [t for t in alike if 2 * len(t.subject & self.told) >= len(t.subject) > 0]
        if fitting or not self._codes() or self._names_a_thing():
            return fitting
        told = {*self.said} - _FILL - _VERBS
        return [t for t in alike if t.key is not None and told & ({*t.words} - t.subject)]

    def _names_a_thing(self) -> bool:
        """Whether the question says what its code is the code of."""
        before = re.search(r"([A-Za-z]+)(?: number)? [A-Z]{2,4}-\d{4,5}", self.question)
        return before is not None and before[1].lower() not in (*_FILL, *_VERBS, "checks", "cancel")

    def _chosen(self, work: str) -> Known:
        """Of the tools of a kind the one that shares most words with the question."""
        fitting = self._fitting(work)
        if not fitting:
            raise _NoTool
        return self._best(fitting)

    def _best(self, tools: Sequence[Known]) -> Known:
        scores = overlaps(self.question, [tool.words for tool in self.tools])
        by_name = {tool.name: score for tool, score in zip(self.tools, scores, strict=True)}
        shares = {t.name: len(t.subject & self.told) / len(t.subject or [1]) for t in tools}
        return max(tools, key=lambda tool: by_name[tool.name] + 3 * shares[tool.name])

    # -- what is given ----------------------------------------------------------------------

    def _arguments(self, tool: Known, told: str, known: Mapping[str, Any] | None = None) -> Json:
        reading = self._read(told, tool, known)
        if reading.missing:
            raise _Lacks(tool, reading.missing[0])
        return reading.arguments()

    def _read(
        self, told: str, tool: Known, known: Mapping[str, Any] | None = None
    ) -> ReadArguments:
        nouns = [word for each in self.tools for word in each.subject]
        return read(told, tool.slots, known, self.spent, nouns)

    def _codes(self) -> list[str]:
        found = (str(each.value) for each in values_in(self.question) if each.kind == "code")
        return [code for code in found if _CODE.fullmatch(code)]

    async def _one(self, tool: Known) -> str | None:
        """The code of the record that a tool is asked about: it is told, or found by what is told
        of the record; None where nobody says which."""
        codes = self._codes()
        if codes:
            return codes[0]
        for finder in self._finders(tool):
            reading = self._read(self.question, finder)
            if reading.values and not reading.missing:
                found = await self._call(finder, reading.arguments())
                code = _code_in(found)
                if code is not None:
                    self.spent |= {str(each.value) for each in reading.used}
                    return code
        return None

    def _finders(self, tool: Known) -> list[Known]:
        """Tools that find a record of those that a tool is about; the surest first."""
        alike = [t for t in self.tools if t.subject & tool.subject and t.work in ("find", "list")]
        surest = "list" if "only" in self.said else "find"
        return sorted(alike, key=lambda each: each.work != surest)

    # -- calls ------------------------------------------------------------------------------

    async def _call(self, tool: Known, arguments: Json, why: str = "") -> Json | str:
        """Make a call, again as the tool asks where it refuses; what it returned."""
        thought = why or self._reason(tool)
        result = ""
        for _ in range(TRIES):
            body = json.dumps(arguments, ensure_ascii=False)
            if not self.planned:
                self.recorder.say("planner", "worker", thought, part="plan")
                self.planned, thought = True, ""
            result = await self.recorder.use("worker", tool.name, body, thought)
            again = _put_right(arguments, result) if result.startswith("Error:") else None
            if again is None:
                break
            arguments, thought = again
        try:
            held = json.loads(result)
        except ValueError:
            return result
        return held if isinstance(held, dict) else result

    def _reason(self, tool: Known) -> str:
        doing = {
            "get": "looks it up",
            "find": "finds it",
            "list": "counts and lists them",
            "create": "enters it",
            "update": "changes it",
            "remove": "removes it",
            "compute": "calculates it",
        }
        return f"{tool.name} {doing[tool.work]}."

    def _told(self, result: Json | str, wanted: str = "") -> tuple[str | None, str]:
        """The answer that a result gives: what is wanted, what the question names, or its only
        value."""
        if isinstance(result, str):
            return (None, result) if result.startswith("Error:") else (DONE, "The call was made.")
        name = wanted if wanted in result else ""
        name = name or (next(iter(result)) if len(result) == 1 else "")
        name = name or value_for(self.question, result) or ""
        if not name:
            return None, "the result does not have what is asked for"
        value = shown(result[name])
        return value, f"The {' '.join(words_of(name))} is {value}."

    async def _change(self, tool: Known) -> Json | str:
        """Change or remove a record."""
        key = tool.key
        code = await self._one(tool)
        if key is not None and code is None:
            raise _Lacks(tool, key)
        known = {} if key is None else {key.path: code}
        return await self._call(tool, self._arguments(tool, self.question, known))

    # -- looking up -------------------------------------------------------------------------

    async def _compare(self) -> tuple[str | None, str]:
        """Ask for two records, and say which has more of what is asked for."""
        codes, tool = list(dict.fromkeys(self._codes()))[:2], self._chosen("get")
        key = tool.key
        if key is None:
            raise _NoTool
        if len(codes) < 2:
            raise _Lacks(tool, key)
        held: list[tuple[float, str]] = []
        name = ""
        for code in codes:
            result = await self._call(tool, {key.path: code}, f"{tool.name} looks up {code}.")
            if isinstance(result, str):
                return None, result
            numbers = {n: v for n, v in result.items() if isinstance(v, int | float)}
            name = value_for(self.question, numbers) or ""
            if not name:
                return None, "the result does not have what is asked for"
            held.append((float(result[name]), code))
        more = re.search(r"\b(?:higher|larger)\b", self.question)
        value, code = (max if more else min)(held, key=lambda each: each[0])
        other = next(v for v, c in held if c != code)
        sign = "more" if more else "less"
        return code, f"{value:g} is {sign} than {other:g}, so it is {code}."

    async def _look_up(self, asked: str) -> tuple[str | None, str]:
        """Ask for a record, or for those that lead to it; else calculate."""
        sums = self._fitting("compute")
        fed = _AS.search(self.question) is not None
        if sums and (asked == "compute" or fed or not self._codes()):
            return await self._compute(self._best(sums))
        order = self._things() if asked in ("get", "compute") or self._loose() else []
        if not order:
            return await self._whatever_fits(asked)
        order += self._behind(order[-1])
        tool = order[-1]
        code = await self._one(tool) if tool.key is not None else None
        if tool.key is None or code is None:
            return self._told(await self._call(tool, self._arguments(tool, self.question)))
        result: Json | str = ""
        for step, tool in enumerate(reversed(order)):
            if tool.key is None or code is None:
                return None, "nothing leads to the next record"
            why = f"{tool.name} looks up {code}." if self.planned else ""
            result = await self._call(tool, {tool.key.path: code}, why)
            if isinstance(result, str):
                break
            following = order[len(order) - 2 - step] if step + 1 < len(order) else None
            code = _reference(result, following) if following else None
        return self._told(result)

    async def _whatever_fits(self, asked: str) -> tuple[str | None, str]:
        """Call a tool whose verb is another one than the question's, if all that it needs is told
        and it is about no record."""
        fitting = self._fitting("create") if asked in ("get", "compute") else []
        for tool in fitting:
            reading = self._read(self.question, tool)
            if tool.key is None and reading.values and not reading.missing:
                return self._told(await self._call(tool, reading.arguments()))
        raise _NoTool

    def _behind(self, tool: Known) -> list[Known]:
        """The tool whose record refers to what a tool looks up, where the question has only its
        code: `the team of PL-1780`."""
        for word in sorted(tool.subject):
            if re.search(rf"\b{re.escape(word)}s? of [A-Z]{{2,4}}-\d", self.question):
                keyed = [t for t in self.tools if t.work == "get" and t.key and t is not tool]
                leading = [t for t in keyed if tool.subject & {*t.words} - t.subject]
                return leading[:1]
        return []

    def _loose(self) -> bool:
        """Whether a tool that needs no record may do what others are usually for."""
        return any(tool.key is None for tool in self._things())

    def _things(self) -> list[Known]:
        """The tools that look up records, one for each kind that the question names, in the order
        in which it names them: the last one is told, each leads to the one before."""
        named: dict[int, Known] = {}
        for tool in self._fitting("get"):
            places = (at for at, word in enumerate(self.said) if word in tool.subject)
            at = max(places, default=len(self.said))
            if at not in named or self._best([named[at], tool]) is tool:
                named[at] = tool
        return [named[at] for at in sorted(named)]

    async def _compute(self, tool: Known) -> tuple[str | None, str]:
        """Calculate, perhaps with a value that a record has."""
        known: dict[str, Any] = {}
        fed = _AS.search(self.question)
        codes = self._codes()
        if fed and codes:
            getters = [t for t in self._fitting("get") if t.key is not None]
            if not getters:
                raise _NoTool
            getter = self._best(getters)
            assert getter.key is not None
            result = await self._call(getter, {getter.key.path: codes[0]})
            if isinstance(result, str):
                return None, result
            name = value_for(fed["field"], result)
            into = next((s for s in tool.slots if s.words & {*words_of(fed["into"])}), None)
            if name is None or into is None:
                return None, "the record does not have what the calculation needs"
            known[into.path] = result[name]
        told = _AS.sub(" ", self.question) if known else self.question
        return self._told(await self._call(tool, self._arguments(tool, told, known)))


def _code_in(result: Json | str) -> str | None:
    """The code of the only record that a result names."""
    if isinstance(result, str):
        return None
    for value in result.values():
        if isinstance(value, list) and len(value) == 1:
            return str(value[0])
    texts = [value for value in result.values() if isinstance(value, str)]
    return texts[0] if len(texts) == 1 else None


def _reference(result: Json, following: Known) -> str | None:
    """The code under which a result names a record that another tool looks up."""
    others = list(result)[1:]  # the first one is its own
    codes = {name: str(result[name]) for name in others if _CODE.fullmatch(str(result[name]))}
    fitting = [code for name, code in codes.items() if {*words_of(name)} & following.subject]
    return next(iter(fitting or codes.values()), None)


def _put_right(arguments: Json, refused: str) -> tuple[Json, str] | None:
    """The arguments of the next try, and what is thought of the refusal; None: there is no use."""
    example, named = _EXAMPLE.search(refused), re.match(r"Error: ([\w.]+) is ", refused)
    if example is None or named is None:
        again = re.search(r"\b(?:busy|again|later)\b", refused)
        return (arguments, "I make the call again.") if again else None
    made: Json = json.loads(json.dumps(arguments))
    *outer, last = named[1].split(".")
    place = made
    for part in outer:
        place = place.get(part, {})
    if last not in place or place[last] == (like := _like(str(place[last]), example[1])):
        return None
    place[last] = like
    return made, f"It has to look like {example[1]}."


def _like(value: str, example: str) -> str:
    """A value written as an example is."""
    dates = [str(each.value) for each in values_in(value) if each.kind == "date"]
    value = dates[0] if dates else value
    if found := re.fullmatch(r"(\d{4})-(\d\d)-(\d\d)", value):
        year, month, day = found.groups()
        if re.fullmatch(r"\d\d\.\d\d\.\d{4}", example):
            return f"{day}.{month}.{year}"
        return f"{month}/{day}/{year}" if "/" in example else value
    if example.startswith("#") and not value.startswith("#"):
        value = f"#{value}"
    if "-" not in example:
        value = value.replace("-", "")
    return value.lower() if example.islower() else value


def shown(value: Any) -> str:
    """A value of a result as an answer."""
    return json.dumps(value) if not isinstance(value, str) else value
