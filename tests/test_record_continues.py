"""Episodes are continued, and replayed, with what they were recorded with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from coa.distill.stage import run_distillation
from coa.errors import ConfigError, RecordError, UsageError
from coa.runs import manifest_beside
from coa.tasks import TaskSet, make_tasks
from coa.teachers.stage import run_recording
from coa.tools.kits import KitSettings

ERRING = {"error_rate": 0.3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks, and what the experts recorded of them."""
    path = tmp_path_factory.mktemp("recorded")
    make_tasks("atlas-mhqa", "train", 6, 3).save(path / "tasks.jsonl")
    run_recording(path / "tasks.jsonl", path / "e.jsonl", options=ERRING, workers=1)
    return path


def test_what_was_recorded_with_an_option_is_not_continued_without_it(
    folder: Path, tmp_path: Path
) -> None:
    tasks, out = folder / "tasks.jsonl", tmp_path / "e.jsonl"
    lines = (folder / "e.jsonl").read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:2]))
    beside = manifest_beside(folder / "e.jsonl").read_bytes()
    manifest_beside(out).write_bytes(beside)
    with pytest.raises(ConfigError, match=r"was started with error_rate 0\.\d+, and it is not set"):
        run_recording(tasks, out, workers=1)
    held = json.loads(beside) | {"corpus": "another"}
    manifest_beside(out).write_text(json.dumps(held))
    with pytest.raises(ConfigError, match="was started with corpus 'another', and it is not set"):
        run_recording(tasks, out, options=ERRING, workers=1)
    assert out.read_bytes() == b"".join(lines[:2])


def test_a_file_that_holds_something_else_gets_nothing_beside_it(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "trajectories.jsonl"
    out.write_text('{"task_id": "t", "segments": []}\n')
    with pytest.raises(RecordError, match="this is no episode"):
        run_recording(folder / "tasks.jsonl", out, workers=1)
    assert [each.name for each in tmp_path.iterdir()] == [out.name]


def test_a_replay_with_another_corpus_than_the_record_is_said(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kit = KitSettings(corpus="atlas:3")
    with pytest.raises(UsageError, match="no episode was kept: "):
        run_distillation(
            folder / "e.jsonl", tmp_path / "d", folder / "tasks.jsonl", kit=kit, workers=1
        )
    assert "e.jsonl: was recorded with another --corpus than is given" in capsys.readouterr().err
    card = (tmp_path / "d" / "README.md").read_text()
    assert " --corpus atlas:3\n" in card


def test_an_episode_about_another_question_than_its_task_is_dropped(
    folder: Path, tmp_path: Path
) -> None:
    tasks = list(TaskSet.load(folder / "tasks.jsonl"))
    other = replace(tasks[0], question="What is something else?")
    TaskSet((other, *tasks[1:])).save(tmp_path / "tasks.jsonl")
    made = run_distillation(folder / "e.jsonl", tmp_path / "d", tmp_path / "tasks.jsonl", workers=1)
    assert made.funnel["rejected"]["its question is not its task's"] == 1
