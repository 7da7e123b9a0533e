"""A team of your own: `coa record --teacher own_teacher:Team --tasks questions.csv --out ...`."""

import re
import tempfile
from pathlib import Path

from coa import Task, ToolCall, distill
from coa.recording.episode import AgentSpec, Episode, Message, ToolUse
from coa.recording.record import Recording, run_recording
from coa.tools import Toolbox


class Team:
    async def record(self, task: Task, toolbox: Toolbox, seed: int = 0) -> Episode:
        agents = [AgentSpec("scout", "searcher", "Search."), AgentSpec("clerk", "reader", "Read.")]
        seen = await toolbox.call(ToolCall("wiki_search", task.question))  # your agents work here
        found = re.search(r"is (\w+)\.", seen.text)
        events = [
            Message("scout", "scout", "1. search for it", facts={"part": "plan"}),
            ToolUse("scout", "wiki_search", task.question, seen.text, seen.failure),
            Message("clerk", "user", found[1] if found else "", "I read it.", {"part": "verdict"}),
        ]
        answer, meta = found[1] if found else None, dict(task.meta)
        return Episode(task.id, task.question, "my-team", agents, events, answer, meta=meta)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        tasks, episodes = Path(name, "questions.csv"), Path(name, "episodes.jsonl")
        tasks.write_text("question,answer,level\nWhat is the capital of Peru?,Lima,1\n")
        run_recording(Recording(tasks=tasks, teacher="own_teacher:Team"), episodes)
        print(distill(episodes, tasks=tasks, out=Path(name, "dataset")).kept[0].text)
