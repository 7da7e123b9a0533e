"""The rule-based coding team: planner, coder, critic and verifier, who work with the tool `code`.

Each works only from what was said to it: the planner from the question, the coder from question
and plan, the critic from question, program and output, the verifier, who gives the answer, from
question, plan and output. None ever sees a gold answer.

The coder errs at a set rate (see `careless`). The critic is not told; it always sees a
program that crashes, prints nothing or prints another form than asked for, sees other mistakes when
it is attentive, and now and then objects to a sound program. Errors, alarms, misses and false
alarms are counted in `episode.meta`, as those of the other experts are.
"""

from __future__ import annotations

import random
import re
from itertools import zip_longest

from coa.environments.gym.programs import ProgramPlan, plan_for
from coa.recording.episode import USER
from coa.recording.recorder import MAX_TRIES, EpisodeRecorder
from coa.tools.code import NOTHING

_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.]*[A-Za-z_])")
_QUOTED = re.compile(r'"[^"\n]*"')
_WORD = re.compile(r"[A-Za-z]{3,}")
_TOKEN = re.compile(r"\w+|[^\w\s]+")
_SWAPS = (
    (" + ", " - "),
    (" - ", " + "),
    (" * ", " + "),
    (" // ", " % "),
    (" < ", " > "),
    (" > ", " < "),
    (" == ", " != "),
    ("min(", "max("),
    ("max(", "min("),
    ("math.gcd", "math.lcm"),
    ("math.lcm", "math.gcd"),
    (", reverse=True", ""),
    ("[::-1]", ""),
    ('.count("1")', '.count("0")'),
)
_SHORT = (
    (" + 1):", "):"),
    (" + 1))", "))"),
    ("range(1, ", "range(2, "),
    ("range(2, ", "range(1, "),
)


def careless(program: str, question: str, rng: random.Random) -> str:
    """The program with a mistake of a kind drawn at random; the same program if none fits."""
    kinds = [
        _misread(program, question),
        _replaced(program, _SWAPS),
        _replaced(program, _SHORT),
        _unprinted(program),
        _misspelt(program),
    ]
    choices = [sorted(variants - {program}) for variants in kinds]
    choices = [variants for variants in choices if variants]
    return rng.choice(rng.choice(choices)) if choices else program


def _misread(program: str, question: str) -> set[str]:
    """Two digits or letters of the question in the wrong order, or a digit that is off by one."""
    spans = [number.span() for number in _NUMBER.finditer(program)]
    for quoted in _QUOTED.finditer(program):
        spans += [word.span() for word in _WORD.finditer(program, *quoted.span())]
    return {
        program[:start] + _garbled(program[start:end]) + program[end:]
        for start, end in spans
        if program[start:end] in question
    }


def _garbled(text: str) -> str:
    for i in range(len(text) - 2, -1, -1):
        if text[i] != text[i + 1] and not (i == 0 and text[1] == "0"):
            return text[:i] + text[i + 1] + text[i] + text[i + 2 :]
    if text[-1].isdigit():
        return text[:-1] + ("8" if text[-1] == "9" else str(int(text[-1]) + 1))
    return text


def _replaced(program: str, swaps: tuple[tuple[str, str], ...]) -> set[str]:
    """One replacement each. A loop with a condition is left alone, lest it never ends."""
    if "while " in program:
        return set()
    return {
        program[: place.start()] + wrong + program[place.end() :]
        for right, wrong in swaps
        for place in re.finditer(re.escape(right), program)
    }


def _unprinted(program: str) -> set[str]:
    """The result of the last line is kept and not printed."""
    *lines, last = program.split("\n")
    match = re.fullmatch(r"( *)print\(\*?(.+)\)", last)
    return {"\n".join([*lines, f"{match[1]}result = {match[2]}"])} if match else set()


def _misspelt(program: str) -> set[str]:
    """A colon or the last parenthesis is missing."""
    if ":\n" in program:
        before, _, after = program.rpartition(":\n")
        return {f"{before}\n{after}"}
    before, closing, after = program.rpartition(")")
    return {before + after} if closing else set()


def difference(program: str, expected: str) -> str:
    """What a reader of the task says about a program that is not what it expected; empty if it is.

    Where one token differs it is named, otherwise the line that was expected is.
    """
    lines = zip_longest(program.split("\n"), expected.split("\n"), fillvalue="")
    for number, (line, wanted) in enumerate(lines, start=1):
        if line == wanted:
            continue
        pairs = list(zip_longest(_TOKEN.findall(line), _TOKEN.findall(wanted), fillvalue=""))
        wrong = [(one, other) for one, other in pairs if one != other]
        if len(wrong) == 1 and all(wrong[0]):
            return f"Line {number} has {wrong[0][0]} where the task needs {wrong[0][1]}."
        return f"Line {number} should be: {wanted.strip()}"
    return ""


TOOL = "code"
_CRASH = re.compile(
    r"^(?:[\w.]*(?:Error|Exception|Operation|ByZero)\b|The program (?:was|exited)).*", re.MULTILINE
)
_DOUBT = "I am not sure that the program does what the task says. Check it."
_CHECKED = "# checked\n"
"""Makes a program that is run once more another call: the same call would not be made twice."""


class CodingTeam:
    """Solves the tasks of `gym-code`; see the module's docstring."""

    async def work(self, recorder: EpisodeRecorder) -> None:
        question = recorder.episode.question
        plan = plan_for(question)
        if plan is None:
            text = "I do not know how to solve this problem with a program."
            recorder.say("planner", USER, text, part="failure")
            recorder.fail("the planner could not plan")
            return
        recorder.say("planner", "coder", plan.text, part="plan", steps=list(plan.steps))
        recorder.tell("coder", f"Task: {question}")
        output = await self._solve(recorder, plan)
        if output is None:
            recorder.fail("no program was approved")
            return
        recorder.tell("verifier", f"{question}\n{plan.text}\n{output}")
        thought = f"The output is {plan.form.name}. It is the answer."
        recorder.say("verifier", USER, output, thought, part="verdict", score=4)
        recorder.episode.answer = output

    async def _solve(self, recorder: EpisodeRecorder, plan: ProgramPlan) -> str | None:
        """Write, run and criticise until an output stands; None after too many tries."""
        thought = plan.idea
        for attempt in range(MAX_TRIES):
            program = plan.program
            if attempt == 0 and recorder.happens(recorder.rates.error):
                program = careless(plan.program, recorder.episode.question, recorder.rng)
            erred = program != plan.program
            while (body := f"```py\n{program}\n```") in recorder.calls:
                program = _CHECKED + program
            output = (await recorder.use("coder", TOOL, body, thought, erred)).strip()
            told = f"Task: {recorder.episode.question}\nProgram:\n{body}\nOutput:\n{output}"
            recorder.tell("critic", told)
            objection, thought = self._judge(recorder, program, output, attempt)
            recorder.count("wrong_programs", erred)
            recorder.count("missed_mistakes", erred and not objection)
            false_alarm = objection == _DOUBT and not erred
            recorder.count("false_alarms", false_alarm)
            if not objection:
                text = f"The program ran. The output is {plan.form.name}, as asked."
                recorder.say("critic", "verifier", text, erred=erred, part="approval")
                return output
            recorder.count("alarms")
            recorder.say("critic", "coder", objection, erred=false_alarm, part="alarm")
        return None

    def _judge(
        self, recorder: EpisodeRecorder, program: str, output: str, attempt: int
    ) -> tuple[str, str]:
        """The critic's objection and what the coder thinks of it; both empty if there is none.

        The critic reads the task itself. It does not know whether the coder erred, and doubts only
        a first program.
        """
        crash = _CRASH.search(output)
        if crash:
            return f"The program did not run: {crash[0]}", "I repair the program."
        if output in ("", NOTHING):
            return "The program printed nothing. Print the result.", "I print the result."
        own = plan_for(recorder.episode.question)
        assert own is not None, recorder.episode.question
        attentive = not recorder.happens(recorder.rates.miss)
        wrong = difference(program.replace(_CHECKED, ""), own.program) if attentive else ""
        if wrong:
            return wrong, "I correct this line."
        if not own.form.fits(output):
            return f"The output is not {own.form.name}. Check the program.", "I check each line."
        if attempt == 0 and recorder.happens(recorder.rates.false_alarm):
            return _DOUBT, "I check each line and run it again."
        return "", ""
