"""`coa record -- COMMAND`: one program, many tasks, what is kept when something is killed."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coa.errors import ConfigError, UsageError
from coa.recording.calls import CallLog, LoggedSession, read_sessions
from coa.recording.episode import Episode, ToolUse, load_episodes
from coa.recording.graph import episode_of
from coa.recording.program import (
    ProgramRecording,
    _Program,
    record_program,
    sessions_beside,
    spans_beside,
)
from coa.recording.proxy import UNTOLD
from coa.tasks import Task, TaskSet
from proxy_parts import HERE, TRACED, program, recorded
from scripted_provider import Asked, Reply, ScriptedProvider, ToolCall

KEY = "sk-planted-9f3b27"
OTHER_KEYS = ("sk-ant-planted-41c8", "sk-planted-too-77d0", "AKIAPLANTEDTOO234567")
SECRET = "the vault code is 4711"
PATIENCE_S = 900
"""Until a test gives up: what it waits for comes at once, or never."""


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> object:
    """A provider that says the last word of what it was asked; the environment points to it."""

    def script(asked: Asked) -> Reply:
        return Reply(asked.last.split()[-1].strip("?"))

    for name in ("OPENAI_API_BASE", "ANTHROPIC_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with ScriptedProvider(script) as made:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{made.url}/v1")
        yield made


def traced(folder: Path, text: str, name: str = "team.py") -> list[str]:
    """The command of a program that sends spans."""
    return program(folder, text, name, begins=TRACED)


def tasks_file(folder: Path, count: int) -> Path:
    path = folder / "tasks.jsonl"
    tasks = TaskSet(tuple(Task(f"say w{n}", (f"w{n}",), f"t{n}") for n in range(count)))
    tasks.save(path)
    return path


def test_a_program_is_recorded_unchanged_and_its_run_is_one_episode(
    tmp_path: Path, provider: ScriptedProvider, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    out = tmp_path / "e.jsonl"
    command = program(tmp_path, "print(said('say Lima')); ask('again Quito', stream=True)")
    result = recorded(out, command)
    assert (result.episodes, result.calls, result.code) == (1, 2, 0)
    assert capfdbinary.readouterr().out == b"Lima\n"
    (episode,) = load_episodes(out)
    assert episode.answer == "Quito" and episode.error is None
    assert episode.meta["source"] == "proxy" and "success" not in episode.meta
    (session,) = read_sessions(sessions_beside(out))
    assert session.end is not None
    assert session.end["exit_code"] == 0 and session.end["stdout"] == "Lima\n"
    for path in tmp_path.glob("e.jsonl*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert recorded(out, command).episodes == 2  # a run more, another episode


def test_a_program_gets_a_dummy_key_only_for_a_server_of_this_machine(
    tmp_path: Path, provider: ScriptedProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = program(tmp_path, "ask('x'); print(os.environ['OPENAI_API_KEY'])")
    recorded(tmp_path / "a.jsonl", command)
    assert provider.seen[-1][2]["authorization"] == "Bearer none-needed"
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    recorded(tmp_path / "b.jsonl", command)
    assert provider.seen[-1][2]["authorization"] == f"Bearer {KEY}"


def test_a_program_finds_the_proxy_in_every_variable_that_clients_read(
    tmp_path: Path, provider: ScriptedProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_URL", provider.url)
    text = "ask('x'); print(json.dumps(dict(os.environ)))"
    recorded(tmp_path / "e.jsonl", program(tmp_path, text), answer="stdout")
    (episode,) = load_episodes(tmp_path / "e.jsonl")
    held = json.loads(episode.answer or "")
    address = held["ANTHROPIC_BASE_URL"]
    assert address.startswith("http://127.0.0.1:") and address != provider.url
    assert held["OPENAI_BASE_URL"] == held["OPENAI_API_BASE"] == f"{address}/v1"
    assert held["ANTHROPIC_API_URL"] == address and "ANTHROPIC_API_BASE" not in held
    assert "127.0.0.1" in held["NO_PROXY"].split(",")


MESSAGES = """
def say(stream, *messages):
    tool = {"name": "look", "input_schema": {"type": "object"}}
    body = {"model": "m", "max_tokens": 64, "stream": stream, "system": "You look up.",
            "tools": [tool], "messages": messages}
    return send("ANTHROPIC_BASE_URL", "/v1/messages", body, x_api_key="sk-ant-1",
                anthropic_version="2023-06-01")

asked = {"role": "user", "content": "Where is it?"}
assert "tool_use" in say(STREAM, asked)
used = {"type": "tool_use", "id": "c1", "name": "look", "input": {"q": "it"}}
found = {"type": "tool_result", "tool_use_id": "c1", "content": "in Peru"}
print(say(STREAM, asked, {"role": "assistant", "content": [used]},
          {"role": "user", "content": [found]}))
"""
RESPONSES = """
def say(stream, *items):
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    body = {"model": "m", "stream": stream, "instructions": "You look up.", "tools": [tool],
            "input": items}
    return send("OPENAI_BASE_URL", "/responses", body, Authorization="Bearer sk-1")

asked = {"role": "user", "content": "Where is it?"}
assert "function_call" in say(STREAM, asked)
used = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"q": "it"}'}
found = {"type": "function_call_output", "call_id": "c1", "output": "in Peru"}
print(say(STREAM, asked, used, found))
"""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("dialect", "text"), [("anthropic", MESSAGES), ("responses", RESPONSES)])
def test_a_program_may_speak_messages_or_responses(
    tmp_path: Path,
    provider: ScriptedProvider,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
    dialect: str,
    text: str,
    stream: bool,
) -> None:
    def script(asked: Asked) -> Reply:
        if asked.results:
            return Reply("It is in Lima.", usage=(9, 4, 5))
        return Reply("I look.", (ToolCall("look", {"q": "it"}, "c1"),))

    provider.script = script
    monkeypatch.setenv("ANTHROPIC_BASE_URL", provider.url)
    out = tmp_path / "e.jsonl"
    result = recorded(out, program(tmp_path, f"STREAM = {stream}\n{text}"))
    assert (result.episodes, result.calls, result.failed, result.code) == (1, 2, 0, 0)
    assert capfdbinary.readouterr().out.strip() == provider.sent[-1].strip()
    assert [asked.dialect for asked in provider.asked] == [dialect] * 2
    (episode,) = load_episodes(out)
    assert episode.answer == "It is in Lima." and episode.error is None
    assert "gaps" not in episode.meta
    assert episode.agents[0].system == "You look up."
    (used,) = (each for each in episode.events if isinstance(each, ToolUse))
    assert (used.tool, used.argument, used.result) == ("look", '{"q": "it"}', "in Peru")
    calls = [said.call for _, said in episode.model_calls() if said.call]
    assert [(call.prompt_tokens, call.cached_tokens, call.sampled_tokens) for call in calls] == [
        (11, 0, 7),
        (9, 4, 5),
    ]


@pytest.mark.parametrize(
    ("rule", "answer"), [("stdout", "I say\nLima"), (r"^(L\w+)$", "Lima"), ("no such", None)]
)
def test_the_answer_is_what_the_user_says_it_is(
    tmp_path: Path, provider: ScriptedProvider, rule: str, answer: str | None
) -> None:
    out = tmp_path / "e.jsonl"
    recorded(
        out, program(tmp_path, "print('I say'); print(said('say Lima')); ask('x Z')"), answer=rule
    )
    (episode,) = load_episodes(out)
    assert episode.answer == answer
    assert ("answer_not_found" in episode.meta["gaps"]) == (answer is None)


def test_a_program_works_on_every_task_and_goes_on_where_it_was(
    tmp_path: Path, provider: ScriptedProvider
) -> None:
    out, tasks = tmp_path / "e.jsonl", tasks_file(tmp_path, 6)
    text = "if 'w4' in sys.argv[1] and not os.path.exists('ok'): sys.exit(3)\nask(sys.argv[1])"
    command = [*program(tmp_path, text), "{question}"]
    cwd = Path.cwd()
    os.chdir(tmp_path)
    try:
        first = recorded(out, command, tasks=tasks, workers=3)
        assert (first.episodes, first.silent, first.right) == (5, 1, 1.0)
        asked = len(provider.asked)
        (tmp_path / "ok").touch()
        second = recorded(out, command, tasks=tasks, workers=3)
    finally:
        os.chdir(cwd)
    assert (second.episodes, second.new, second.code) == (6, 1, 0)
    assert len(provider.asked) == asked + 1
    episodes = load_episodes(out)
    assert [episode.task_id for episode in episodes] == [f"t{n}" for n in range(6)]
    assert all(episode.meta["success"] == 1.0 for episode in episodes)
    assert [episode.question for episode in episodes][2] == "say w2"


def test_without_a_placeholder_the_question_is_on_stdin_and_in_the_environment(
    tmp_path: Path, provider: ScriptedProvider
) -> None:
    text = "ask(' '.join([os.environ['COA_TASK_ID'], os.environ['COA_TASK'], sys.stdin.read()]))"
    result = recorded(tmp_path / "e.jsonl", program(tmp_path, text), tasks=tasks_file(tmp_path, 1))
    assert result.episodes == 1 and provider.asked[0].last == "t0 say w0 say w0"


def test_what_was_said_before_the_question_is_in_the_environment(
    tmp_path: Path, provider: ScriptedProvider
) -> None:
    tasks, said = tmp_path / "talk.jsonl", [{"role": "system", "content": "Be brief."}]
    tasks.write_text(json.dumps({"id": "t0", "question": "say w0", "history": said}) + "\n")
    out = tmp_path / "e.jsonl"
    recorded(out, program(tmp_path, "ask(os.environ['COA_TASK_HISTORY'])"), tasks=tasks)
    assert json.loads(provider.asked[0].last) == said
    assert load_episodes(out)[0].history == (("system", "Be brief."),)


def test_a_program_may_work_on_all_tasks_itself(tmp_path: Path, provider: ScriptedProvider) -> None:
    text = (
        "base = os.environ['OPENAI_BASE_URL'].partition('/s/')[0]\n"
        "for n in range(3):\n"
        "    os.environ['OPENAI_BASE_URL'] = f'{base}/s/t{n}/v1'\n"
        "    ask(f'say w{n}')\n"
        "os.environ['OPENAI_BASE_URL'] = f'{base}/v1'\n"
        "os.environ['OPENAI_API_KEY'] = 'k#t3'\n"
        "ask('say nothing')\n"
    )
    out, tasks = tmp_path / "e.jsonl", tasks_file(tmp_path, 5)
    result = recorded(out, program(tmp_path, text), tasks=tasks, one_process=True)
    assert result.episodes == 4 and result.right == 0.75
    assert provider.seen[-1][2]["authorization"] == "Bearer k"
    again = recorded(out, program(tmp_path, text), tasks=tasks, one_process=True)
    assert (again.episodes, again.new) == (4, 0)


def test_episodes_can_be_made_again_from_the_log(
    tmp_path: Path, provider: ScriptedProvider
) -> None:
    out, tasks = tmp_path / "e.jsonl", tasks_file(tmp_path, 3)
    command = [*program(tmp_path, "ask(sys.argv[1])"), "{question}"]
    recorded(out, command, tasks=tasks)
    before, asked = out.read_bytes(), len(provider.asked)
    out.write_bytes(b"")
    assert recorded(out, (), tasks=tasks, again=True).episodes == 3
    assert out.read_bytes() == before and len(provider.asked) == asked
    timings = (tmp_path / "e.jsonl.timings.jsonl").read_text().splitlines()
    assert len(timings) == 3


def test_a_program_for_all_tasks_that_names_none_is_told_how(
    tmp_path: Path, provider: ScriptedProvider, capsys: pytest.CaptureFixture[str]
) -> None:
    command = program(tmp_path, "ask('say w0'); ask('say w1')")
    out, tasks = tmp_path / "e.jsonl", tasks_file(tmp_path, 2)
    result = recorded(out, command, tasks=tasks, one_process=True)
    assert (result.episodes, result.code) == (0, 1)
    assert "2 model calls name no task and are in no episode. Name" in capsys.readouterr().err


def test_a_program_of_one_task_that_names_sessions_is_told_that_they_are_left_out(
    tmp_path: Path, provider: ScriptedProvider, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "os.environ['OPENAI_API_KEY'] = 'k#mine'\nbase = os.environ['OPENAI_BASE_URL']\n"
    text += "os.environ['OPENAI_BASE_URL'] = base.replace(base.split('/')[4], 'mine')\nask('x')\n"
    out, tasks = tmp_path / "e.jsonl", tasks_file(tmp_path, 2)
    assert recorded(out, program(tmp_path, text), tasks=tasks).code == 1
    said = capsys.readouterr().err
    assert "1 sessions that programs named are in no episode" in said
    assert "no model call was seen but those of sessions that the program named" in said


def test_calls_of_no_session_never_become_an_episode(
    tmp_path: Path, provider: ScriptedProvider
) -> None:
    out = tmp_path / "e.jsonl"
    recorded(out, program(tmp_path, "ask('say x')"))
    with CallLog(sessions_beside(out)) as log:
        (session,) = read_sessions(sessions_beside(out))
        log.write(replace(session.calls[0], session=UNTOLD))
    assert recorded(out, (), again=True).episodes == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pass", "has its provider's address in its code"),
        ("raise SystemExit('no such module')", "ended with exit code 1: no such module"),
        (
            "urllib.request.urlopen(os.environ['OPENAI_BASE_URL'] + '/models')",
            "'GET /v1/models'",
        ),
    ],
)
def test_a_program_without_a_call_is_told_the_likely_reason(
    tmp_path: Path,
    provider: ScriptedProvider,
    capsys: pytest.CaptureFixture[str],
    text: str,
    said: str,
) -> None:
    tasks = tasks_file(tmp_path, 9)
    result = recorded(tmp_path / "e.jsonl", program(tmp_path, text), tasks=tasks)
    lines = [line for line in capsys.readouterr().err.splitlines() if "no model call" in line]
    assert len(lines) == 1 and said in lines[0]
    assert (result.episodes, result.silent, result.code) == (0, 3, 1)  # not all nine


def test_a_program_that_takes_too_long_is_ended_and_done(
    tmp_path: Path, provider: ScriptedProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is up when it has made its call, however long that takes here."""

    class Late(subprocess.Popen):  # type: ignore[type-arg]
        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            assert timeout == 4.0
            wait_for((tmp_path / "waits").exists)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", Late)
    out = tmp_path / "e.jsonl"
    command = program(tmp_path, f"ask('say x'); open('waits', 'w').close()\n{WAIT}")
    assert recorded(out, command, tasks=tasks_file(tmp_path, 1), timeout=4.0).episodes == 1
    (episode,) = load_episodes(out)
    assert episode.error == "the program took longer than it may (--timeout)"


@pytest.mark.parametrize("otel", [False, True])
def test_a_program_that_was_killed_is_marked(
    tmp_path: Path, provider: ScriptedProvider, otel: bool
) -> None:
    out, dies = tmp_path / "e.jsonl", "os.kill(os.getpid(), 9)"
    command = program(tmp_path, f"ask('say x'); {dies}")
    if otel:
        command = traced(tmp_path, f"export(asks(2, 'say x', 'x')); {dies}")
    result = recorded(out, command, otel=otel)
    (episode,) = load_episodes(out)
    assert episode.meta["cut"] == episode.error == "the program was killed by SIGKILL"
    assert [said.text for _, said in episode.model_calls()] == ["x"]
    assert result.code == 137


@pytest.mark.parametrize("otel", [False, True])
def test_a_task_whose_program_was_killed_is_done_again_and_the_others_are_whole(
    tmp_path: Path,
    provider: ScriptedProvider,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    otel: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    asks = "export(asks(2, sys.argv[1], sys.argv[1].split()[-1]))" if otel else "ask(sys.argv[1])"
    ends = "export(run())" if otel else "ask(sys.argv[1])"
    text = f"{asks}\nif 'w1' in sys.argv[1] and not os.path.exists('ok'):\n"
    text += f"    os.kill(os.getpid(), 9)\n{ends}\n"
    out, tasks = tmp_path / "e.jsonl", tasks_file(tmp_path, 3)
    command = [*(traced if otel else program)(tmp_path, text), "{question}"]
    first = recorded(out, command, tasks=tasks, otel=otel)
    assert (first.episodes, first.right, first.silent) == (2, 1.0, 0)
    assert "coa: task t1: the program was killed by SIGKILL" in capsys.readouterr().err
    assert [episode.task_id for episode in load_episodes(out)] == ["t0", "t2"]
    Path("ok").touch()
    second = recorded(out, command, tasks=tasks, otel=otel)
    assert (second.episodes, second.new, second.right) == (3, 1, 1.0)
    episodes = load_episodes(out)
    assert [episode.task_id for episode in episodes] == ["t0", "t1", "t2"]
    assert not any("cut" in episode.meta or episode.error for episode in episodes)
    sessions = {each.name: each for each in read_sessions(sessions_beside(out))}
    assert sessions["t1"].cut == "the program was killed by SIGKILL"
    assert len(sessions["t1"].calls) == 1 and not sessions["t1~2"].cut


def test_all_that_a_program_prints_is_read_however_slowly_it_is_shown(tmp_path: Path) -> None:
    text = "x" * 100_000 + "the end"

    class Screen(io.BytesIO):
        def write(self, piece: Any) -> int:
            shown.wait()
            return super().write(piece)

    shown, screen = threading.Event(), Screen()
    slow = threading.Timer(1.5, shown.set)
    slow.start()
    command = [sys.executable, "-S", "-c", "print('x' * 100_000 + 'the end', end='')"]
    ran = asyncio.run(_Program(command, os.environ, alone=True, show=screen).run())
    assert ran.stdout == text == screen.getvalue().decode()


def test_what_a_program_leaves_running_keeps_nobody_waiting(tmp_path: Path) -> None:
    leaves = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    while not os.path.exists('go'): time.sleep(0.05)\n"
        "print('mine')\n"
    )
    command = [sys.executable, "-S", "-c", leaves]
    cwd = Path.cwd()
    os.chdir(tmp_path)
    try:
        ran = asyncio.run(_Program(command, os.environ, alone=True, show=io.BytesIO()).run())
    finally:
        (tmp_path / "go").touch()
        os.chdir(cwd)
    assert ran.stdout == "mine\n"


def test_calls_pass_while_the_team_of_another_session_is_read(
    tmp_path: Path, provider: ScriptedProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    passed = threading.Event()

    def script(asked: Asked) -> Reply:
        if asked.last == "say w1":
            passed.set()
        return Reply("yes")

    def slowly(session: LoggedSession, task: Task | None) -> Episode:
        Path("reading").touch()
        waited.append(passed.wait(PATIENCE_S))
        return episode_of(session, task)

    provider.script = script
    monkeypatch.setattr("coa.recording.program.episode_of", slowly)
    waited: list[bool] = []
    text = "if sys.argv[1] == 'say w1':\n    import time\n"
    text += "    while not os.path.exists('reading'): time.sleep(0.05)\nask(sys.argv[1])\n"
    command = [*program(tmp_path, text), "{question}"]
    result = recorded(tmp_path / "e.jsonl", command, tasks=tasks_file(tmp_path, 2), workers=2)
    assert result.episodes == 2
    assert waited == [True, True]


# -- the recorder itself is killed ----------------------------------------------------------------


def start(out: Path, command: list[str], *options: str) -> subprocess.Popen[bytes]:
    line = [sys.executable, str(HERE / "proxy_parts.py"), str(out), *options, "--", *command]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(line, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)


def wait_for(found: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not found():
        assert time.monotonic() < end, "it hangs"
        time.sleep(0.05)


def wait_for_calls(out: Path, count: int) -> None:
    """A call is in the log a moment after its program has the answer."""
    wait_for(lambda: sessions_beside(out).read_bytes().count(b'{"event":"call"') == count)


WAIT = (
    "import time\n"
    "parent = os.getppid()\n"
    "while not os.path.exists('go') and os.getppid() == parent: time.sleep(0.05)\n"
)
"""It waits, but not longer than there is somebody who waits for it."""
THIRD_WAITS = "ask(sys.argv[1])\nif sys.argv[1] == 'say w2': open('waits', 'w').close()\n"
THIRD_WAITS += f"else: sys.exit()\n{WAIT}"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_recorder_that_is_killed_loses_nothing_that_was_finished(
    tmp_path: Path,
    provider: ScriptedProvider,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    out, tasks = tmp_path / "e.jsonl", tasks_file(tmp_path, 4)
    command = [*program(tmp_path, THIRD_WAITS), "{question}"]
    running = start(out, command, "--tasks", str(tasks))
    wait_for((tmp_path / "waits").exists)
    wait_for_calls(out, 3)
    running.send_signal(number)
    _, errors = running.communicate(timeout=PATIENCE_S)
    if number != signal.SIGKILL:
        assert running.returncode == 128 + number
        assert b"give the same command again to go on" in errors
    assert [episode.task_id for episode in load_episodes(out)] == ["t0", "t1"]
    asked = len(provider.asked)
    (tmp_path / "go").touch()
    result = recorded(out, command, tasks=str(tasks))
    assert result.episodes == 4 and len(provider.asked) == asked + 2
    assert [episode.task_id for episode in load_episodes(out)] == ["t0", "t1", "t2", "t3"]
    sessions = {session.name: session for session in read_sessions(sessions_beside(out))}
    assert sessions["t2"].cut and not sessions["t2~2"].cut
    why = {signal.SIGKILL: "the recording was killed", signal.SIGTERM: "SIGTERM"}
    assert why.get(number, "Ctrl-C") in sessions["t2"].cut
    assert len(sessions["t2"].calls) == 1  # what was seen before is there, too


def test_a_single_run_that_was_cut_is_an_episode_that_says_so(
    tmp_path: Path, provider: ScriptedProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "e.jsonl"
    text = f"ask('say x'); open('waits', 'w').close()\n{WAIT}"
    running = start(out, program(tmp_path, text))
    wait_for((tmp_path / "waits").exists)
    wait_for_calls(out, 1)
    running.kill()
    running.communicate(timeout=PATIENCE_S)
    assert recorded(out, program(tmp_path, "ask('say y')", "other.py")).episodes == 2
    first, second = load_episodes(out)
    assert first.meta["cut"] == first.error == "the recording was killed"
    assert "cut" not in second.meta and second.answer == "y"


# -- programs that are traced ---------------------------------------------------------------------


def test_a_traced_program_is_recorded_by_its_spans(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    out = tmp_path / "e.jsonl"
    text = "export(asks(2, 'Where?', 'Peru'))\nexport(asks(4, 'Where?', 'Peru', 'And?', 'Lima'))\n"
    result = recorded(out, traced(tmp_path, f"{text}export(run())\nprint('done')"), otel=True)
    assert (result.episodes, result.calls, result.failed, result.code) == (1, 2, 0, 0)
    assert capfdbinary.readouterr().out == b"done\n"
    (episode,) = load_episodes(out)
    assert (episode.answer, episode.error) == ("Lima", None)
    assert [agent.name for agent in episode.agents] == ["finder"]
    assert episode.meta["source"] == "otel" and "cut" not in episode.meta
    for path in tmp_path.glob("e.jsonl*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    before = out.read_bytes()
    assert recorded(out, (), again=True).episodes == 1 and out.read_bytes() == before
    silent = recorded(out, traced(tmp_path, "pass", "other.py"), otel=True)
    assert (silent.episodes, silent.code) == (1, 1)


TASK_WAITS = "export(asks(2, sys.argv[1], sys.argv[1].split()[-1]))\nif sys.argv[1] == 'say w2':\n"
TASK_WAITS += "    open('waits', 'w').close()\n" + "".join(
    f"    {line}\n" for line in WAIT.splitlines()
)
TASK_WAITS += "export(run())\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_tasks_of_a_traced_program_go_on_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.chdir(tmp_path)
    out, tasks = tmp_path / "e.jsonl", tasks_file(tmp_path, 4)
    command = [*traced(tmp_path, TASK_WAITS), "{question}"]
    running = start(out, command, "--tasks", str(tasks), "--otel", "yes")
    wait_for((tmp_path / "waits").exists)
    running.send_signal(number)
    running.communicate(timeout=PATIENCE_S)
    assert [episode.task_id for episode in load_episodes(out)] == ["t0", "t1"]
    (tmp_path / "go").touch()
    result = recorded(out, command, tasks=str(tasks), otel=True)
    assert (result.episodes, result.new, result.right) == (4, 2, 1.0)
    episodes = load_episodes(out)
    assert [episode.task_id for episode in episodes] == ["t0", "t1", "t2", "t3"]
    assert [episode.answer for episode in episodes] == ["w0", "w1", "w2", "w3"]
    assert not any(episode.error or "cut" in episode.meta for episode in episodes)
    sessions = {session.name: session for session in read_sessions(sessions_beside(out))}
    assert sessions["t2"].cut and not sessions["t2~2"].cut
    assert len(sessions["t2"].calls) == 1  # what had come before is there, too


@pytest.mark.parametrize("again", [False, True])
def test_a_traced_run_whose_recorder_was_killed_is_an_episode_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "e.jsonl"
    assert recorded(out, traced(tmp_path, "export(asks(2, 'x', 'X'), run())"), otel=True).new == 1
    text = f"export(asks(2, 'say y', 'Y'))\nopen('waits', 'w').close()\n{WAIT}export(run())"
    running = start(out, traced(tmp_path, text), "--otel", "yes")
    wait_for((tmp_path / "waits").exists)
    running.kill()
    running.communicate(timeout=PATIENCE_S)
    assert len(load_episodes(out)) == 1
    if again:
        assert recorded(out, (), again=True).episodes == 2
    else:
        other = traced(tmp_path, "export(asks(2, 'x', 'Z'), run())", "other.py")
        assert recorded(out, other, otel=True).episodes == 3
    first, second, *third = load_episodes(out)
    assert "cut" not in first.meta and first.answer == "X"
    assert second.meta["cut"] == second.error == "the recording was killed"
    assert [said.text for _, said in second.model_calls()] == ["Y"]
    assert [episode.answer for episode in third] == [] if again else ["Z"]
    assert recorded(out, (), again=True).episodes == 2 + len(third)  # and not once more


def test_no_key_is_in_what_is_written_of_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hidden").write_text(OTHER_KEYS[0])
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_KEY_2", OTHER_KEYS[1])
    tasks = TaskSet((Task(f"{KEY} say yes", ("yes",), "t0"),))
    text = (
        "hidden, question = open('hidden').read(), sys.stdin.read()\n"
        "shown = f'{question} {hidden} {os.environ}'\n"
        "tool = {'gen_ai.operation.name': 'execute_tool', 'gen_ai.tool.name': 'f',\n"
        "        'gen_ai.tool.call.arguments': json.dumps({'q': shown}), 'a list': [shown]}\n"
        "export(asks(2, shown, shown), span(5, 1, held=tool, error=shown, name=shown),\n"
        "       run(), Authorization='Bearer ' + hidden)\n"
        "print(shown)\n"
        "sys.exit('it failed with ' + os.environ['OPENAI_API_KEY'])\n"
    )
    out = tmp_path / "out" / "e.jsonl"
    assert recorded(out, traced(tmp_path, text), tasks=tasks, otel=True).episodes == 1
    said = capfd.readouterr()
    written = {path.name: path.read_text() for path in out.parent.iterdir()}
    assert spans_beside(out).name in written and len(written) == 6
    for where, content in {**written, "stdout": said.out, "stderr": said.err}.items():
        for planted in (KEY, *OTHER_KEYS):
            assert planted not in content, where
    assert "[key] say yes [key] environ(" in written[spans_beside(out).name]


# -- secrets --------------------------------------------------------------------------------------


def test_no_key_and_no_redacted_text_is_in_any_file_or_line(
    tmp_path: Path,
    provider: ScriptedProvider,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("cleaning.py").write_text("def clean(text):\n    return text.replace('4711', '#')\n")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", provider.url)
    Path("hidden").write_text(f"{OTHER_KEYS[0]} {OTHER_KEYS[1]}")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", OTHER_KEYS[2])
    tasks = TaskSet((Task(f"{SECRET} say yes", ("yes",), "t0"), Task(f"{KEY} no", ("x",), "t1")))
    text = (
        "question = sys.stdin.read()\n"
        "tool = {'type': 'function', 'function': {'name': 'f', 'description': question,\n"
        "        'parameters': {'type': 'object', 'description': question}}}\n"
        "ask(f'my environment: {os.environ}' + question, tools=[tool])\n"
        "ask(question, messages=[{'role': 'system', 'content': question},\n"
        "    {'role': 'assistant', 'tool_calls': [{'id': 'c', 'type': 'function', 'function':\n"
        "     {'name': 'f', 'arguments': json.dumps({'q': question})}}]},\n"
        "    {'role': 'tool', 'tool_call_id': 'c', 'content': question}], stream=True)\n"
        "first, second = open('hidden').read().split()\n"  # keys that no variable holds
        "shown = f'{question} {first}'\n"
        "tool = {'name': 'f', 'description': shown, 'input_schema': {'description': shown}}\n"
        "used = {'type': 'tool_use', 'id': 'c', 'name': 'f', 'input': {'q': shown}}\n"
        "found = {'type': 'tool_result', 'tool_use_id': 'c', 'content': shown}\n"
        "send('ANTHROPIC_BASE_URL', '/v1/messages', {'model': 'm', 'max_tokens': 9,\n"
        "    'system': shown, 'tools': [tool], 'messages': [{'role': 'user', 'content': shown},\n"
        "    {'role': 'assistant', 'content': [used]}, {'role': 'user', 'content': [found]}]},\n"
        "    x_api_key=first)\n"
        "shown += second\n"
        "send('OPENAI_BASE_URL', '/responses', {'model': 'm', 'instructions': shown, 'input': [\n"
        "    {'type': 'reasoning', 'summary': [{'type': 'summary_text', 'text': shown}]},\n"
        "    {'type': 'function_call', 'call_id': 'c', 'name': 'f', 'arguments':\n"
        "     json.dumps({'q': shown})},\n"
        "    {'type': 'function_call_output', 'call_id': 'c', 'output': shown}]},\n"
        "    Authorization='Bearer ' + second)\n"
        "print(shown)\n"
        "sys.exit('it failed with ' + os.environ['OPENAI_API_KEY'])\n"
    )
    out = tmp_path / "out" / "e.jsonl"
    result = recorded(
        out, program(tmp_path, text), tasks=tasks, redact="cleaning:clean", answer="stdout"
    )
    assert (result.episodes, result.calls) == (2, 8)
    assert {seen[2].get("x-api-key") for seen in provider.seen} == {None, OTHER_KEYS[0]}
    said = capfd.readouterr()
    written = {path.name: path.read_text() for path in out.parent.iterdir()}
    assert len(written) == 5  # episodes, log, manifest, timings, lock
    for where, content in {**written, "stdout": said.out, "stderr": said.err}.items():
        for planted in (KEY, *OTHER_KEYS, "4711"):
            assert planted not in content, where
    assert "it failed with [key]" in said.err  # what is taken out is seen to be


def test_a_key_is_taken_out_before_its_text_is_cut(
    tmp_path: Path, provider: ScriptedProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    text = f"ask('x'); print(os.environ['OPENAI_API_KEY'] + 'x' * {4000 - len(KEY) // 2})"
    out = tmp_path / "e.jsonl"
    recorded(out, program(tmp_path, text))
    assert KEY[-5:] not in sessions_beside(out).read_text()


def test_a_hangup_that_is_to_be_ignored_is_ignored(
    tmp_path: Path, provider: ScriptedProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    try:
        text = "ask('say x'); os.kill(os.getppid(), 1); ask('say y')"
        result = recorded(tmp_path / "e.jsonl", program(tmp_path, text))
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (result.calls, result.code) == (2, 0)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "def clean(text):\n    raise ValueError(text)\n",
            r"the function failed \(ValueError in line 2",
        ),
        ("def clean(text):\n    return None\n", "returned a NoneType, expected a text"),
    ],
)
def test_a_redaction_that_fails_ends_the_recording_and_quotes_nothing(
    tmp_path: Path,
    provider: ScriptedProvider,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"cleaning_{abs(hash(code))}"
    monkeypatch.syspath_prepend(str(tmp_path))
    Path(f"{name}.py").write_text(code)
    with pytest.raises(UsageError, match=said) as wrong:
        recorded(
            tmp_path / "e.jsonl", program(tmp_path, f"ask('{SECRET}')"), redact=f"{name}:clean"
        )
    assert "4711" not in str(wrong.value)
    assert "4711" not in sessions_beside(tmp_path / "e.jsonl").read_text()


# -- what cannot be -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "no command"),
        ({"command": ("no-such-program-here",)}, "'no-such-program-here': no such command"),
        ({"command": ("true",), "answer": "(("}, "--answer: expected last, stdout or a regular"),
        ({"command": ("true",), "one_process": True}, "--one-process: give the tasks"),
        ({"command": ("true", "{question}")}, "{question}: there is no question; give them with"),
        ({"command": ("true",), "upstream": "localhost"}, "--upstream: found no address"),
        ({"again": True}, "there is no log to read again"),
        ({"command": ("true",), "redact": "json:nothing_such"}, "json has no 'nothing_such'"),
    ],
)
def test_what_cannot_be_recorded_is_said_in_one_line(
    tmp_path: Path, asked: dict[str, object], said: str
) -> None:
    with pytest.raises((UsageError, ConfigError)) as wrong:
        record_program(
            ProgramRecording(**asked),  # type: ignore[arg-type]
            tmp_path / "e.jsonl",
        )
    assert said in str(wrong.value) and "\n" not in str(wrong.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("{questoin}",), "'{questoin}' in the command: nothing of a task has that name. Did you"),
        (("--ask={Question}",), "Did you mean {question}? There are {question} and {id}; without"),
        (("{question}", "Q={task_id}"), "'Q={task_id}' in the command: nothing of a task has that"),
        (("{question}", "{ID}"), "Did you mean {id}?"),
        (("{name}",), "has that name. There are {question} and {id}"),
    ],
)
def test_a_place_for_a_task_that_does_not_exist_is_refused_before_anything_runs(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UsageError) as wrong:
        recorded(tmp_path / "e.jsonl", ["true", *words], tasks=tasks_file(tmp_path, 1))
    assert said in str(wrong.value) and "\n" not in str(wrong.value)
    assert not sessions_beside(tmp_path / "e.jsonl").exists()


def test_other_braces_in_a_command_are_the_programs_own(
    tmp_path: Path, provider: ScriptedProvider
) -> None:
    own = ['{"a": 1}', "{}", "${X}", "--set={x: 1}", "f'{name}'", "{uid}", "--as={user}"]
    text = f"assert sys.argv[2:] == {own!r}, sys.argv\nask(sys.argv[1])"
    command = [*program(tmp_path, text), "{question}", *own]
    result = recorded(tmp_path / "e.jsonl", command, tasks=tasks_file(tmp_path, 1))
    assert (result.episodes, result.code) == (1, 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_module_here", ", which is coa's own: give the full path of the program's"),
        ("sys.exit(3)", ". Does it run without coa?"),
    ],
)
def test_a_program_that_fails_is_told_which_python_it_was(
    tmp_path: Path,
    provider: ScriptedProvider,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    said: str,
) -> None:
    beside = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{beside}{os.pathsep}{os.environ['PATH']}")
    command = ["python", *program(tmp_path, text)[1:]]
    recorded(tmp_path / "e.jsonl", command, tasks=tasks_file(tmp_path, 1))
    assert f"'python' was {beside / 'python'}{said}" in capsys.readouterr().err


def test_another_program_does_not_go_on_with_these_tasks(
    tmp_path: Path, provider: ScriptedProvider
) -> None:
    out, tasks = tmp_path / "e.jsonl", tasks_file(tmp_path, 1)
    recorded(out, program(tmp_path, "ask('x')"), tasks=tasks)
    with pytest.raises(ConfigError, match="started with program"):
        recorded(out, program(tmp_path, "ask('x')", "other.py"), tasks=tasks)
