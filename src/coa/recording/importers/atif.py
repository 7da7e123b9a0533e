"""ATIF, the Agent Trajectory Interchange Format, versions 1.0 to 1.8, and ADP from before it.

A trajectory is one agent at work: its steps are what it was told, what it said, which tools it
called and what they returned. A result may refer to the trajectory of a sub-agent, which is
embedded in the same document or stands in a file beside it; then the call was a job, and the
sub-agent's steps are spliced in where its result is. Readers of the format are asked to be lenient:
a field of another type is counted and is as if it were missing, copied context is context and
never something that was said again, and a step without a model call is no message of a model.

What `coa export --to atif` wrote is read back as it was (`coa.recording.atif`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from coa.errors import RecordError
from coa.grammar import ChatMessage
from coa.io.runs import Json
from coa.recording.atif import restored
from coa.recording.episode import SYSTEM, USER, Episode, ModelCall
from coa.recording.importers.reading import Fields, Notes, documents, moment_of, opening
from coa.recording.importers.team import (
    FINAL,
    AgentRun,
    Job,
    TeamWriter,
    Use,
    answer_in,
    declared_tool,
    job_in,
    model_call,
)
from coa.recording.importers.work import text_of
from coa.recording.wire import FunctionCall, WireUsage, arguments_of

_VERSION = re.compile(r"ATIF-v1\.([0-8])(?:\.\d+)?$")
_ADP = re.compile(r"(?:ADP-)?v?(?:0|1\.[0-2])(?:\.\d+)*$", re.IGNORECASE)
_MAX_DEPTH = 50
"""Of sub-agents inside sub-agents; deeper ones are a cycle or an attack."""


def detect(head: bytes, path: Path) -> bool:
    first = opening(head)
    if isinstance(first, list):
        first = first[0] if first else None
    if not isinstance(first, dict):
        return False
    if str(first.get("schema_version", "")).startswith("ATIF"):
        return True
    if {"agent", "steps"} <= first.keys():
        steps = first["steps"]
        return isinstance(steps, list) and (
            not steps or (isinstance(steps[0], dict) and "source" in steps[0])
        )
    return _is_adp(first)


def _is_adp(first: Json) -> bool:
    held = first.get("content")
    if not isinstance(held, list) or "id" not in first:
        return False
    return any(isinstance(each, dict) and "class_" in each for each in held)


def read(files: Sequence[Path], notes: Notes) -> Iterator[Episode]:
    parts = _Parts(files, notes)
    for path in files:
        if path.resolve() not in parts.inside:
            yield from _of_file(path, parts, notes)
    for path in files:  # those that refer to each other in a circle, which nothing leads into
        if path.resolve() in parts.inside and not parts.has_read(path):
            notes.add("files that only refer to each other", path.name)
            yield from _of_file(path, parts, notes)


def _of_file(path: Path, parts: _Parts, notes: Notes) -> Iterator[Episode]:
    parts.now(path)
    for where, value in _values(path, parts, notes):
        if isinstance(value, dict):
            yield from _episode(Fields(value, where, notes), path, parts)
        else:
            notes.add("values that are no trajectory left out", where)


def _values(path: Path, parts: _Parts, notes: Notes) -> Iterator[tuple[str, Any]]:
    try:
        yield from documents(path, notes, spread=True)
    except RecordError:
        if not parts.several:
            raise
        notes.add("files that cannot be read left out", path.name)


class _Parts:
    """Files that others refer to: they are read with those, and not as work of their own."""

    def __init__(self, files: Sequence[Path], notes: Notes) -> None:
        self.notes = notes
        self.inside: set[Path] = set()
        self._held: dict[Path, Json | None] = {}
        self._homes: dict[int, Path] = {}
        """By identity of a trajectory that was loaded: the file that it came from."""
        self.several = len(files) > 1
        known = {path.resolve(): path for path in files} if self.several else {}
        silent = Notes()
        for path in known.values():
            for _, value in _values(path, self, silent):
                for name in _references(value):
                    found = _file_below(path.parent, name)
                    other = known.get(found) if found is not None else None
                    if other is not None and other != path:
                        self.inside.add(other.resolve())

    def now(self, path: Path) -> None:
        """The file that is read; it is no part of itself."""
        self._held[path.resolve()] = None

    def has_read(self, path: Path) -> bool:
        return path.resolve() in self._held

    def load(self, held: Json, beside: Path, name: str) -> Json | None:
        """The trajectory in a file that a reference in `held` names; None where there is none.

        Only files below the folder of the one that refers to them are read: a file of a stranger
        does not choose what else of a machine becomes part of an episode. `beside` is the file that
        is read, where others are that `held` may have come from.
        """
        for home in dict.fromkeys((self._homes.get(id(held), beside), beside)):
            path = _file_below(home.parent, name)
            if path is not None:
                if path not in self._held:
                    self._held[path] = self._one(path)
                return self._held[path]
        return None

    def leads_back(self, held: Json, beside: Path, name: str) -> bool:
        """Whether a reference is to the file that is read, and so goes round in a circle."""
        return _file_below(self._homes.get(id(held), beside).parent, name) == beside.resolve()

    def _one(self, path: Path) -> Json | None:
        try:
            found = [value for _, value in documents(path, self.notes) if isinstance(value, dict)]
        except RecordError:
            self.notes.add("referenced files that cannot be read", path.name)
            return None
        if len(found) > 1:
            self.notes.add("referenced files with several trajectories, the first read", path.name)
        for each in found[:1]:
            self._homes.update((id(part), path) for part in (each, *_embedded(each)))
        return found[0] if found else None


def _file_below(folder: Path, name: str) -> Path | None:
    """A file in a folder or below it; None where there is none, or a name that no file can have."""
    try:
        path = (folder / name).resolve()
        return path if path.is_relative_to(folder.resolve()) and path.is_file() else None
    except (OSError, ValueError, RuntimeError):
        return None


def _references(value: Any, depth: int = 0) -> Iterator[str]:
    """Names of the files that a trajectory refers to."""
    if not isinstance(value, dict) or depth > _MAX_DEPTH:
        return
    if isinstance(name := value.get("continued_trajectory_ref"), str):
        yield name
    for step in _list(value.get("steps")):
        for result in _list(_dict(_dict(step).get("observation")).get("results")):
            for ref in _list(_dict(result).get("subagent_trajectory_ref")):
                if isinstance(name := _dict(ref).get("trajectory_path"), str):
                    yield name
    for each in _list(value.get("subagent_trajectories")):
        yield from _references(each, depth + 1)


def _dict(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if isinstance(value, dict) else []


# -- one trajectory ------------------------------------------------------------------------------


def _episode(root: Fields, path: Path, parts: _Parts) -> Iterator[Episode]:
    notes = root.notes
    if _is_adp(root.held):
        root = _from_adp(root)
    version = root.text("schema_version")
    if not _VERSION.match(version) and not _ADP.match(version):
        known = "no version" if not version else "an unknown version"
        notes.add(f"trajectories of {known}, read as ATIF 1.8", root.where)
    made = restored(root.held) or _DocumentReading(root, path, parts).episode()
    if made is None:
        notes.add("trajectories without a question or a step left out", root.where)
    else:
        yield made


class _Step(NamedTuple):
    fields: Fields
    part: Fields
    """The trajectory that it stands in, which may continue another one."""
    source: str
    text: str
    calls: list[FunctionCall]
    results: list[Fields]
    copied: bool


class _DocumentReading:
    """Reads one document, with what is embedded in it and what it refers to."""

    def __init__(self, root: Fields, path: Path, parts: _Parts) -> None:
        self.root, self.path, self.parts, self.notes = root, path, parts, root.notes
        self.team = TeamWriter()
        self.spliced: set[int] = set()
        """Trajectories whose steps are in the episode, by identity."""
        self.times: list[datetime] = []
        self.continued = False

    def episode(self) -> Episode | None:
        root = self.root
        steps = self._steps(root)
        question = next((s.text for s in steps if s.source == "user" and s.text.strip()), "")
        if not question or not any(step.source == "agent" for step in steps):
            return None
        self._play(root, steps, USER, "", ())
        for part in dict.fromkeys([root, *(step.part for step in steps)]):
            for held in _embedded(part.held):
                if id(held) not in self.spliced:
                    self.notes.add("sub-agents that no step refers to left out", part.where)
        error = None
        if self.team.answer is None:
            error = "the trajectory ends without an answer of its agent"
            if self.continued:
                error = "the trajectory goes on in a file that is not here"
        name = root.text("trajectory_id") or root.text("session_id") or root.where
        episode = self.team.episode(name, question.strip(), "atif", error, {})
        if len(self.times) > 1:
            episode.seconds["total"] = (max(self.times) - min(self.times)).total_seconds()
        return episode

    # -- steps ---------------------------------------------------------------------------------

    def _steps(self, trajectory: Fields) -> list[_Step]:
        """The steps of a trajectory and of those that continue it, in their order."""
        steps: list[_Step] = []
        seen = {id(trajectory.held)}
        part: Fields | None = trajectory
        while part is not None:
            numbers = [each.held.get("step_id") for each in part.objects("steps")]
            ordered = part.objects("steps")
            if _are_numbers(numbers) and numbers != sorted(numbers):
                self.notes.add("trajectories whose steps are out of order, sorted", part.where)
                ordered = sorted(ordered, key=lambda step: step.held["step_id"])
            if _are_numbers(numbers) and numbers:
                holes = max(numbers) - min(numbers) >= len(set(numbers))
                self.notes.add("trajectories with holes in their step_ids", part.where, holes)
            taken: dict[Any, Json] = {}
            for each in ordered:
                number = each.held.get("step_id")
                if isinstance(number, int) and taken.setdefault(number, each.held) == each.held:
                    if taken[number] is not each.held:
                        self.notes.add("steps that stand there twice left out", each.where)
                        continue
                elif isinstance(number, int):
                    self.notes.add("steps that share their step_id", each.where)
                step = self._step(each, part)
                # What a continuation repeats of the part before it is there already.
                if not (step.copied and part is not trajectory):
                    steps.append(step)
            part = self._next_part(part, seen)
        return steps

    def _next_part(self, part: Fields, seen: set[int]) -> Fields | None:
        name = part.text("continued_trajectory_ref")
        if not name:
            return None
        held = self.parts.load(part.held, self.path, name)
        circle = held is not None and id(held) in seen
        if circle or self.parts.leads_back(part.held, self.path, name):
            self.notes.add("continuations that go round in a circle", part.where)
            return None
        if held is None:
            self.continued = True
            self.notes.add("continuations that are not here", part.at("continued_trajectory_ref"))
            return None
        seen.add(id(held))
        return Fields(held, f"{part.where} continued", self.notes)

    def _step(self, step: Fields, part: Fields) -> _Step:
        source = step.text("source")
        if source not in ("system", "user", "agent"):
            self.notes.add("steps of an unknown source, read as the agent's", step.where)
            source = "agent"
        if (moment := moment_of(step.text("timestamp"))) is not None:
            self.times.append(moment)
        elif step.text("timestamp"):
            self.notes.add("timestamps that are none", step.where)
        calls = []
        for call in step.objects("tool_calls"):
            given = call.value("arguments")
            if given is not None and not isinstance(given, dict):
                call.wrong("arguments", "an object")
            name = call.text("function_name")
            if not name:
                self.notes.add("calls of a tool without a name", call.where)
            calls.append(FunctionCall(call.text("tool_call_id"), name, arguments_of(given)))
        results = step.object("observation").objects("results")
        copied = step.flag("is_copied_context")
        return _Step(step, part, source, self._content(step, "message"), calls, results, copied)

    def _content(self, held: Fields, name: str) -> str:
        """A text, or the texts of a list of parts."""
        value = held.value(name)
        if value is None or isinstance(value, str):
            return value or ""
        if not isinstance(value, list):
            held.wrong(name, "a text or a list of parts")
            return text_of(value)
        said = []
        for part in held.objects(name):
            if part.held.get("type") in (None, "text"):
                said.append(part.text("text"))
            else:
                self.notes.add("parts that are no text left out", part.where)
                self.team.gaps["not_text"] += 1
        return "\n".join(said)

    # -- playing it ----------------------------------------------------------------------------

    def _play(
        self,
        part: Fields,
        steps: list[_Step],
        asker: str,
        reached: str,
        above: tuple[str, ...],
        job: str = "",
    ) -> str:
        """Write what one agent did; returns its name.

        `reached`: what the tool is called by which it is asked; `above`: who waits for it.
        """
        self.spliced.add(id(part.held))
        stated = part.object("agent")
        name = stated.text("name")
        if reached and (not name or name in above):
            name = reached  # often the name of the whole program
        led = next((n for n, step in enumerate(steps) if step.source != "system"), len(steps))
        system = "\n\n".join(step.text for step in steps[:led] if step.text)
        name = self.team.agent(name, system, above)
        for spec in stated.objects("tool_definitions"):
            self.team.tool(declared_tool(spec))
        run = self.team.run(name, asker)
        model = stated.text("model_name")
        own = [at for at, step in enumerate(steps) if step.source == "agent" and not step.copied]
        asked = False
        for at, step in enumerate(steps[led:], start=led):
            if step.copied:
                self._recall(run, step)
            elif step.source == "agent":
                ends = at == own[-1] or all(s.source != "agent" for s in steps[at + 1 : at + 2])
                self._agent(run, step, model, ends, above)
            else:
                is_user = step.source == "user"
                if is_user and not (asker in (USER, SYSTEM) or asked):
                    # The job, which the asking agent has said already.
                    run.begun_anew |= step.text != job  # it stands in a frame
                    self.team.heard(run, step.text)
                elif is_user or step.text:
                    by = USER if is_user and asker == USER else SYSTEM
                    self.team.tell(run, step.text, by)
                asked |= is_user
                self._loose(step.part, run, step.results)
        return name

    def _recall(self, run: AgentRun, step: _Step) -> None:
        """A step of an earlier trajectory, repeated as context."""
        run.begun_anew = True
        self.notes.add("copied steps taken as context", step.fields.where)
        if step.source == "agent":
            run.given.append(ChatMessage("assistant", step.text))
        else:
            self.team.heard(run, step.text)
        for result in step.results:
            self.team.heard(run, self._content(result, "content"))

    def _agent(
        self, run: AgentRun, step: _Step, model: str, ends: bool, above: tuple[str, ...]
    ) -> None:
        fields = step.fields
        asked = fields.count("llm_call_count")
        if asked is not None and asked > 1:
            self.team.gaps["calls_joined"] += asked - 1
        thought = fields.text("reasoning_content")
        call = None if asked == 0 else self._call(step, fields.text("model_name") or model)
        if asked == 0 and not step.calls:  # what the program saw without having been asked to
            if step.text:
                self.team.tell(run, step.text)
            self._loose(step.part, run, step.results)
            return
        if not step.calls:
            if call is not None and (step.text or thought or not step.results):
                self.team.gaps["text_not_captured"] += not (step.text or thought)
                self.team.report(run, step.text, call, thought)
            self._loose(step.part, run, step.results)
            return
        thought = "\n".join(each for each in (thought, step.text) if each)
        if ends and len(step.calls) == 1 and step.calls[0].name in FINAL and call is not None:
            self.team.report(run, answer_in(step.calls[0]), call, thought)
            return
        done, rest = self._done(run, step, above)
        self.team.act(run, thought, call, done)
        self._loose(step.part, run, rest)

    def _call(self, step: _Step, model: str) -> ModelCall:
        metrics = step.fields.object("metrics")
        usage = WireUsage(
            metrics.count("prompt_tokens"),
            metrics.count("cached_tokens"),
            metrics.count("completion_tokens"),
            metrics.number("cost_usd", "cost"),
        )
        return model_call(model, step.text, step.calls, usage)

    def _done(
        self, run: AgentRun, step: _Step, above: tuple[str, ...]
    ) -> tuple[list[Use | Job], list[Fields]]:
        """What came of the calls of a step, and the results that are of none of them."""
        by_call: dict[str, list[Fields]] = {}
        rest: list[Fields] = []
        known = [call.id for call in step.calls]
        for name in {each for each in known if each and known.count(each) > 1}:
            self.notes.add("calls that share their tool_call_id", step.fields.where)
            self.team.gaps["ids_repeat"] += known.count(name) - 1
        for at, result in enumerate(step.results):
            source = result.text("source_call_id")
            if source in known:
                by_call.setdefault(source, []).append(result)
            elif not source and len(step.results) == len(known):
                by_call.setdefault(known[at], []).append(result)  # some writers leave it out
            elif not source and len(known) == 1:
                by_call.setdefault(known[0], []).append(result)
            else:
                if source:
                    self.notes.add("results of a call that is not in their step", result.where)
                rest.append(result)
        done: list[Use | Job] = []
        for call in step.calls:
            of_call = by_call.get(call.id, [])
            if known.count(call.id) > 1:  # each of the calls with this id has its own
                of_call = [by_call[call.id].pop(0)] if of_call else []
            done.append(self._one(step.part, run, call, of_call, above))
        rest += (each for name, left in by_call.items() if known.count(name) > 1 for each in left)
        return done, rest

    def _one(
        self,
        part: Fields,
        run: AgentRun,
        call: FunctionCall,
        results: list[Fields],
        above: tuple[str, ...],
    ) -> Use | Job:
        texts = [self._content(result, "content") for result in results]
        stated = any(result.value("content") is not None for result in results)
        known = "\n".join(text for text in texts if text) if stated else None
        referred = [ref for result in results for ref in _refs(result)]
        if not referred:
            return Use(call, known)
        found = [sub for ref in referred if (sub := self._resolve(part, ref)) is not None]
        waiting = (*above, run.name)
        if len(waiting) > _MAX_DEPTH:
            self.notes.add("sub-agents that are nested too deeply left out", part.where)
            found = []
        if not found:
            name = self.team.agent(call.name, "", waiting)
            self.team.gaps["agent_runs_missing"] += 1
            return Job(name, job_in(call), lambda: False, known)
        if len(found) > 1:
            self.notes.add("calls with several sub-agents, taken one after the other", part.where)
        subs = [(each, self._steps(each)) for each in found]
        told = next((s.text for s in subs[0][1] if s.source == "user" and not s.copied), "")
        name = found[0].object("agent").text("name")
        name = self.team.agent(call.name if not name or name in waiting else name, "", waiting)
        job = job_in(call, told)

        def play() -> bool:
            for sub, steps in subs:
                self._play(sub, steps, run.name, call.name, waiting, job)
            return self._answered(name, run.name)

        return Job(name, job, play, known)

    def _answered(self, agent: str, asker: str) -> bool:
        """Whether the last thing that was said is an agent's answer."""
        last = self.team.events[-1]
        return last.agent == agent and getattr(last, "to", "") == asker

    def _resolve(self, part: Fields, ref: Fields) -> Fields | None:
        """The trajectory that a reference means: embedded in the document, or in a file."""
        wanted = ref.text("trajectory_id")
        held: Json | None = None
        if wanted:
            embedded = [*_embedded(part.held), self.root.held, *_embedded(self.root.held)]
            ids = list({id(e): e for e in embedded if e.get("trajectory_id") == wanted}.values())
            if len(ids) > 1:
                self.notes.add("trajectory_ids that repeat, the first taken", ref.where)
            held = ids[0] if ids else None
        if held is None and (name := ref.text("trajectory_path")):
            held = self.parts.load(part.held, self.path, name)
            if self.parts.leads_back(part.held, self.path, name):
                held = self.root.held
        if held is None:
            self.notes.add("references to a sub-agent that is not here", ref.where)
            return None
        if id(held) in self.spliced:
            self.notes.add("references to a sub-agent that is there already", ref.where)
            return None
        self.spliced.add(id(held))
        return Fields(held, f"{ref.where}: sub-agent", self.notes)

    def _loose(self, part: Fields, run: AgentRun, results: list[Fields]) -> None:
        """Results of no call: what the program told the agent."""
        for result in results:
            text = self._content(result, "content")
            if text:
                self.team.tell(run, text)
            for ref in _refs(result):
                if (sub := self._resolve(part, ref)) is not None:
                    self._play(sub, self._steps(sub), SYSTEM, "", ())


# -- ADP, which became ATIF -----------------------------------------------------------------------


def _from_adp(held: Fields) -> Fields:
    """An ADP trajectory, up to 1.2, as ATIF: one step for each action, with what was seen next."""
    notes, steps = held.notes, list[Json]()
    for each in held.objects("content"):
        kind = each.text("class_")
        if kind in ("api_action", "code_action"):
            steps.append(_adp_action(each, kind, len(steps)))
        elif kind == "message_action":
            steps.append(_adp_said(each, each.text("content")))
        elif kind in ("text_observation", "web_observation"):
            text = each.text("content") if kind == "text_observation" else each.text("axtree")
            if kind == "web_observation":
                text = text or each.text("html")
            if each.text("source") == "user":
                steps.append({"source": "user", "message": text})
            elif steps and steps[-1].get("tool_calls") and "observation" not in steps[-1]:
                name = steps[-1]["tool_calls"][0]["tool_call_id"]
                results = [{"source_call_id": name, "content": text}]
                steps[-1]["observation"] = {"results": results}
            else:
                seen = {"results": [{"content": text}]}
                steps.append(
                    {"source": "agent", "message": "", "llm_call_count": 0, "observation": seen}
                )
        else:
            notes.add("parts of an unknown class left out", each.where)
    for number, step in enumerate(steps, start=1):
        step["step_id"] = number
    apis = [api for api in held.items("available_apis") if isinstance(api, dict)]
    agent: Json = {"name": "agent", "tool_definitions": apis}
    made: Json = {"schema_version": held.text("schema_version") or "1.2.0", "agent": agent}
    made |= {"trajectory_id": text_of(held.value("id")), "steps": steps}
    return Fields(made, held.where, notes)


def _adp_action(each: Fields, kind: str, number: int) -> Json:
    if kind == "api_action":
        name, arguments = each.text("function"), each.object("kwargs").held
    else:
        name, arguments = each.text("language") or "code", {"code": each.text("content")}
    call = {"tool_call_id": f"call-{number}", "function_name": name, "arguments": arguments}
    return _adp_said(each, each.text("description")) | {"tool_calls": [call]}


def _adp_said(each: Fields, text: str) -> Json:
    thought = each.text("reasoning_content")
    return {"source": "agent", "message": text} | (
        {"reasoning_content": thought} if thought else {}
    )


def _refs(result: Fields) -> list[Fields]:
    """References of a result; old writers have one where a list should be."""
    value = result.value("subagent_trajectory_ref")
    if isinstance(value, dict):
        return [Fields(value, result.at("subagent_trajectory_ref"), result.notes)]
    return result.objects("subagent_trajectory_ref")


def _embedded(held: Json, depth: int = 0) -> Iterator[Json]:
    if depth > _MAX_DEPTH:
        return
    for each in _list(held.get("subagent_trajectories")):
        if isinstance(each, dict):
            yield each
            yield from _embedded(each, depth + 1)


def _are_numbers(values: list[Any]) -> TypeGuard[list[int]]:
    return all(isinstance(each, int) and not isinstance(each, bool) for each in values)
