"""Options of `coa record` and `coa distill`: a grammar decides about tools, and what is ignored is
said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coa.cli import app
from coa.errors import ConfigError, GrammarError, UsageError
from coa.recording.episode import AgentSpec, Episode, load_episodes
from coa.recording.record import Recording, rehearse_recording, run_recording
from coa.tasks import Task, TaskSet
from coa.tools import Toolbox


class Lister:
    """Says which tools it was given."""

    async def record(self, task: Task, toolbox: Toolbox, seed: int = 0) -> Episode:
        agents = [AgentSpec("lead", "planner", "You lead.")]
        return Episode(task.id, task.question, "lister", agents, meta={"given": list(toolbox)})


LISTER = f"{__name__}:Lister"


def given(path: Path) -> list[list[str]]:
    return [episode.meta["given"] for episode in load_episodes(path)]


def test_a_task_that_names_its_grammar_is_recorded_with_its_tools(tmp_path: Path) -> None:
    made_for = [{"set": "math500", "grammar": "code"}, {"set": "nq", "grammar": "mhqa"}, {}]
    tasks = [Task(f"{place}?", meta=meta) for place, meta in enumerate(made_for)]
    TaskSet(tuple(tasks)).save(tmp_path / "t.jsonl")
    run_recording(Recording(tasks=tmp_path / "t.jsonl", teacher=LISTER), tmp_path / "e.jsonl")
    assert given(tmp_path / "e.jsonl") == [["code"], ["wiki_search"], ["wiki_search"]]


def test_a_csv_of_ones_own_is_recorded_over_the_web(tmp_path: Path) -> None:
    tasks, web = tmp_path / "q.csv", tmp_path / "web.toml"
    tasks.write_text("question,answer\nWhere is Lima?,Peru\n")
    web.write_text("seconds = 5.0\n")
    words = ["record", "--tasks", str(tasks), "--teacher", LISTER, "--corpus", str(web), "--out"]
    refused = CliRunner().invoke(app, [*words, str(tmp_path / "a.jsonl")])
    assert isinstance(refused.exception, UsageError) and "use --grammar web" in str(
        refused.exception
    )
    done = CliRunner().invoke(app, [*words, str(tmp_path / "b.jsonl"), "--grammar", "web"])
    assert done.exit_code == 0, done.output
    assert given(tmp_path / "b.jsonl") == [["web_search", "crawl_page"]]
    (episode,) = load_episodes(tmp_path / "b.jsonl")
    assert episode.meta["grammar"] == "web"  # and so it is distilled in it
    recording = Recording(tasks=tasks, teacher=LISTER)
    with pytest.raises(GrammarError, match="'wep' is not a grammar"):
        run_recording(replace(recording, grammar="wep"), tmp_path / "c.jsonl")
    with pytest.raises(ConfigError, match=r"was started with grammar 'web', and it is 'mhqa' here"):
        run_recording(replace(recording, grammar="mhqa"), tmp_path / "b.jsonl")


@pytest.mark.parametrize("workers", [None, 1, 4])
def test_workers_that_a_teacher_cannot_have_are_said_to_be_ignored(
    workers: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    TaskSet((Task("Where is Lima?"),)).save(tmp_path / "t.jsonl")
    options = {"model": "openai:tester@http://127.0.0.1:1"}
    recording = Recording(tasks=tmp_path / "t.jsonl", teacher="llm", options=options)
    rehearse_recording(replace(recording, workers=workers), tmp_path / "e.jsonl")
    said = "coa: workers 4 is ignored: the teacher llm works in one process\n"
    assert capsys.readouterr().err == (said if workers == 4 else "")


def test_a_filter_that_needs_gold_is_said_to_be_ignored_without(tmp_path: Path) -> None:
    tasks, episodes = tmp_path / "t.jsonl", tmp_path / "e.jsonl"
    TaskSet((Task("What is the capital of Peru?", ("Lima",)),)).save(tasks)
    run_recording(Recording(tasks=tasks, options={"error_rate": 0.0}), episodes)
    words = ["distill", "--episodes", str(episodes), "filter.keep_unjudged=false", "--out"]
    said = "filter.keep_unjudged=false is ignored: it needs --tasks"
    judged = ["--tasks", str(tasks)]
    for name, more in (("with", judged), ("without", [])):
        done = CliRunner().invoke(app, [*words, str(tmp_path / name), *more])
        assert done.exit_code == 0, done.output
        assert (said in done.output) == (not more)
