"""The team of language models against a real llama.cpp server with the embedded model.

SmolLM2-135M is far too small for the work. What is shown here is that llama.cpp makes it follow the
schemas, that nothing crashes, that everything is recorded, counted and paid once, and that the run
ends.
`make test-servers` installs the server; without it the test is skipped.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from coa.environments import make_tasks
from coa.io.runs import manifest_beside, read_jsonl
from coa.recording.chat import JSON_SCHEMA, STRUCTURED, journal_of
from coa.recording.episode import Episode, Message, load_episodes
from coa.recording.record import Recording, run_recording
from coa.tasks import TaskSet
from test_llama_server import gguf, ref

pytestmark = pytest.mark.slow
__all__ = ["gguf", "ref"]  # fixtures


def record(tasks: TaskSet, out: Path, **options: Any) -> list[Episode]:
    run_recording(Recording(tasks=tasks, teacher="llm", options=options), out)
    return load_episodes(out)


def test_a_served_model_is_recorded_counted_and_paid_once(ref: str, tmp_path: Path) -> None:
    out = tmp_path / "episodes.jsonl"
    chosen = [make_tasks(name, "train", 2, seed=2) for name in ("atlas-mhqa", "gym-code")]
    tasks = TaskSet(tuple(task for some in chosen for task in some))
    how = {"temperature": 0.8, "max_tokens": 256, "slots": 2, "attempts": 3, "rounds": 2}
    episodes = record(tasks, out, model=ref, **how)
    assert [episode.task_id for episode in episodes] == [task.id for task in tasks]
    assert all(episode.answer is not None or episode.error for episode in episodes)
    said = [e.events[place] for e in load_episodes(out) for place in e.calls]
    calls = [event.call for event in said if isinstance(event, Message) and event.call]
    assert len(calls) == len(said) >= len(tasks)
    assert all(c.prompt_tokens > 300 and c.sampled_tokens > 0 for c in calls)
    assert not any(e.meta.get("estimated_calls") for e in episodes)  # the server counts
    every = [line for _, line in read_jsonl(journal_of(out))]
    (found,) = [line for line in every if line["agent"] == STRUCTURED]
    assert found["text"] == JSON_SCHEMA
    wrong = [e.facts.get("complaint") for e in said if isinstance(e, Message)]
    print(Counter(wrong))
    assert not any("JSON" in complaint for complaint in wrong if complaint), wrong
    paid = [line for line in every if line["agent"] != STRUCTURED]
    assert len(paid) == len(calls) == len({line["key"] for line in paid})
    assert sum(c.prompt_tokens for c in calls) == sum(line["prompt_tokens"] for line in paid)
    whole = out.read_bytes()
    out.unlink()
    manifest_beside(out).unlink()
    stopped = "openai:smollm2@http://127.0.0.1:1"
    record(tasks, out, model=stopped, **how)  # no server is needed for what was paid
    assert out.read_bytes() == whole
    for episode in episodes:
        malformed = episode.meta.get("malformed_replies", 0)
        print(
            f"{episode.error or episode.answer!r}: {len(episode.calls)} calls, {malformed} not read"
        )
