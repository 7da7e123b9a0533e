"""The rule-based coding team: planner, coder, critic and verifier, who work with the tool `code`.

Each works only from what was said to it: the planner from the question, the coder from question
and plan, the critic from question, program and output, the verifier, who gives the answer, from
question, plan and output. None ever sees a gold answer.

The coder errs at a set rate (see `coding_mistakes.py`). The critic is not told; it always sees a
program that crashes, prints nothing or prints another form than asked for, sees other mistakes when
it is attentive, and now and then objects to a sound program. Errors, alarms, misses and false
alarms are counted in `episode.meta`, as those of the other experts are.
"""

from __future__ import annotations

import re

from coa.teachers.coding_knowledge import plan_for
from coa.teachers.coding_mistakes import careless, difference
from coa.teachers.coding_plans import Plan
from coa.teachers.desk import MAX_TRIES, Desk
from coa.teachers.episode import USER
from coa.tools.code import NOTHING

TOOL = "code"
_CRASH = re.compile(
    r"^(?:[\w.]*(?:Error|Exception|Operation|ByZero)\b|The program (?:was|exited)).*", re.MULTILINE
)
_DOUBT = "I am not sure that the program does what the task says. Check it."
_CHECKED = "# checked\n"
"""Makes a program that is run once more another call: the same call would not be made twice."""


class CodingTeam:
    """Solves the tasks of `gym-code`; see the module's docstring."""

    async def work(self, desk: Desk) -> None:
        question = desk.episode.question
        plan = plan_for(question)
        if plan is None:
            text = "I do not know how to solve this problem with a program."
            desk.say("planner", USER, text, part="failure")
            desk.fail("the planner could not plan")
            return
        desk.say("planner", "coder", plan.text, part="plan", steps=list(plan.steps))
        desk.tell("coder", f"Task: {question}")
        output = await self._solve(desk, plan)
        if output is None:
            desk.fail("no program was approved")
            return
        desk.tell("verifier", f"{question}\n{plan.text}\n{output}")
        thought = f"The output is {plan.form.name}. It is the answer."
        desk.say("verifier", USER, output, thought, part="verdict", score=4)
        desk.episode.answer = output

    async def _solve(self, desk: Desk, plan: Plan) -> str | None:
        """Write, run and criticise until an output stands; None after too many tries."""
        thought = plan.idea
        for attempt in range(MAX_TRIES):
            program = plan.program
            if attempt == 0 and desk.happens(desk.rates.error):
                program = careless(plan.program, desk.episode.question, desk.rng)
            erred = program != plan.program
            while (body := f"```py\n{program}\n```") in desk.calls:
                program = _CHECKED + program
            output = (await desk.use("coder", TOOL, body, thought, erred)).strip()
            told = f"Task: {desk.episode.question}\nProgram:\n{body}\nOutput:\n{output}"
            desk.tell("critic", told)
            objection, thought = self._judge(desk, program, output, attempt)
            desk.count("wrong_programs", erred)
            desk.count("missed_mistakes", erred and not objection)
            false_alarm = objection == _DOUBT and not erred
            desk.count("false_alarms", false_alarm)
            if not objection:
                text = f"The program ran. The output is {plan.form.name}, as asked."
                desk.say("critic", "verifier", text, erred=erred, part="approval")
                return output
            desk.count("alarms")
            desk.say("critic", "coder", objection, erred=false_alarm, part="alarm")
        return None

    def _judge(self, desk: Desk, program: str, output: str, attempt: int) -> tuple[str, str]:
        """The critic's objection and what the coder thinks of it; both empty if there is none.

        The critic reads the task itself. It does not know whether the coder erred, and doubts only
        a first program.
        """
        crash = _CRASH.search(output)
        if crash:
            return f"The program did not run: {crash[0]}", "I repair the program."
        if output in ("", NOTHING):
            return "The program printed nothing. Print the result.", "I print the result."
        own = plan_for(desk.episode.question)
        assert own is not None, desk.episode.question
        attentive = not desk.happens(desk.rates.miss)
        wrong = difference(program.replace(_CHECKED, ""), own.program) if attentive else ""
        if wrong:
            return wrong, "I correct this line."
        if not own.form.fits(output):
            return f"The output is not {own.form.name}. Check the program.", "I check each line."
        if attempt == 0 and desk.happens(desk.rates.false_alarm):
            return _DOUBT, "I check each line and run it again."
        return "", ""
