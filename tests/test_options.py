"""Options are fields of settings: each reaches its field; one not given keeps its default."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from coa.cli import app
from coa.cli.options import Late, with_settings
from coa.distillation.dataset import Distilling
from coa.engines import load_engine
from coa.errors import ConfigError, UsageError
from coa.evaluation.run import EvalSettings, _recipe
from coa.io.settings import Option
from coa.recording.record import Recording
from coa.rollouts import AgentSettings
from coa.serving.session import Serving

COMMANDS = {
    "ask": (AgentSettings, "coa.asking.ask_once", ["Why?"]),
    "record": (Recording, "coa.recording.record.run_recording", ["--out", "e.jsonl"]),
    "distill": (
        Distilling,
        "coa.distillation.dataset.run_distillation",
        ["--out", "d", "--episodes", "e.jsonl"],
    ),
    "eval": (EvalSettings, "coa.evaluation.run.run_eval", ["--out", "r"]),
    "serve": (Serving, "coa.serving.server.serve", []),
}


class CapturedError(Exception):
    """Ends a command where its work would begin."""


def options_of(settings: Any, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The fields that are options, with the type of each."""
    hints = get_type_hints(settings, include_extras=True)
    for field in dataclasses.fields(settings):
        hint = hints[field.name]
        if any(isinstance(note, Option) for note in get_args(hint)):
            yield (*at, field.name), hint
        elif dataclasses.is_dataclass(hint):
            yield from options_of(hint, (*at, field.name))


def value_at(settings: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        settings = getattr(settings, name)
    return settings


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Gives a command and returns the settings that its work would have been given."""

    def give(command: str, *words: str) -> Any:
        settings, where, needed = COMMANDS[command]
        seen: list[Any] = []

        def work(*given: Any, **more: Any) -> None:
            seen.extend(each for each in given if isinstance(each, settings))
            raise CapturedError

        monkeypatch.setattr(where, work)
        done = CliRunner().invoke(app, [command, *needed, *words])
        assert isinstance(done.exception, CapturedError), (done.output, done.exception)
        return seen[0]

    return give


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_not_given_has_the_default_of_its_settings(
    command: str, captured: Callable[..., Any]
) -> None:
    settings = COMMANDS[command][0]
    made: Any = settings(Path("e.jsonl")) if settings is Distilling else settings()
    assert captured(command) == made


VALUES = {str: "x", int: "7", float: "0.5", Path: "p"}
KNOWN = {
    "observations": "withheld",
    "mode": "replay",
    "temperature": "0.5",
    "best_of": "judge",
    "seconds": "7.5",
    "tasks": "t.jsonl",
    "weights": "int8",
}
LEFT_OUT = {"observations": {"ask", "record", "distill", "serve"}, "unsafe_code": {"serve"}}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_reaches_its_field(command: str, captured: Callable[..., Any]) -> None:
    tried = 0
    for path, hint in options_of(COMMANDS[command][0]):
        name = path[-1]
        if name in ("settings", "cache", "mode") or command in LEFT_OUT.get(name, ()):
            continue
        kind, option = get_args(hint)[:2]
        flag = option.name or f"--{name.replace('_', '-')}"
        if bool in (kind, *get_args(kind)):
            assert value_at(captured(command, flag), path) is True
        else:
            types = [each for each in (kind, *get_args(kind)) if each in VALUES]
            text = KNOWN.get(name) or VALUES[types[0] if types else str]
            more = ["--judge", "openai:m@http://127.0.0.1:1"] if name == "best_of" else []
            more += ["--temperature", "1"] if name == "k" else []
            found = value_at(captured(command, flag, text, *more), path)
            shown = [str(each) for each in found] if option.many else str(found)
            assert shown == ([text] if option.many else text), (name, found)
        tried += 1
    assert tried > 5


def test_settings_of_environments_are_arguments(captured: Callable[..., Any]) -> None:
    found = captured("eval", "--env", "a", "--env", "b", "env.world=3", "env.name=x")
    assert found.env == ("a", "b") and found.settings == {"world": 3, "name": "x"}
    done = CliRunner().invoke(app, ["eval", "--out", "r", "world=3"])
    assert isinstance(done.exception, UsageError)
    assert str(done.exception) == "'world=3' is not a setting; expected env.NAME=value."


@dataclasses.dataclass(frozen=True)
class Few:
    pieces: Annotated[int, Option("How many.", "--some", least=2)] = 2
    inner: str = "no option"


def test_a_bound_is_kept() -> None:
    seen: list[Few] = []

    @with_settings(few=f"{__name__}:Few")
    def command(few: Few) -> None:
        seen.append(few)

    own = typer.Typer()
    own.command(cls=Late)(command)
    own.callback()(lambda: None)
    assert CliRunner().invoke(own, ["command", "--some", "3"]).exit_code == 0 and seen == [Few(3)]
    assert CliRunner().invoke(own, ["command", "--some", "1"]).exit_code == 2
    assert CliRunner().invoke(own, ["command", "--inner", "x"]).exit_code == 2


@pytest.mark.parametrize("ref", ["scripted:FILE", "openai:m@http://127.0.0.1:1"])
def test_threads_are_refused_where_nothing_is_computed(ref: str, tmp_path: Path) -> None:
    ref = ref.replace("FILE", str(tmp_path / "model.jsonl"))
    (tmp_path / "model.jsonl").write_text("")
    with pytest.raises(ConfigError, match="does not compute here: leave it out"):
        load_engine(ref, threads=2)
    with pytest.raises(ConfigError, match="threads is 0, expected at least 1"):
        load_engine(ref, threads=0)


@pytest.mark.parametrize("command", ["ask x", "eval --out r", "serve"])
def test_no_threads_at_all_are_refused_before_any_work(command: str) -> None:
    done = CliRunner().invoke(app, [*command.split(), "--threads", "0"])
    assert done.exit_code == 2 and "--threads" in done.output


def test_threads_change_no_result() -> None:
    assert _recipe(EvalSettings(threads=1)) == _recipe(EvalSettings())
