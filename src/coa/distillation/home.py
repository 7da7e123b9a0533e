"""`coa init FOLDER --from EPISODES`: an environment made of what a team was recorded to do.

    grammar.toml        derived from the team
    recorded.jsonl      what its tools are, and what they answered, until the real ones are named
    tasks.jsonl         its questions, with the answers that are known
    environment.toml    puts them together, and says which line to change

An answer is known when the recording says that it was judged right; otherwise the team's own stands
in for it, and the task says so. A question whose every answer was found wrong is left out. All of
it holds what users asked and tools returned, so that only the owner may read the files.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from keyword import iskeyword, kwlist
from pathlib import Path

from coa.distillation.convert import team_tools
from coa.distillation.dataset import calls_of
from coa.distillation.derive import Derived, Words, derive_grammar, found_wrong
from coa.environment import FILE, SPLITS, split_of
from coa.grammar.load import block_names
from coa.io.files import new_folder
from coa.io.runs import Json, dumps
from coa.recording.episode import Episode, ToolUse
from coa.tasks import Task
from coa.tools.recorded import RECORDED, ToolRecord

GRAMMAR_FILE, RECORD_FILE, TASKS_FILE = "grammar.toml", "recorded.jsonl", "tasks.jsonl"
VERIFIED = "verified"
"""In a task's meta: whether its answer was judged right, or is what the team said."""


@dataclass(frozen=True)
class Home:
    """The environment that was written."""

    folder: Path
    derived: Derived
    tasks: tuple[Task, ...]
    tools: tuple[str, ...]
    left_out: int
    """Questions whose every answer was found wrong, or that have none."""

    @property
    def verified(self) -> int:
        return sum(bool(task.meta[VERIFIED]) for task in self.tasks)

    def to_json(self) -> Json:
        splits = Counter(map(split_of, self.tasks))
        return {
            "folder": str(self.folder),
            "grammar": self.derived.to_json(),
            "tasks": {split: splits[split] for split in SPLITS},
            "verified": self.verified,
            "left_out": self.left_out,
            "tools": list(self.tools),
        }

    def lines(self) -> Iterator[str]:
        yield from self.derived.lines()
        right, own = self.verified, len(self.tasks) - self.verified
        said = f"{right} answers were judged right, {own} are the team's own"
        yield f"{right + own} questions: {said}"
        if self.left_out:
            yield f"{self.left_out} questions have no answer that was not found wrong; left out"
        if self.tools:
            told = f"answer from {RECORD_FILE} until {FILE} names real functions"
            yield f"{', '.join(self.tools)} {told}"


def write_home(folder: Path, episodes: Sequence[Episode], words: Words | None = None) -> Home:
    """Write the environment of a team into a new or empty folder."""
    name = folder.resolve().name
    derived = derive_grammar(episodes, re.sub(r"[^\w-]+", "_", name) or "team", words)
    tasks = tuple(_tasks(episodes))
    record = record_of(episodes)
    asked = {episode.task_id for episode in episodes}
    tools = tuple(tool.name for tool in record.tools)
    home = Home(folder, derived, tasks, tools, len(asked) - len(tasks))
    new_folder(folder)
    _write(folder / GRAMMAR_FILE, derived.toml())
    _write(folder / RECORD_FILE, "".join(dumps(line) + "\n" for line in record.to_lines()))
    _write(folder / TASKS_FILE, "".join(dumps(task.to_json()) + "\n" for task in tasks))
    _write(folder / FILE, _file(name, home))
    return home


def _write(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")


def record_of(episodes: Sequence[Episode]) -> ToolRecord:
    """The tools of a team and all calls of them, each with the task that it was made for."""
    calls = (call for each in episodes for call in calls_of(_answered(each), each.task_id))
    return ToolRecord(tuple(team_tools(episodes)), tuple(calls))


def _answered(episode: Episode) -> Episode:
    """Without calls that the world did not answer: that a server was down once is no answer."""
    failed = ("failed", "timeout")
    kept = (e for e in episode.events if not (isinstance(e, ToolUse) and e.failure in failed))
    return replace(episode, events=list(kept))


def _tasks(episodes: Iterable[Episode]) -> Iterator[Task]:
    """The questions whose answers are known, or what the team said."""
    by_task: dict[str, list[Episode]] = {}
    for episode in episodes:
        by_task.setdefault(episode.task_id, []).append(episode)
    for task_id, own in by_task.items():
        answered = [e for e in own if e.answer and not found_wrong(e)]
        judged = [e for e in answered if e.meta.get("success") == 1]
        if best := next(iter(judged or answered), None):
            meta: Mapping[str, bool] = {VERIFIED: bool(judged)}
            yield Task(best.question, (best.answer or "",), task_id, meta, history=best.history)


def _functions(tools: Sequence[str]) -> dict[str, str]:
    """What functions may be called that are these tools."""
    sound = {tool: tool for tool in tools if tool.isidentifier() and not iskeyword(tool)}
    others = block_names((tool for tool in tools if tool not in sound), {*sound, *kwlist})
    return {tool: (sound | others)[tool] for tool in tools}


def _file(name: str, home: Home) -> str:
    """The text of environment.toml."""
    functions = _functions(home.tools)
    named = ", ".join(f'"tools:{function}"' for function in functions.values())
    told = "".join(
        f"\n# The tool of {function} says its name: @coa.tool(name={json.dumps(tool)})"
        for tool, function in functions.items()
        if tool != function
    )
    splits = {split_of(task) for task in home.tasks}
    tasks = json.dumps(TASKS_FILE)
    note = "split into train and test by a hash of their ids"
    if len(splits) < len(SPLITS):
        tasks = "{" + ", ".join(f"{split} = {tasks}" for split in SPLITS) + "}"
        note = "too few to keep some for the test: both are the same"
    own = len(home.tasks) - home.verified
    return f'''# The work of a recorded team as an environment. `coa check .` says whether it works.
name = {json.dumps(name, ensure_ascii=False)}
grammar = "{GRAMMAR_FILE}"  # derived from the team: read and edit it before anything is trained

# The tools answer from the record, and say so where it has no answer. To call the real ones, put
# functions of these names into tools.py beside this file and name them here; what takes other
# arguments than the team's is said in one line. "{RECORDED}" in the list stands for all the others.
# tools = [{named}]{told}
tools = "{RECORDED}"
recorded = "{RECORD_FILE}"

# {len(home.tasks)} questions, {note}.
# {home.verified} answers were judged right when they were recorded; {own} are what the team said,
# which nobody judged: `"{VERIFIED}": false`. Correct them where you know better.
tasks = {tasks}
groups = ["{VERIFIED}"]
reward = "exact"  # or "f1", "math", "judge", or a function of yours: "tools:right"
'''
