"""Environments: what they are made of, how they are loaded and opened, and what is refused."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from typer.testing import CliRunner

from coa import (
    Environment,
    State,
    Task,
    Tool,
    ToolCall,
    ToolMistake,
    ask,
    corpus_tools,
    distill,
    evaluate,
    load_environment,
    record,
    sandbox_tools,
    tool,
)
from coa.cli import app
from coa.engines.scripted import ScriptedEngine
from coa.environment import ToolSettings, open_environments, split_of, tasks_of
from coa.errors import CoaError, ConfigError, UsageError
from coa.grammar import grammar_from_toml, load_grammar
from coa.rewards import JudgeSettings, RewardSettings
from coa.tasks import TaskSet
from coa.trajectory import StopReason
from outside_shop import write_shop

QUESTION = Task("What do 2 apple cost?", ("4",), gold={"basket": {"apple": 2}})


def refused(*words: object) -> str:
    """The one line with which a command refuses; it ends with 2."""
    import subprocess
    import sys

    command = [sys.executable, "-m", "coa", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stderr.splitlines() if line.startswith("coa: ")]
    assert done.returncode == 2 and len(lines) == 1, (done.returncode, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return lines[0]


def place(folder: Path, text: str, **more: str) -> Path:
    """A folder with an environment of one file of tools."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tools.py").write_text(text, encoding="utf-8")
    (folder / "tasks.csv").write_text(
        "question,answer\n" + "".join(f"What is {n}?,{n}\n" for n in range(20)), encoding="utf-8"
    )
    settings = {"tools": '["tools:look"]', "tasks": '"tasks.csv"', **more}
    lines = [f"{name} = {value}\n" for name, value in settings.items()]
    (folder / "environment.toml").write_text("".join(lines), encoding="utf-8")
    return folder


LOOK = "def look(word: str):\n    'Look a word up.'\n    return word.upper()\n"


# -- tools ------------------------------------------------------------------------------------


class Size(Enum):
    SMALL = "small"
    LARGE = "large"


class Address(BaseModel):
    street: str
    number: int = 1


async def say(env: Environment, name: str, argument: str, task: Task = QUESTION) -> Any:
    async with env.open() as opened, opened.session(task.public()) as session:
        return await session.tools.call(ToolCall(name, argument))


async def test_functions_of_every_shape_are_tools() -> None:
    def order(
        item: str,
        size: Size,
        colours: list[Literal["red", "blue"]],
        to: Address,
        gift: bool = False,
        note: str | None = None,
        pieces: Annotated[int, Field(ge=1, description="how many of it")] = 1,
    ) -> dict[str, Any]:
        """Order something.

        Args:
            item: what to order,
                by its name
            to (Address): where it goes.

        Returns:
            what was ordered
        """
        return {"item": item, "size": size.value, "street": to.street, "gift": gift, "note": note}

    async def wait(seconds: float) -> str:
        """Wait."""
        return f"waited {seconds}"

    env = Environment("orders", tools=[order, wait, tool(lambda word: word, name="echo")])
    async with env.open() as opened:
        box = await opened.toolbox(QUESTION)
    made = box["order"]
    assert "item: what to order, by its name" in made.about
    assert "to: where it goes" in made.about and "pieces: how many of it" in made.about
    assert (
        '"colours": list of "red" | "blue"' in made.about and "what was ordered" not in made.about
    )
    argument = {"item": "pen", "size": "small", "colours": ["red"], "to": {"street": "High"}}
    seen = await say(env, "order", json.dumps(argument))
    assert json.loads(seen.text) == {
        "item": "pen",
        "size": "small",
        "street": "High",
        "gift": False,
        "note": None,
    }
    assert (await say(env, "order", '{"item": "pen"}')).failure == "mistake"
    assert (await say(env, "wait", '{"seconds": 2}')).text == "waited 2.0"
    assert (await say(env, "wait", "3")).text == "waited 3.0"


async def test_a_text_tool_takes_its_only_argument_as_other_frameworks_write_it() -> None:
    def look(query: str) -> str:
        return f"<{query}>"

    env = Environment("looks", tools=[look])
    assert (await say(env, "look", '{"query": "Osaka"}')).text == "<Osaka>"
    assert (await say(env, "look", "Osaka")).text == "<Osaka>"
    for other in ('{"word": "Osaka"}', '{"query": 3}', '{"query": "a", "b": 1}', "{broken"):
        assert (await say(env, "look", other)).text == f"<{other}>"


async def test_what_a_function_raises_is_for_the_model_unless_the_world_is_to_blame() -> None:
    def look(word: str) -> str:
        raise KeyError(word)

    blamed = Environment("model", tools=[look])
    seen = await say(blamed, "look", "x")
    assert seen.failure == "mistake" and seen.text == "Error: look failed: KeyError: 'x'"
    outside = Environment("outside", tools=[tool(look, errors="outside")])
    assert (await say(outside, "look", "x")).failure == "failed"

    def hint(word: str) -> str:
        raise ToolMistake("write a country")

    assert (await say(Environment("e", tools=[hint]), "hint", "x")).text == "Error: write a country"
    with pytest.raises(ConfigError, match="expected 'model' or 'outside'"):
        tool(look, errors="nobody")


async def test_a_name_that_no_block_can_have_gets_another() -> None:
    def lookupInvoice(number: int) -> int:
        """Look up."""
        return number + 1

    env = Environment("odd", tools=[lookupInvoice])
    turns = [
        '<think>t</think><lookupinvoice>{"number": 3}</lookupinvoice>',
        "<think>t</think><answer>4</answer>",
    ]
    async with env.open() as opened:
        made = await opened.play(QUESTION, ScriptedEngine(turns))
    assert made.answer == "4" and "<observation>4</observation>" in made.text


# -- state ------------------------------------------------------------------------------------


class Count:
    def __init__(self) -> None:
        self.value, self.closed = 0, False

    async def close(self) -> None:
        self.closed = True


def bump(by: int, state: State) -> int:
    """Count."""
    state.value += by  # type: ignore[attr-defined]
    return state.value  # type: ignore[attr-defined]


def bump_one(state: Annotated[Count, State]) -> int:
    """Count one."""
    return bump(1, state)  # type: ignore[arg-type]


async def test_all_tools_of_a_rollout_share_a_state_and_rollouts_do_not() -> None:
    made: list[Count] = []

    async def setup(task: Task) -> Count:
        assert not task.answers
        made.append(Count())
        return made[-1]

    def reached(task: Task, trajectory: Any, state: Count) -> float:
        assert not state.closed
        return state.value / 10

    env = Environment("counts", tools=[bump, bump_one], setup=setup, reward=reached)
    turns = [
        '<think>t</think><bump>{"by": 4}</bump>',
        "<think>t</think><bump_one>{}</bump_one>",
        '<think>t</think><bump>{"by": 4}</bump>',
        "<think>t</think><answer>9</answer>",
    ]
    async with env.open([QUESTION], reward=RewardSettings()) as opened:
        for _ in range(2):
            played = await opened.play(QUESTION, ScriptedEngine(turns))
            assert [s.text.strip()[13:14] for s in played.segments if s.author == "env"] == [
                *("4", "5", "9")
            ], "a tool that is not pure is called again"
            assert played.scored == {"score": 0.9, "parts": {"reached": {"score": 0.9}}}
            assert (await opened.score(QUESTION, played)).score == 0.9
        assert len(made) == 4 and all(state.closed for state in made)
        played.scored = None
        with pytest.raises(UsageError, match="which is gone, and the trajectory has no score"):
            await opened.score(QUESTION, played)
    assert "state" not in env.tools[0].schema  # type: ignore[index, union-attr]


async def test_a_setup_that_fails_later_is_the_worlds_fault_and_ends_one_rollout() -> None:
    calls: list[str] = []

    def setup(task: Task) -> dict[str, int]:
        calls.append(task.id)
        if len(calls) > 1:
            raise OSError("no disk")
        return {}

    env = Environment("fragile", tools=[bump], setup=setup)
    async with env.open([QUESTION]) as opened:
        made = await opened.play(QUESTION, ScriptedEngine(["<think>t</think><answer>1</answer>"]))
    assert made.stop is StopReason.TOOL_FAILED and made.failed_outside
    assert "setup, on task" in (made.error or "") and "no disk" in (made.error or "")


# -- tasks, settings, several -----------------------------------------------------------------


def test_one_list_is_split_by_a_hash_that_adding_tasks_does_not_move() -> None:
    tasks = [Task(f"Question {n}?", ("a",)) for n in range(200)]
    env = Environment("asks", tasks=tasks)
    said: list[str] = []
    train, test = env.load_tasks("train", said.append), env.load_tasks("test")
    assert len(train) + len(test) == 200 and 25 <= len(test) <= 55
    assert said == [f"asks: {len(train)} of 200 tasks are for 'train', by a hash of their ids"]
    more = Environment("asks", tasks=[*tasks, *(Task(f"More {n}?", ("a",)) for n in range(50))])
    assert {t.id for t in test} <= {t.id for t in more.load_tasks("test")}
    assert all(split_of(task) == "test" for task in test)
    both = Environment("asks", tasks={"train": tasks[:3], "test": tasks[3:5]})
    assert len(both.load_tasks("test")) == 2
    with pytest.raises(UsageError, match=r"has no tasks for 'dev'\. Known: test, train"):
        both.load_tasks("dev")
    made = Environment("asks", tasks=lambda split: [{"question": f"{split}?"}])
    assert made.load_tasks("test")[0].question == "test?"
    with pytest.raises(UsageError, match=r"has no tasks\. Give some with --tasks"):
        Environment("none").load_tasks("test")
    with pytest.raises(UsageError, match="none of its 1 tasks falls into"):
        for split in ("train", "test"):
            Environment("one", tasks=tasks[:1]).load_tasks(split)


async def test_several_environments_are_one_mixture(tmp_path: Path) -> None:
    def upper(word: str) -> str:
        return word.upper()

    def lower(word: str) -> str:
        return word.lower()

    first = Environment("first", tools=[upper], tasks=[Task("a?", ("A",))], grammar="react")
    second = Environment("second", tools=[lower], tasks={"test": [Task("B?", ("b",))]})
    first = Environment("first", tools=[upper], tasks={"test": [Task("a?", ("A",))]})
    tasks = tasks_of((first, second), "test", print)
    assert [task.meta["environment"] for task in tasks] == ["first", "second"]
    async with open_environments((first, second), tasks, reward=RewardSettings()) as opened:
        assert [*(await opened.toolbox(tasks[0]))] == ["upper"]
        assert [*(await opened.toolbox(tasks[1]))] == ["lower"]
        assert opened.groups_of(tasks[1]) == {"environment": "second"}
        with pytest.raises(UsageError, match="belongs to 'third', not to first, second"):
            opened.of(Task("c?", meta={"environment": "third"}))


def test_settings_reach_the_environment_and_others_are_refused(tmp_path: Path) -> None:
    shop = write_shop(tmp_path / "shop")
    env = load_environment(shop, coupon="autumn")
    assert env.settings["coupon"] == "autumn" and load_environment(shop).settings == {
        "coupon": "spring"
    }
    line = refused("check", shop, "env.cupon=x")
    assert "has no setting 'cupon'" in line and "Did you mean 'coupon'?" in line
    assert "has no setting 'corpus'" in refused(
        *("eval", "--env", shop, "--corpus", "atlas", "--out", tmp_path / "out")
    )
    with pytest.raises(ConfigError, match="environment 'x' is a value already"):
        load_environment(Environment("x"), a=1)


def test_the_fingerprints_tell_grammar_tools_and_files_apart(tmp_path: Path) -> None:
    def inputs(folder: Path) -> dict[str, Any]:
        found = CliRunner().invoke(app, ["check", str(folder), "--json"])
        assert found.exit_code == 0, found.output
        prints: dict[str, Any] = json.loads(found.output)["fingerprints"]
        return prints

    first = inputs(place(tmp_path / "a", LOOK))
    again = inputs(place(tmp_path / "b", LOOK))
    assert first == again
    words = inputs(place(tmp_path / "c", LOOK.replace("Look a", "Find a")))
    assert words["binding"] != first["binding"] and words["grammar"] == first["grammar"]
    body = inputs(place(tmp_path / "d", LOOK.replace("upper", "lower")))
    assert body["binding"] == first["binding"] and body["code"] != first["code"]
    other = inputs(place(tmp_path / "e", LOOK, grammar='"mhqa"'))
    assert other["grammar"] != first["grammar"]


def test_a_run_is_not_continued_with_other_tools_or_files(tmp_path: Path) -> None:
    folder = place(tmp_path / "env", LOOK)
    script = tmp_path / "s.jsonl"
    script.write_text(json.dumps({"turns": ["<think>t</think><answer>1</answer>"]}) + "\n")
    run = ("eval", "--env", folder, "--model", f"scripted:{script}", "--out", tmp_path / "run")
    done = CliRunner().invoke(app, list(map(str, run)))
    assert done.exit_code == 0, done.output
    place(tmp_path / "env", LOOK.replace("Look a", "Find a"))
    assert "this was started with input binding" in refused(*run)


# -- references -------------------------------------------------------------------------------


def test_an_environment_has_several_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        f"from coa import Environment\n{LOOK}\n"
        "def load_environment(size: int = 3):\n"
        "    return Environment('mine', tools=[look] * 1, tasks=[{'question': 'q?'}] * 1)\n"
        "env = Environment('value', tools=[look])\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    assert load_environment("mine.py").name == "mine"
    assert load_environment("mine:env").name == "value"
    made = load_environment("mine:load_environment", size=4)
    assert made.reference == "mine:load_environment" and made.settings == {"size": 4}
    assert Environment.received(made.passed_on()).code() == made.code() != ""
    assert load_environment("atlas-web").value().name == "web"
    value = Environment("here", tools=[len])  # type: ignore[list-item]
    assert Environment.received(value.passed_on()) is value


# -- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tools", "more", "said"),
    [
        (
            "def look(word, depth): return word",
            {},
            "tool 'look': parameter 'word' has no type; write one, as in 'word: str'",
        ),
        (LOOK, {"tools": '["tools:look", "tools:look"]'}, "two tools are named 'look'"),
        (
            LOOK.replace("look", "answer"),
            {"tools": '["tools:answer"]'},
            "the tool 'answer' is named like a block of it; rename the tool",
        ),
        (
            f"{LOOK}def bad(task, trajectory): return 1 / 0\n",
            {"reward": '"tools:bad"'},
            "failed: ZeroDivisionError: division by zero (tools.py:4)",
        ),
        (
            f"{LOOK}def bad(task, trajectory): return float('nan')\n",
            {"reward": '"tools:bad"'},
            "found nan, expected a number from 0 to 1",
        ),
        (LOOK, {"reward": '"exakt"'}, "'exakt' is not a reward. Did you mean 'exact'?"),
        (
            "x = 1\nimport nowhere_to_be_found\n",
            {},
            "tools.py, line 2: importing it failed: ModuleNotFoundError: No module named",
        ),
        (LOOK, {"tools": '["tools:lok"]'}, "tools.py has no 'lok'. Did you mean 'look'?"),
        (LOOK, {"tools": '["look"]'}, "tools has 'look', expected module:attribute"),
        (
            f"{LOOK}def setup(task): raise OSError('no disk')\n",
            {"setup": '"tools:setup"'},
            "failed: OSError: no disk (tools.py:4)",
        ),
        (LOOK, {"grammar": '"other.toml"'}, "does not have; name it among the tools, or take <"),
        (LOOK, {"gramar": '"react"'}, "gramar is not a setting. Did you mean 'grammar'?"),
        (LOOK, {"tasks": '"none.csv"'}, "none.csv"),
        (LOOK, {"tasks": '"odd.csv"'}, "question"),
    ],
)
def test_a_bad_environment_is_one_line(
    tmp_path: Path, tools: str, more: dict[str, str], said: str
) -> None:
    folder = place(tmp_path / "env", tools, **more)
    (folder / "odd.csv").write_text("frage,antwort\nWas?,Das\n", encoding="utf-8")
    (folder / "other.toml").write_text(
        'name = "own"\nstart = ["tool", "answer"]\n[roles.consult]\nkind = "tool"\n'
        'next = ["answer"]\n[roles.answer]\nkind = "answer"\n',
        encoding="utf-8",
    )
    assert said in refused("check", folder)
    assert said in refused(
        "eval", "--env", folder, "--model", "smollm2-135m", "--out", folder / "o"
    )
    assert not (folder / "o").exists()


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("nowhere", "no such folder or file, and none of that name is shipped"),
        ("atlas-wep", "Did you mean 'atlas-web'?"),
        ("no_module_of_mine:env", "no module named 'no_module_of_mine'"),
        ("json:dumps", "environment 'json:dumps'"),
        ("json:decoder", "is a module, expected an Environment"),
    ],
)
def test_a_bad_reference_is_one_line(reference: str, said: str) -> None:
    assert said in refused("check", reference)


def test_an_empty_folder_says_how_to_begin(tmp_path: Path) -> None:
    assert "Make an environment there with: coa init" in refused("check", tmp_path)
    (tmp_path / "x").touch()
    assert "is not empty" in refused("init", tmp_path)


EVIL = "from pathlib import Path\nPath('imported').touch()\nboom = None\n"


def test_a_reference_inside_a_file_is_never_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tasks, episodes, datasets and adapters: what they name is shown."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(EVIL, encoding="utf-8")
    meta = {"environment": "evil:boom", "reward": "evil:boom", "teacher": "evil:boom"}
    TaskSet((Task("Where is Lima?", ("Peru",), meta=meta),)).save(tmp_path / "tasks.jsonl")
    line = refused("eval", "--tasks", "tasks.jsonl", "--model", "smollm2-135m", "--out", "run")
    assert "a reference inside a file is never imported" in line
    plain = {key: value for key, value in meta.items() if key != "reward"}
    TaskSet((Task("Where is Lima?", ("Peru",), meta=plain),)).save(tmp_path / "tasks.jsonl")
    found = CliRunner().invoke(app, ["record", "--tasks", "tasks.jsonl", "--out", "e.jsonl"])
    assert found.exit_code == 0, found.output
    CliRunner().invoke(app, ["distill", "--episodes", "e.jsonl", "--out", "d"])
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    manifest = {"environments": ["evil:boom"], "grammar": "evil:boom"}
    (adapter / "manifest.json").write_text(json.dumps(manifest))
    line = refused("ask", "Where?", "--model", f"smollm2-135m+{adapter}")
    assert "was trained for the environment 'evil:boom', which is not shipped here" in line
    assert not (tmp_path / "imported").exists()


async def test_controls_wrap_any_environment_or_say_why_not() -> None:
    def look(word: str) -> str:
        return word

    env = Environment("looks", tools=[look])
    async with env.open([QUESTION], ToolSettings(observations="withheld")) as opened:
        box = await opened.toolbox(QUESTION)
        assert (await box.call(ToolCall("look", "x"))).text == "Nothing was found."
    async with env.open([QUESTION], ToolSettings(observations="closed_book")) as opened:
        assert not await opened.toolbox(QUESTION)
    with pytest.raises(ConfigError, match="the tool 'look' has no wrong answers to give"):
        async with env.open([QUESTION], ToolSettings(observations="wrong")):
            pass


async def test_a_grammar_as_a_value_and_its_tools() -> None:
    value = grammar_from_toml(
        'name = "own"\nstart = ["tool", "answer"]\n[roles.ask]\nkind = "tool"\ntool = "look"\n'
        'next = ["answer"]\n[roles.answer]\nkind = "answer"\n'
    )

    def look(word: str) -> str:
        return f"{word}!"

    env = Environment("own", tools=[look], grammar=value)
    async with env.open() as opened:
        made = await opened.play(QUESTION, ScriptedEngine(["<ask>x</ask>", "<answer>y</answer>"]))
    assert made.answer == "y" and "x!" in made.text and made.grammar_id == value.fingerprint()
    assert made.protocol.name == "own"


def test_the_starter_runs(tmp_path: Path) -> None:
    folder = tmp_path / "shop"
    runner = CliRunner()
    assert runner.invoke(app, ["init", str(folder)]).exit_code == 0
    checked = runner.invoke(app, ["check", str(folder)])
    assert checked.exit_code == 0 and "tasks        8 train, 2 test" in checked.output
    assert "reward       right: 0 without an answer, 1 for the gold answer alone" in checked.output
    episodes = ["record", "--env", str(folder), "--out", str(tmp_path / "e.jsonl")]
    assert runner.invoke(app, episodes).exit_code == 0
    words = ["distill", "--episodes", str(tmp_path / "e.jsonl"), "--env", str(folder)]
    distilled = runner.invoke(app, [*words, "--out", str(tmp_path / "d"), "--json"])
    assert distilled.exit_code == 0, distilled.output
    assert json.loads(distilled.stdout)["kept"] == 8
    readme = (folder / "README.md").read_text().splitlines()
    assert len(readme) <= 10


def test_names_of_environments_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a short name"):
        Environment("")
    with pytest.raises(CoaError, match="two environments are named 'basket'"):
        from coa.environment import environments_for

        environments_for([write_shop(tmp_path / "a"), write_shop(tmp_path / "b")])


# -- found by review ----------------------------------------------------------------------------


async def test_a_rollout_that_failed_outside_is_not_judged_with_a_state_that_is_gone() -> None:
    made: list[int] = []

    def setup(task: Task) -> dict[str, int]:
        made.append(1)
        if len(made) > 2:  # after the trials of setup and reward
            raise OSError("no disk")
        return {"n": 1}

    def reached(task: Task, trajectory: Any, state: dict[str, int]) -> float:
        return float(state["n"])

    env = Environment("fragile", tools=[bump], setup=setup, reward=reached)
    async with env.open([QUESTION], reward=RewardSettings()) as opened:
        lost = await opened.play(QUESTION, ScriptedEngine(["<think>t</think><answer>1</answer>"]))
        assert lost.failed_outside and (await opened.score(QUESTION, lost)).score == 0


def test_a_folder_of_a_shipped_name_does_not_stand_in_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place(tmp_path / "search", LOOK)
    assert load_environment("search").reference == "search"
    assert load_environment("./search").name == "search"
    assert "tools" not in load_environment("search").code()
    assert load_environment("./search").code() and not load_environment("search").code()


def test_a_value_that_somebody_changed_is_not_taken_for_its_reference(tmp_path: Path) -> None:
    from dataclasses import replace

    env = load_environment(write_shop(tmp_path / "shop"))
    assert env.is_loadable and env.with_grammar("mhqa").is_loadable
    changed = replace(env, reward="exact")
    assert not changed.is_loadable
    assert Environment.received(changed.passed_on()) is changed


async def test_one_source_is_opened_once_however_many_ask_at_the_same_time() -> None:
    import asyncio
    from collections.abc import AsyncIterator
    from contextlib import asynccontextmanager
    from dataclasses import dataclass

    begun: list[int] = []

    @dataclass(frozen=True)
    class Slow:
        @asynccontextmanager
        async def open(self, how: Any) -> AsyncIterator[Any]:
            begun.append(1)
            await asyncio.sleep(0.01)
            yield lambda task: []

    async with Environment("slow", tools=[Slow()]).open() as opened:
        await asyncio.gather(*(opened.toolbox(QUESTION) for _ in range(10)))
    assert len(begun) == 1


async def test_a_grammar_file_that_changes_while_it_is_used_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    text = 'name = "own"\nbrief = "{}"\nstart = ["answer"]\n[roles.answer]\nkind = "answer"\n'
    path.write_text(text.format("One."))
    env = Environment("own", grammar=str(path))
    async with env.open() as opened:
        path.write_text(text.format("Two."))
        made = await opened.play(QUESTION, ScriptedEngine(["<answer>x</answer>"]))
    assert "One." in made.segments[0].text and made.protocol.brief == "One."


async def test_gold_does_not_reach_tools_and_setup_even_by_mistake() -> None:
    seen: list[Task] = []

    def setup(task: Task) -> None:
        seen.append(task)

    def tools(task: Task) -> list[Any]:
        seen.append(task)
        return []

    async with Environment("own", tools=tools, setup=setup).open() as opened:
        async with opened.session(QUESTION):
            pass
        await opened.toolbox(QUESTION)
    assert len(seen) == 3 and not any(task.answers or task.gold for task in seen)


@pytest.mark.parametrize("form", ["default", "keyword", "annotated", "third"])
async def test_a_reward_says_in_several_ways_that_it_takes_the_state(form: str) -> None:
    def default(task: Task, trajectory: Any, state: Any = None) -> float:
        return float(state)

    def keyword(task: Task, trajectory: Any, *, state: Any) -> float:
        return float(state)

    def annotated(task: Task, trajectory: Any, held: State) -> float:
        return float(held)  # type: ignore[arg-type]

    def third(task: Task, trajectory: Any, held: Any) -> float:
        return float(held)

    reward = {"default": default, "keyword": keyword, "annotated": annotated, "third": third}[form]
    env = Environment("own", setup=lambda task: 0.5, reward=reward)
    async with env.open([QUESTION], reward=RewardSettings()) as opened:
        made = await opened.play(QUESTION, ScriptedEngine(["<think>t</think><answer>x</answer>"]))
        assert (await opened.score(QUESTION, made)).score == 0.5


async def test_a_state_that_cannot_be_closed_costs_no_result(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Broken:
        def close(self) -> None:
            raise OSError("gone")

    async with Environment("own", setup=lambda task: Broken()).open() as opened:
        made = await opened.play(QUESTION, ScriptedEngine(["<think>t</think><answer>x</answer>"]))
    assert made.answer == "x" and "closing a state failed: OSError: gone" in capsys.readouterr().err


def test_the_tasks_of_a_recipe_make_way_for_those_of_an_environment_that_is_named() -> None:
    pytest.importorskip("torch")
    from coa.io.settings import find_recipe
    from coa.train.rl_stage import read_rl_recipe

    path = find_recipe("rl-135m")
    assert read_rl_recipe(path, []).tasks
    assert not read_rl_recipe(path, ["env=shop"]).tasks
    assert read_rl_recipe(path, ["env=shop", "tasks=mine.csv"]).tasks == "mine.csv"


def test_two_folders_with_modules_of_one_name_do_not_get_each_others(tmp_path: Path) -> None:
    for name in ("first", "second"):
        folder = place(tmp_path / name, f"{LOOK}WHOSE = {name!r}\n", reward='"judge_of:right"')
        (folder / "judge_of.py").write_text(
            "import tools\n\ndef right(task, trajectory):\n    return 1.0\n\nWHOSE = tools.WHOSE\n"
        )
    first, second = (load_environment(tmp_path / name) for name in ("first", "second"))
    whose = [env.reward.__globals__["WHOSE"] for env in (first, second)]  # type: ignore[union-attr]
    assert whose == ["first", "second"]


def test_a_setting_that_nothing_takes_is_refused_in_the_file_too(tmp_path: Path) -> None:
    folder = place(tmp_path / "env", LOOK)
    (folder / "environment.toml").write_text('tools = ["tools:look"]\n[settings]\nfoo = 1\n')
    assert "has no setting 'foo': neither its setup nor its tasks" in refused("check", folder)


def test_a_recipe_beside_an_environment_is_none_of_its_files(tmp_path: Path) -> None:
    folder = place(tmp_path / "env", LOOK)
    before = load_environment(folder).code()
    (folder / "rl.toml").write_text("out = 'x'\n")
    assert load_environment(folder).code() == before


async def test_a_setup_that_takes_too_long_is_cut_and_blocks_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("coa.environment.SETUP_S", 0.2)
    env = Environment("slow", tools=[bump], setup=lambda task: time.sleep(30))
    with pytest.raises(ConfigError, match=r"setup, on task \w+, made no state within 0\.2 seconds"):
        async with env.open([QUESTION]):
            pass


def test_a_package_beside_an_environment_and_functions_in_its_table_of_tasks(
    tmp_path: Path,
) -> None:
    folder = place(
        tmp_path / "env", LOOK, tools='["beside_kit.parts:look"]', tasks='{train = "tools:make"}'
    )
    (folder / "beside_kit").mkdir()
    (folder / "beside_kit" / "__init__.py").write_text("")
    (folder / "beside_kit" / "parts.py").write_text(f"from .words import UP\n{LOOK}")
    (folder / "beside_kit" / "words.py").write_text("UP = 1\n")
    (folder / "tools.py").write_text("def make(split):\n    return [{'question': split}]\n")
    env = load_environment(folder)
    assert [each.name for each in env.tools] == ["look"]  # type: ignore[union-attr]
    assert env.load_tasks("train")[0].question == "train"


async def test_packages_of_one_name_beside_two_environments_are_two(tmp_path: Path) -> None:
    for folder in (tmp_path / "one", tmp_path / "two"):
        place(folder, LOOK, tools='["twin_kit.parts:look"]')
        (folder / "twin_kit").mkdir()
        (folder / "twin_kit" / "__init__.py").write_text("")
        text = f'from .words import SAID\n\ndef look(name: str) -> str:\n    """{folder.name}."""\n'
        (folder / "twin_kit" / "parts.py").write_text(f"{text}    return SAID\n")
        (folder / "twin_kit" / "words.py").write_text(f"SAID = {folder.name!r}\n")
    for name in ("one", "two", "one"):
        (look,) = load_environment(tmp_path / name).tools  # type: ignore[misc]
        assert isinstance(look, Tool) and await look.run("x") == name


async def test_a_setup_that_raises_a_timeout_of_its_own_is_not_said_to_be_slow() -> None:
    def setup(task: Task) -> None:
        raise TimeoutError("no server")

    with pytest.raises(ConfigError, match="no server"):
        async with Environment("far", tools=[bump], setup=setup).open([QUESTION]):
            pass


def test_a_corpus_that_is_asked_for_stands_in_for_that_of_the_file(tmp_path: Path) -> None:
    folder = place(tmp_path / "env", LOOK, corpus='"own.corpus"')
    own, asked = load_environment(folder), load_environment(folder, corpus="atlas:3", passages=2)
    assert own.tools[-1].corpus == str(folder / "own.corpus")  # type: ignore[index, union-attr]
    assert (asked.tools[-1].corpus, asked.tools[-1].passages) == ("atlas:3", 2)  # type: ignore[index, union-attr]


def test_a_judge_that_is_asked_for_reaches_an_environments_own_reward() -> None:
    env = Environment("judged", reward=RewardSettings("exact", judge=JudgeSettings(max_tokens=7)))
    asked = RewardSettings(judge=JudgeSettings("openai:m@http://127.0.0.1:1", cache="kept.db"))
    chosen, own = env.judged_by(asked)
    assert own is None and chosen.expression == "exact"
    assert chosen.judge == JudgeSettings(
        "openai:m@http://127.0.0.1:1", cache="kept.db", max_tokens=7
    )


def test_a_changed_preset_is_no_template() -> None:
    react = load_grammar("react")
    assert Environment("same", grammar=react).is_template
    assert Environment("other", grammar=replace(react, brief="Other.")).is_template
    roles = tuple(
        replace(role, about="Mine.") if role.kind == "tool" else role for role in react.roles
    )
    assert not Environment("own", grammar=replace(react, roles=roles)).is_template


VARIED = """
from pathlib import Path
from coa import Environment, Episode, Tool

ABOUT = Path(__file__).with_name("about.txt")


async def run(word):
    return word


def tools(task):
    return [Tool("look", run, about=ABOUT.read_text() if "19" in task.question else "Looks.")]


class Team:
    async def record(self, task, toolbox, seed=0):
        return Episode(task.id, task.question, "team", [], answer="1")


questions = {"train": [{"question": f"What is {n}?", "answers": ["1"]} for n in range(20)]}
environment = Environment("varied", tools=tools, tasks=questions, teacher=Team())
"""


def test_a_recording_depends_on_the_tools_of_every_task(tmp_path: Path) -> None:
    (tmp_path / "about.txt").write_text("Looks a word up.")
    (tmp_path / "environment.py").write_text(VARIED)
    out = tmp_path / "episodes.jsonl"
    assert record(tmp_path, out).episodes == record(tmp_path, out).episodes == 20
    (tmp_path / "about.txt").write_text("Looks a word up elsewhere.")
    with pytest.raises(ConfigError, match="binding"):
        record(tmp_path, out)


class Caller:
    def __call__(self, word: str) -> str:
        return word


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda word: word, "a tool is a lambda, which has no name; write it as a def."),
        (partial(bump, "x"), "which is none; expected a function or a method. A def that calls"),
        (Caller(), "which is none; expected a function or a method. A def that calls it, with"),
        (Caller, "which is none; expected a function or a method."),
        (3, "a tool is 3; expected a function or a method."),
    ],
)
def test_what_is_no_function_is_no_tool(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        Environment("odd", tools=[given])


async def test_a_reward_that_reads_only_the_state_judges_tasks_without_gold(tmp_path: Path) -> None:
    env = Environment("own", tools=[bump], setup=lambda task: {"n": 1}, reward=reached)
    task = Task("Reach it.")
    async with env.open([task], reward=RewardSettings()) as opened:
        made = await opened.play(task, ScriptedEngine(["<think>t</think><answer>1</answer>"]))
        assert (await opened.score(task, made)).score == 1.0
        unjudged = await opened.play(
            task, ScriptedEngine(["<think>t</think><answer>1</answer>"]), judged=False
        )
        assert unjudged.scored is None


def reached(task: Task, trajectory: Any, state: dict[str, int]) -> float:
    return float(state["n"])


def test_a_tasks_function_takes_the_split_by_name_or_is_split(tmp_path: Path) -> None:
    text = f"{LOOK}\ndef make(limit=3):\n"
    text += "    return [{'question': f'{n}?', 'answers': ['1']} for n in range(limit)]\n"
    folder = place(tmp_path / "env", text, tasks='"tools:make"', settings="{limit = 40}")
    env = load_environment(folder)
    train, test = env.load_tasks("train"), env.load_tasks("test")
    assert len(train) + len(test) == 40 and not {t.id for t in train} & {t.id for t in test}
    assert len(load_environment(folder, limit=50).load_tasks("train")) > len(train)

    def of_split(size: int = 2, *, split: str) -> list[dict[str, Any]]:
        return [{"question": f"{split} {n}?"} for n in range(size)]

    named = Environment("named", tasks=of_split)
    assert [task.question for task in named.load_tasks("dev")] == ["dev 0?", "dev 1?"]


def test_a_prompt_does_not_speak_of_tools_that_made_way() -> None:
    own = Environment("own", tools=[bump]).value()
    assert own.brief == "Answer the question with the tools." and own.name == "react"
    team = Environment("own", tools=[bump], grammar="mhqa").value()
    assert team.preamble.startswith("You solve a task with tools. You work as a team")
    both = Environment("both", tools=[bump, corpus_tools("x.corpus")])
    assert both.value() == load_grammar("react")
    assert Environment("code", tools=[sandbox_tools()], grammar="code").value().brief == (
        load_grammar("code").brief
    )


class Span(BaseModel):
    weeks: int = Field(description="full weeks")
    days: int = 0


async def test_models_inside_of_models_are_shown() -> None:
    def fee(kind: Size, period: Span) -> str:
        """Say the fee."""
        return f"{kind.value} {period.weeks}"

    env = Environment("fees", tools=[fee])
    about = env.tools[0].about  # type: ignore[index, union-attr]
    shape = '"period": {"weeks": integer, "days": integer (optional)}'
    assert shape in about and "period.weeks: full weeks" in about
    argument = '{"kind": "small", "period": {"weeks": 2}}'
    assert (await say(env, "fee", argument)).text == "small 2"


def test_check_says_that_tasks_have_no_answers(tmp_path: Path) -> None:
    text = f"{LOOK}\ndef right(task, trajectory):\n    return 0.5\n"
    folder = place(tmp_path / "env", text, reward='"tools:right"')
    (folder / "tasks.csv").write_text("question,right\n" + "".join(f"{n}?,1\n" for n in range(20)))
    said = CliRunner().invoke(app, ["check", str(folder)])
    assert said.exit_code == 0 and "20 of them have neither an answer nor other gold" in said.output


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda out: evaluate("shop", out=out, spilt="x"), "EvalSettings has no 'spilt'. Did you"),
        (lambda out: record("shop", out, seeed=1), "Recording has no 'seeed'. Did you mean 'seed'"),
        (lambda out: ask("Why?", prompts="full"), "AgentSettings has no 'prompts'. Did you mean"),
        (lambda out: distill("e.jsonl", out=out, tool=1), "Distilling has no 'tool'. Did you mean"),
    ],
)
def test_a_misspelt_argument_is_a_line(
    call: Callable[[Path], Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        call(tmp_path / "out")
