"""The page on evaluation: its commands run, and its tables name what the files hold."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from coa.cli import main
from coa.environment import load_environment
from coa.environments import NAMES
from coa.tasks import TaskSet
from scripts import turns_of

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "evaluation.md").read_text("utf-8")


def commands() -> list[list[str]]:
    block = re.search(r"<!-- commands -->\n```sh\n(.*?)```", PAGE, re.S)
    assert block
    return [shlex.split(line)[1:] for line in block[1].splitlines()]


def test_the_commands_run_and_the_tables_name_their_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    smaller = {"smollm2-135m": "scripted:base.jsonl", "afm-135m": "scripted:afm.jsonl", "200": "5"}
    said = ""
    for command in commands():
        told = [smaller.get(word, word) for word in command]
        if command[0] == "eval":
            told += ["--turn-tokens", "999", "--context", "9999"]
        monkeypatch.setattr(sys, "argv", ["coa", *told])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr().out
        assert ended.value.code == 0, command
        if command[0] == "tasks":
            turns = turns_of(TaskSet.load(Path("tasks.jsonl")))
            lines = [{"question": asked, "turns": told} for asked, told in turns.items()]
            Path("afm.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            Path("base.jsonl").write_text(json.dumps({"turns": ["well"] * 3}) + "\n")
    assert "runs/afm won 5, 1 shown" in said and "answer: " in said
    several = json.loads(Path("runs/afm-k4/summary.json").read_text())
    assert list(several["pass_at"]) == ["1", "2", "4"]
    summary = json.loads(Path("runs/afm/summary.json").read_text())
    for key in summary.keys() - {"model", "tasks", "reward", "n", "k"}:
        assert f"`{key}`" in PAGE, key
    groups = [field for name in NAMES for field in load_environment(name).groups]
    for field in [*groups, "environment"]:
        assert f"`by_{field}`" in PAGE
    for path in Path("runs/afm").iterdir():
        assert f"`{path.name}`" in PAGE or path.name == ".lock"
    for key in json.loads(Path("runs/afm/latency.json").read_text()).keys() - {"n"}:
        assert f"`{key}`" in PAGE, key
