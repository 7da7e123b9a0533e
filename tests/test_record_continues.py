"""Episodes are continued, and replayed, with what they were recorded with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coa.distillation.dataset import Distilling, run_distillation
from coa.environment import ToolSettings
from coa.environments import make_tasks
from coa.errors import ConfigError, RecordError, UsageError
from coa.io.runs import manifest_beside
from coa.recording.record import Recorded, Recording, run_recording
from coa.tasks import TaskSet

ERRING = {"error_rate": 0.3}


def record(tasks: Path, out: Path, **more: Any) -> Recorded:
    return run_recording(Recording(tasks=tasks, workers=1, **more), out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks, and what the experts recorded of them."""
    path = tmp_path_factory.mktemp("recorded")
    make_tasks("atlas-mhqa", "train", 6, 3).save(path / "tasks.jsonl")
    record(path / "tasks.jsonl", path / "e.jsonl", options=ERRING)
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
        record(tasks, out)
    held = json.loads(beside) | {"corpus": "another"}
    manifest_beside(out).write_text(json.dumps(held))
    with pytest.raises(ConfigError, match="was started with corpus 'another', and it is not set"):
        record(tasks, out, options=ERRING)
    manifest_beside(out).write_bytes(beside)
    with pytest.raises(ConfigError, match=r"was started with answers '\w+', and it is '\w+' here"):
        record(tasks, out, options=ERRING, tools=ToolSettings(corpus="atlas:3"))
    assert out.read_bytes() == b"".join(lines[:2])


def test_a_file_that_holds_something_else_gets_nothing_beside_it(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "trajectories.jsonl"
    out.write_text('{"task_id": "t", "segments": []}\n')
    with pytest.raises(RecordError, match="this is no episode"):
        record(folder / "tasks.jsonl", out)
    assert [each.name for each in tmp_path.iterdir()] == [out.name]


def test_a_replay_with_another_corpus_than_the_record_is_said(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kit = ToolSettings(corpus="atlas:3")
    with pytest.raises(UsageError, match="no episode was kept: "):
        run_distillation(
            Distilling(folder / "e.jsonl", folder / "tasks.jsonl", tools=kit, workers=1),
            tmp_path / "d",
        )
    assert "e.jsonl: was recorded with another corpus than is given" in capsys.readouterr().err
    card = (tmp_path / "d" / "README.md").read_text()
    assert " --corpus atlas:3\n" in card


def test_an_episode_about_another_question_than_its_task_is_dropped(
    folder: Path, tmp_path: Path
) -> None:
    tasks = list(TaskSet.load(folder / "tasks.jsonl"))
    other = replace(tasks[0], question="What is something else?")
    TaskSet((other, *tasks[1:])).save(tmp_path / "tasks.jsonl")
    made = run_distillation(
        Distilling(folder / "e.jsonl", tmp_path / "tasks.jsonl", workers=1), tmp_path / "d"
    )
    assert made.funnel["rejected"]["its question is not its task's"] == 1


@pytest.mark.parametrize("name", ["atlas-mhqa", "atlas-web"])
def test_a_replay_with_the_same_corpus_is_not_said_to_be_with_another(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also when only some episodes are distilled, and when the answers were kept and are replayed:
    a page that is shown with a question in mind is of the same corpus."""
    tasks, out, cache = (tmp_path / each for each in ("t.jsonl", "e.jsonl", "tools.sqlite"))
    make_tasks(name, "train", 4, 3).save(tasks)
    record(tasks, out, tools=ToolSettings(cache=str(cache), mode="record"))
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[1:]))
    kits = {"live": ToolSettings(), "replay": ToolSettings(cache=str(cache), mode="replay")}
    for mode, kit in kits.items():
        made = run_distillation(Distilling(out, tasks, tools=kit, workers=1), tmp_path / mode)
        assert made.kept and "recorded with another" not in capsys.readouterr().err
