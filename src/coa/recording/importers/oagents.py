"""Result files of OAgents, the teacher of the Chain-of-Agents paper: one line for each task.

A line holds the memory of the manager, who writes programs, and under `search_agent_actions` what
its search agent did, by the text of the job. The jobs are spliced in where a program of the manager
asks for them. Plans are plans and the reflector's words are reflections: it says so itself, so each
such message has its part.

Where a plan parts the task into several that can be worked on at once, the manager's model is asked
once for each, and one step holds all of it: what was written, run, seen and returned, as four
lists. They are parted again.

What the file does not have: what a model was given (it is emptied before it is written), what the
search agent's model wrote beside its calls, prompts, tools on offer, and the tokens of each call;
a variant has those of whole runs. The true answer of a task is left where it is: it never becomes
part of an episode.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coa.io.runs import Json
from coa.recording.episode import SYSTEM, USER, Episode, Message
from coa.recording.importers.reading import Fields, Notes, documents_of, moment_of, opening
from coa.recording.importers.team import (
    FINAL,
    AgentRun,
    Job,
    TeamWriter,
    Use,
    answer_in,
    job_in,
    model_call,
    smolagents_call,
)
from coa.recording.importers.work import text_of
from coa.recording.programs import PYTHON, PYTHON_TOOL
from coa.recording.wire import FunctionCall, WireUsage, arguments_of

LEADER, SEARCHER, REFLECTOR, REFORMULATOR = "manager", "search_agent", "reflector", "reformulator"
POOR = 5
"""Of the reflector's scale of 0 to 10: what is less is poor by its own instructions."""
_CODE = re.compile(r"(?:Code:\s*)?```.*|<code>.*", re.DOTALL)
_LABEL = re.compile(r"^\s*Thoughts?:\s*", re.IGNORECASE)


def detect(head: bytes, path: Path) -> bool:
    first = opening(head)
    if isinstance(first, list):
        first = first[0] if first else None
    if not isinstance(first, dict):
        return False
    told = {"intermediate_steps", "prediction", "augmented_question", "search_agent_actions"}
    return "question" in first and len(first.keys() & told) >= 2


def read(files: Sequence[Path], notes: Notes) -> Iterator[Episode]:
    for _path, where, value in documents_of(files, notes, spread=True):
        if not isinstance(value, dict):
            notes.add("values that are no result left out", where)
            continue
        made = _ResultReading(Fields(value, where, notes)).episode()
        if made is None:
            notes.add("results without a question left out", where)
        else:
            yield made


class _Record(NamedTuple):
    """What the search agent did for one job."""

    told: str
    held: Fields


class _ResultReading:
    def __init__(self, row: Fields) -> None:
        self.row, self.notes = row, row.notes
        self.team = TeamWriter()
        self.records = self._records()
        self.left: dict[int, None] = dict.fromkeys(range(len(self.records)))
        """Records of which the job was not met yet, in their order."""
        self.model = row.text("agent_name")
        self.team.agent(LEADER)
        self.run = self.team.run(LEADER, USER)
        self.ended = False

    def episode(self) -> Episode | None:
        row = self.row
        question = row.text("question").strip()
        if not question:
            return None
        steps = row.objects("intermediate_steps")
        numbers = [number for step in steps if isinstance(number := step.value("step"), int)]
        if numbers != sorted(numbers):
            self.notes.add("results whose steps are out of order, taken as they stand", row.where)
        told = next((s.text("task") for s in steps if _kind(s) == "task"), "")
        asked = told or row.text("augmented_question") or question
        self.team.tell(self.run, asked if question in asked else question, USER)
        for step in steps:
            self._step(step)
        self._finish()
        for number in self.left:
            self.notes.add("jobs of the search agent that no step asks for", row.where)
            self.team.gaps["jobs_unplaced"] += bool(self.records[number].told)
        if "cost_summary" in row:
            self.notes.add("costs of whole runs left out (they are not told by call)", row.where)
        if "true_answer" in row:
            self.notes.add("true answers left out (give --tasks to have answers judged)", row.where)
        error = row.text("agent_error") or None
        if error is None and self.team.answer is None:
            error = "the run ended without an answer"
            if row.flag("iteration_limit_exceeded"):
                error = "the steps of the agent ran out"
        meta = {"level": row.value("task")} if isinstance(row.value("task"), int | str) else {}
        name = text_of(row.value("task_id")) or row.where
        episode = self.team.episode(name, question, "oagents", error, meta)
        if (seconds := _seconds(row)) is not None:
            episode.seconds["total"] = seconds
        return episode

    def _finish(self) -> None:
        """The answer that the file states, which another model may have put into words."""
        answer = text_of(self.row.value("prediction"))
        if not answer.strip():
            self.team.answer = None
            return
        if self.team.answer is None or self.team.answer.strip() != answer.strip():
            name = self.team.agent(REFORMULATOR)
            run = self.team.run(name, USER)
            if self.team.answer is not None:
                self.team.heard(run, self.team.answer)
            self.team.report(run, answer, model_call("", answer, (), WireUsage()))

    # -- steps of the manager ------------------------------------------------------------------

    def _step(self, step: Fields) -> None:
        kind = _kind(step)
        if kind == "planning":
            self._plan(step)
        elif kind == "action":
            for part in _parted(step):
                self._action(part)
            self._reflection(step)
        elif kind != "task":
            self.notes.add("steps of an unknown kind left out", step.where)

    def _plan(self, step: Fields) -> None:
        for name in ("facts", "plan"):
            text = _content(step, name)
            if not text:
                continue
            call = model_call(self.model, text, (), WireUsage())
            if name == "plan":
                self.team.say(self.run, SYSTEM, text, call, facts={"part": "plan"})
            else:
                self.team.say(self.run, SYSTEM, "", call, thought=text)

    def _action(self, step: Fields) -> None:
        written = _content(step, "model_output")
        calls = [smolagents_call(each) for each in step.objects("tool_calls")]
        error = text_of(step.object("error").value("message"))
        output = step.value("action_output")
        if not written and not calls:
            if output is not None:  # the last answer, when the steps had run out
                answer = text_of(output)
                call = model_call(self.model, answer, (), WireUsage())
                self.team.report(self.run, answer, call)
            elif error:
                self.team.tell(self.run, error)
            else:
                self.notes.add("steps in which the model said nothing left out", step.where)
            return
        call = model_call(self.model, written, () if written else calls, WireUsage())
        thought = _said_beside(written)
        seen = _content(step, "observations")
        final = [each for each in calls if each.name in FINAL]
        programs = [each for each in calls if each.name == PYTHON]
        ends = bool(final) or any("final_answer(" in _code(each) for each in programs)
        if ends and output is not None and not error:
            jobs = [job for each in programs for job in self._jobs(each, seen)[0]]
            if jobs:
                self.team.act(self.run, thought, call, jobs)
                call, thought = model_call(self.model, "", (), WireUsage()), ""
                self.team.gaps["calls_joined"] += 1
            answer = text_of(output) or (answer_in(final[0]) if final else "")
            self.team.report(self.run, answer, call, thought)
        else:
            shown = "\n".join(each for each in (seen, error) if each)
            self._done(calls, thought, call, shown, bool(error))

    def _done(
        self, calls: list[FunctionCall], thought: str, call: Any, shown: str, failed: bool
    ) -> None:
        done: list[Use | Job] = []
        for number, each in enumerate(calls):
            # What was shown is one text; it stands at the last call.
            seen = shown if number == len(calls) - 1 else None
            if each.name == PYTHON:
                jobs, only = self._jobs(each, shown)
                done += jobs
                if not jobs or not only:
                    self.team.gaps["program_unread"] += 1
                    self.team.tool(PYTHON_TOOL)
                    program = FunctionCall(each.id, PYTHON_TOOL.name, _code(each))
                    done.append(Use(program, seen, "mistake" if failed else None))
            elif each.name == SEARCHER:
                done.append(self._job(job_in(each), seen))
            else:
                done.append(Use(each, seen, "mistake" if failed else None))
        if done:
            self.team.act(self.run, thought, call, done)
        else:
            self.team.say(self.run, SYSTEM, "", call, thought=thought)
            if shown:
                self.team.tell(self.run, shown)

    def _reflection(self, step: Fields) -> None:
        said = text_of(step.value("evaluate_thought"))
        if not said.strip():
            return
        score = step.number("score")
        facts: Json = {} if score is None else {"score": score}
        if score is not None:
            facts["part"] = "alarm" if score < POOR else "approval"
        name = self.team.agent(REFLECTOR)
        call = model_call("", said, (), WireUsage())
        self.team.gaps["usage_unknown"] += 1
        self.team.events.append(Message(name, LEADER, said, facts=facts, call=call))
        self.team.heard(self.run, said)

    # -- jobs of the search agent --------------------------------------------------------------

    def _records(self) -> list[_Record]:
        stated = self.row.object("search_agent_actions")
        found = []
        for number, (told, held) in enumerate(stated.held.items(), start=1):
            where = f"{stated.where} {number}"
            if isinstance(held, dict):
                found.append(_Record(told, Fields(held, where, self.notes)))
            else:
                self.notes.add("jobs of the search agent that are no object", where)
        return found

    def _jobs(self, program: FunctionCall, shown: str) -> tuple[list[Job], bool]:
        """The jobs that a program gives to the search agent; whether it does nothing else."""
        asked, only = jobs_in(_code(program), SEARCHER)
        jobs = [self._job(each, shown if len(asked) == 1 else None) for each in asked]
        return jobs, only

    def _job(self, text: str | None, report: str | None) -> Job:
        """A job, and what the search agent did for it; `text` None: it was computed."""
        number = self._record_of(text)
        name = self.team.agent(SEARCHER)
        if number is None:
            self.notes.add("jobs whose work is not in the file", self.row.where)
            self.team.gaps["agent_runs_missing"] += 1
            return Job(name, text or "", lambda: False, report)
        record = self.records[number]
        self.left.pop(number, None)
        job = text if text is not None else record.told

        def play() -> bool:
            return self._play(record, number, job)

        return Job(name, job, play, report)

    def _record_of(self, text: str | None) -> int | None:
        """The record whose job holds this text; the only one left where it is not known."""
        if text is None:
            if len(self.left) == 1:
                self.notes.add("computed jobs taken for the only one left", self.row.where)
                return next(iter(self.left))
            return None
        wanted = " ".join(text.split())
        fitting = [
            number
            for number, record in enumerate(self.records)
            if wanted and wanted in " ".join(record.told.split())
        ]
        unused = [number for number in fitting if number in self.left]
        if fitting and not unused:
            self.notes.add("jobs given twice, whose first work was overwritten", self.row.where)
            return None
        if not unused:
            return None
        return min(unused, key=lambda each: len(self.records[each].told))

    def _play(self, record: _Record, number: int, job: str) -> bool:
        run = self.team.run(SEARCHER, LEADER)
        run.begun_anew |= record.told != job
        self.team.heard(run, record.told)
        calls = record.held.objects("tool_calls")
        if self._is_shared(number):
            self.notes.add("calls that stand at two jobs, taken at the later one", self.row.where)
            self.team.gaps["calls_at_two_jobs"] += 1
            calls = []
        for each in calls:
            self._searched(run, each)
        answer = record.held.value("answer")
        if answer is None:
            return False
        said = text_of(answer)
        self.team.gaps["text_not_captured"] += 1
        self.team.report(run, said, model_call("", said, (), WireUsage()))
        return True

    def _is_shared(self, number: int) -> bool:
        """Whether the next job has the same calls: when the steps of a job run out, OAgents goes on
        with its list of calls, so that both have those of both."""
        own = self.records[number].held.value("tool_calls")
        later = self.records[number + 1 : number + 2]
        return bool(own) and any(each.held.value("tool_calls") == own for each in later)

    def _searched(self, run: AgentRun, each: Fields) -> None:
        given = each.value("args")
        call = FunctionCall("", each.text("name"), arguments_of(given))
        seen = each.value("observation")
        self.team.gaps["text_not_captured"] += 1
        made = model_call("", "", [call], WireUsage())
        self.team.act(run, "", made, [Use(call, None if seen is None else text_of(seen))])


def _kind(step: Fields) -> str:
    stated = step.held.get("step_type")
    if isinstance(stated, str):
        return stated
    if "plan" in step:
        return "planning"
    return "task" if "task" in step else "action"


_LISTED = {"model_output": "model_output_list: ", "observations": "observation_list: "}
"""Before lists that OAgents writes as Python prints them, in a step on several sub-plans."""


def _parted(step: Fields) -> list[Fields]:
    """A step, or the steps that it is where several sub-plans were worked on in it."""
    written = step.value("model_output")
    if not isinstance(written, str) or not written.startswith(_LISTED["model_output"]):
        return [step]
    told = [_printed(step.value(name), before) for name, before in _LISTED.items()]
    calls, outputs = step.items("tool_calls"), step.items("action_output")
    if not calls or {len(each) for each in (*told, outputs)} != {len(calls)}:
        step.notes.add("steps on several sub-plans that cannot be told apart", step.where)
        return [step]
    parts = []
    for number, (said, seen, call) in enumerate(zip(*told, calls, strict=True), start=1):
        held = {**step.held, "model_output": said, "observations": seen, "tool_calls": [call]}
        # Only the last program may end the work, and an error is of the step as a whole.
        last = number == len(calls)
        held |= {"action_output": outputs[-1]} if last else {"action_output": None, "error": None}
        parts.append(Fields(held, f"{step.where}: sub-plan {number}", step.notes))
    return parts


def _printed(value: Any, before: str) -> list[Any]:
    """A list that Python printed after some words; an empty one where it is something else."""
    try:
        held = ast.literal_eval(str(value).removeprefix(before))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return held if isinstance(held, list) else []


def _content(step: Fields, name: str) -> str:
    value = step.value(name)
    if isinstance(value, dict):  # a message, as some variants dump it
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        step.wrong(name, "a text")
    return text_of(value)


def _code(call: FunctionCall) -> str:
    if isinstance(call.arguments, str):
        return call.arguments
    held = call.arguments.get("code")
    return held if isinstance(held, str) else text_of(call.arguments)


def _said_beside(written: str) -> str:
    """What a model says around its program."""
    return _LABEL.sub("", _CODE.sub("", written)).strip()


def _seconds(row: Fields) -> float | None:
    begun, ended = moment_of(row.text("start_time")), moment_of(row.text("end_time"))
    return max(0.0, (ended - begun).total_seconds()) if begun and ended else None


def jobs_in(code: str, agent: str) -> tuple[list[str | None], bool]:
    """What a program asks an agent for, in order, None where that is computed; and whether it does
    nothing else than to ask and to print. Nothing is executed."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [], False
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _calls(node, agent)]
    found.sort(key=lambda node: (node.lineno, node.col_offset))
    only = bool(found) and all(_is_plain(statement, agent) for statement in tree.body)
    return [_job_text(node) for node in found], only


def _calls(node: ast.AST | None, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _is_plain(statement: ast.stmt, agent: str) -> bool:
    """Whether a statement only asks an agent, keeps the reply under a name, or prints."""
    value = getattr(statement, "value", None)
    if isinstance(statement, ast.Assign):
        return _calls(value, agent) and all(isinstance(t, ast.Name) for t in statement.targets)
    if not isinstance(statement, ast.Expr) or not isinstance(value, ast.expr):
        return False
    if isinstance(value, ast.Constant) or _calls(value, agent):
        return True
    return _calls(value, "print") and not any(
        isinstance(node, ast.Call) and not _calls(node, agent)
        for argument in value.args  # type: ignore[attr-defined]
        for node in ast.walk(argument)
    )


def _job_text(node: Any) -> str | None:
    given = [each.value for each in node.keywords if each.arg in ("task", "request", "query")]
    given = given or list(node.args)
    try:
        held = ast.literal_eval(given[0]) if given else None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return held if isinstance(held, str) else None
