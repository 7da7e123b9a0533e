"""The code tool: what a block may hold, what the model is shown of a program, and sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa.sandbox import Limits, Outcome, Sandbox, SandboxError, Tier, reach_tier
from coa.tools import Toolbox, ToolCall
from coa.tools.code import NOTHING, code_tool, describe

LIMITS = Limits(seconds=2.0, memory_mb=512, output_bytes=4096)


@pytest.fixture
async def box() -> AsyncIterator[Sandbox]:
    if reach_tier()[0] < Tier.FULL:
        pytest.skip("this machine has no full sandbox")
    async with Sandbox(limits=LIMITS, slots=1, packages=()) as opened:
        yield opened


async def observe(box: Sandbox, block: str) -> str:
    observation = await Toolbox([code_tool(box)]).call(ToolCall("code", block))
    assert observation.failure is None, observation
    return observation.text


async def test_a_block_is_fenced_or_bare_and_a_second_fence_is_its_input(box: Sandbox) -> None:
    assert await observe(box, "```py\nprint(1)\n```") == "1"
    assert await observe(box, "```python\nprint(1)\n```") == "1"
    assert await observe(box, "print(1)") == "1"
    assert await observe(box, "```py\nx = 2\n```\nthen\n```py\nprint(x)\n```") == "2"
    assert await observe(box, "```py\nprint(input() * 2)\n```\n```sh\nab\n```") == "abab"
    assert await observe(box, "```py\nprint(int(input()) + 1)\n```\n```stdin\n4\n```") == "5"


async def test_an_empty_block_is_the_models_mistake(box: Sandbox) -> None:
    for block in ("", "```py\n```", "```py\n   \n```"):
        observation = await Toolbox([code_tool(box)]).call(ToolCall("code", block))
        assert observation.failure == "mistake"
        assert observation.text.startswith("Error: the block holds no program")


async def test_a_value_is_shown_when_nothing_was_printed(box: Sandbox) -> None:
    assert await observe(box, "x = 6\nx * 7") == "42"
    assert await observe(box, "print(1)\n2") == "1"
    assert await observe(box, "x = 6") == NOTHING


async def test_a_failure_shows_the_programs_lines_and_the_exception(box: Sandbox) -> None:
    block = "print('so far')\ndef half(x):\n    return x / 0\n\nhalf(3)"
    assert await observe(box, block) == (
        "so far\nline 5: half(3)\nline 3: return x / 0\nZeroDivisionError: division by zero"
    )
    assert await observe(box, "for") == "line 1: for\nSyntaxError: invalid syntax"
    assert await observe(box, "import json\njson.loads('{')") == (
        "line 2: json.loads('{')\njson.decoder.JSONDecodeError: Expecting property name enclosed "
        "in double quotes: line 1 column 2 (char 1)"
    )
    assert await observe(box, "raise SystemExit(3)") == "The program exited with status 3."
    assert await observe(box, "def f(n): return f(n)\nf(1)") == (
        "line 2: f(1)\nline 1: def f(n): return f(n)\nline 1: def f(n): return f(n)\n"
        "RecursionError: maximum recursion depth exceeded"
    )


async def test_a_chain_of_exceptions_shows_the_last(box: Sandbox) -> None:
    block = "try:\n    1 / 0\nexcept Exception:\n    raise ValueError('two\\nlines')"
    assert await observe(box, block) == (
        "line 4: raise ValueError('two\\nlines')\nValueError: two\nlines"
    )


async def test_each_limit_has_its_sentence(box: Sandbox) -> None:
    assert await observe(box, "print(1)\nwhile True: pass") == (
        "1\nThe program was stopped after 2 s."
    )
    assert await observe(box, "x = bytearray(1 << 31)") == (
        "The program was stopped: it needs more than 512 MB of memory."
    )
    flood = await observe(box, "while True: print('x' * 99)")
    assert flood.endswith("The program was stopped: it printed more than 4096 bytes.")
    assert await observe(box, "import ctypes; ctypes.CDLL(None).unshare(0x10000000)") == (
        "The program was stopped: it asked the system for something that is not allowed."
    )
    assert await observe(box, "import os; os.kill(os.getpid(), 11)") == (
        "The program was ended by SIGSEGV."
    )
    assert await observe(box, "import os; os.kill(os.getpid(), 40)") == (
        "The program was ended by signal 40."
    )


async def test_the_same_program_is_shown_the_same_way(box: Sandbox) -> None:
    block = "print(object(), {'a', 'b'}, hash('c'))"
    first = await observe(box, block)
    assert first.startswith("<object object at 0x...> ")
    assert {await observe(box, block) for _ in range(3)} == {first}


async def test_a_broken_sandbox_is_the_environments_failure(box: Sandbox) -> None:
    class Broken(Sandbox):
        async def run(self, program: str, stdin: str = "", *, echo: bool = False) -> Outcome:
            raise SandboxError("the sandbox hung.")

    observation = await Toolbox([code_tool(Broken())]).call(ToolCall("code", "1"))
    assert (observation.failure, observation.text) == ("failed", "Error: the sandbox hung.")


async def test_the_prompt_names_the_packages() -> None:
    tool = code_tool(Sandbox(packages=("numpy",)))
    assert (tool.name, tool.body) == ("code", "code")
    assert "numpy can be imported" in tool.about


def test_a_recording_belongs_to_the_releases_that_are_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def key(installed: str) -> str:
        monkeypatch.setattr("importlib.metadata.version", lambda name: installed)
        return code_tool(Sandbox(packages=("numpy",))).fingerprint

    assert key("2.3.1") == key("2.3.2") != key("2.4.0")


async def test_a_session_keeps_its_state_and_loses_it_only_with_its_process(box: Sandbox) -> None:
    async with box.session() as session:
        assert (await session.run("x = 5\nimport math")).ended == "ok"
        assert (await session.run("print(x, math.pi > 3, input())", "hi")).stdout == "5 True hi\n"
        assert (await session.run("x += 1\n1 / 0")).ended == "error"
        assert (await session.run("x", echo=True)).stdout == "6\n"
        assert (await session.run("import sys; sys.exit(4)")).exit == 4
        assert not session.lost
        ended = await session.run("while True: pass")
        assert (ended.ended, session.lost) == ("timeout", True)
        again = await session.run("print(x)")
        assert "NameError" in again.stderr
        assert not session.lost
    with pytest.raises(SandboxError, match="closed"):
        await session.run("print(1)")


async def test_sessions_do_not_see_each_other_and_runs_do_not_wait_for_them(box: Sandbox) -> None:
    async with box.session() as one, box.session() as two, box.session() as three:
        await one.run("x = 1; open('/tmp/one', 'w')")
        for other in (two, three):
            seen = await other.run("import os\nprint('x' in globals(), os.listdir('/tmp'))")
            assert seen.stdout == "False []\n"
        assert (await box.run("print('x' in globals())")).stdout == "False\n"
        assert (await one.run("print(x)")).stdout == "1\n"


async def test_closing_the_sandbox_ends_its_sessions_while_they_run() -> None:
    if reach_tier()[0] < Tier.FULL:
        pytest.skip("this machine has no full sandbox")
    async with Sandbox(limits=LIMITS, slots=1, packages=()) as box:
        entered = box.session()
        session = await entered.__aenter__()
        assert (await session.run("x = 1")).ended == "ok"
        running = asyncio.create_task(session.run("import time; time.sleep(60)"))
        await asyncio.sleep(0.2)
    with pytest.raises(SandboxError, match="closed"):
        await running
    with pytest.raises(SandboxError, match="this session is closed"):
        await session.run("print(x)")
    await entered.__aexit__(None, None, None)
    with pytest.raises(SandboxError, match="not open"):
        await box.session().__aenter__()


async def test_a_session_is_frozen_between_its_programs(box: Sandbox) -> None:
    start = (
        "import threading, time\nticks = 0\n"
        "def tick():\n    global ticks\n    while True:\n        ticks += 1; time.sleep(0.01)\n"
        "threading.Thread(target=tick, daemon=True).start()"
    )
    async with box.session() as session:
        await session.run(start)
        await asyncio.sleep(1.0)
        assert int((await session.run("print(ticks)")).stdout) < 50


async def test_a_session_that_writes_to_our_socket_only_ends_itself(box: Sandbox) -> None:
    forge = (
        "import os\n"
        "for fd in range(3, 64):\n"
        "    for text in (b'\\x00\\x00\\x00\\x00', b'D' + b'x' * 5, b'I', b'x' * 1000):\n"
        "        try: os.write(fd, text)\n"
        "        except OSError: pass\n"
    )
    async with box.session() as session:
        for _ in range(3):
            await session.run(forge)
    assert (await box.run("print(1)")).stdout == "1\n"


async def test_a_persistent_tool_keeps_variables_within_its_session(box: Sandbox) -> None:
    tool = code_tool(box, persistent=True)
    assert tool.session is not None
    async with tool.session() as run:
        assert await run("```py\nx = 5\n```") == NOTHING
        assert await run("x + 1") == "6"
        assert await run("x += 1\n1/0") == "line 2: 1/0\nZeroDivisionError: division by zero"
        assert await run("print(x)") == "6"
        stopped = await run("while True: pass")
        assert stopped == "The program was stopped after 2 s. All variables are lost."
        assert await run("x") == "line 1: x\nNameError: name 'x' is not defined"
    async with tool.session() as run:
        assert (await run("x")).endswith("NameError: name 'x' is not defined")
    assert (await tool.run("x")).endswith("NameError: name 'x' is not defined")


@given(st.text(), st.text(), st.sampled_from(["ok", "error", "killed", "timeout"]), st.integers())
def test_whatever_a_program_writes_there_is_something_to_show(
    out: str, err: str, ended: str, code: int
) -> None:
    text = describe(Outcome(out, err, ended, code, 1.0), LIMITS)  # type: ignore[arg-type]
    assert text.strip() or out.strip() == err.strip() == ""


def test_every_runner_of_the_bench_runs_the_same_programs() -> None:
    if reach_tier()[0] < Tier.FULL:
        pytest.skip("this machine has no full sandbox")
    from coa.lab.bench import bench_sandbox, sandbox_lines

    result = bench_sandbox(0.1, programs=("plain",))
    assert set(result["ratio"]) | {"ours"} == set(result["ms"])
    assert result["missing"] == {}
    assert result["unit"] == "runs/s"
    for peer, ratio in result["ratio"].items():
        assert ratio == round(result["ours"] / result[peer], 2)
    assert [line.split()[0] for line in sandbox_lines(result)][::2][:3] == list(result["ms"])
