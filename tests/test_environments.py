"""The shipped environments: which tools a task gets, and the controls, caches and corpora behind
them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from coa import Task, ToolCall, corpus_tools, load_environment, load_grammar, tool
from coa.distillation.exports import export
from coa.environment import (
    Environment,
    OpenEnvironment,
    ToolSettings,
    bound_for,
    open_environments,
    remarks,
)
from coa.environments import BFCL, NAMES, SETS, TOOLBOX, at_home, home_of, make_tasks
from coa.environments.atlas.pages import any_corpus
from coa.environments.search import check_any_corpus
from coa.errors import CoaError, ConfigError, UsageError
from coa.evaluation.run import EvalSettings, run_eval
from coa.rollouts import choose_environments
from coa.sandbox import Sandbox
from coa.tasks import TaskSet
from coa.tools.base import Toolbox
from coa.tools.code import NOTHING as PRINTED_NOTHING
from coa.tools.code import code_tool
from coa.tools.sources import CorpusTools, sandbox_tools
from coa.tools.web import NOTHING, wiki_search

WEB = Task("What is the capital of Peru?", meta={"set": "atlas-web"})
GYM = Task("What is 6 * 7?", meta={"set": "gym-code"})
OWN = Task("Draw it.", meta={"tools": [{"name": "area", "parameters": {}}]})


async def say(toolbox: Toolbox, tool: str, argument: str) -> str:
    return (await toolbox.call(ToolCall(tool, argument))).text


@asynccontextmanager
async def opened(
    *tasks: Task, tools: ToolSettings | None = None, grammar: str = "auto"
) -> AsyncIterator[OpenEnvironment]:
    """What tasks of a file belong to, opened as a command opens it."""
    given = TaskSet(tasks)
    environments, found = choose_environments((), given, tools=tools, grammar=grammar)
    async with open_environments(environments, found, tools) as held:
        yield held


async def test_a_task_gets_the_tools_of_its_set() -> None:
    environments, (web, gym, mine) = at_home(TaskSet((WEB, GYM, Task("Mine?"))))
    assert [env.name for env in environments] == ["atlas-web", "gym-code", "search"]
    async with open_environments(environments, [web, gym, mine]) as held:
        assert list(await held.toolbox(mine)) == ["wiki_search"]
        assert list(await held.toolbox(web)) == ["web_search", "crawl_page"]
        assert await say(await held.toolbox(gym), "code", "```py\nprint(6 * 7)\n```") == "42"
        seen = await say(await held.toolbox(web), "web_search", "capital of Peru")
        assert "https://atlas.example/country/peru" in seen
        seen = await say(
            await held.toolbox(web), "crawl_page", "https://atlas.example/country/peru"
        )
        assert "Lima" in seen
        # Limits and counts are those of the run, not of one task.
        assert (await held.toolbox(web)).usage["crawl_page"].calls == 1
        for task, grammar in ((web, "web"), (gym, "code"), (mine, "mhqa")):
            assert (await held.bound(task)).name == grammar
        with pytest.raises(UsageError, match="belongs to 'gaia', not to atlas-web, gym-code, sear"):
            await held.toolbox(Task("?", meta={"set": "gaia"}))


def test_every_shipped_environment_is_made_and_bound_without_anything_being_started() -> None:
    for name in NAMES:
        env = load_environment(name)
        assert (env.name, env.reference) == (name, name)
        bound = bound_for(name, Task("?"))
        assert bound.name == env.value().name
        assert bool(bound.tool_roles) == (name not in (TOOLBOX, BFCL))  # whose tasks bring them
    for name in SETS:
        env = load_environment(name, n=2)
        assert len(env.load_tasks("train")) == len(env.load_tasks("test")) == 2
        task = env.load_tasks("train")[0]
        assert home_of(task) == (name, {}), "a task of a file finds back"


@pytest.mark.parametrize(
    ("grammar", "tools"),
    [
        ("mhqa", ["wiki_search"]),
        ("search_r1", ["wiki_search"]),
        ("react", ["wiki_search"]),
        ("web", ["web_search", "crawl_page"]),
        ("code", ["code"]),
        ("afm", ["web_search", "crawl_page", "wiki_search", "code"]),
    ],
)
async def test_a_question_gets_the_tools_that_the_grammar_names(
    grammar: str, tools: list[str]
) -> None:
    mine, chosen = Task("Mine?", meta={"set": "a column of my own"}), load_grammar(grammar)
    async with opened(mine, grammar=grammar) as held:
        assert sorted(await held.toolbox(mine)) == sorted(tools)
        assert (await held.toolbox(mine)).bind(chosen).tool_roles
        assert (await held.bound(mine)).tool_roles
    own = Task("Mine?", id="own", meta={"set": "math500", "grammar": grammar})
    environments, (first, second) = at_home(TaskSet((mine, own)))
    async with open_environments(environments, [first, second]) as held:
        assert sorted(await held.toolbox(second)) == sorted(tools)
        assert list(await held.toolbox(first)) == ["wiki_search"]


async def test_programs_of_a_rollout_share_their_variables_when_asked() -> None:
    async with opened(GYM, tools=ToolSettings(code_session=True)) as held:
        async with held.session(GYM) as session, session.tools.opened() as box:
            await say(box, "code", "x = 41")
            assert await say(box, "code", "x + 1") == "42"
        async with held.session(GYM) as session, session.tools.opened() as box:
            assert "NameError" in await say(box, "code", "x + 1")


async def test_the_key_of_a_recording_holds_what_decides_the_answer() -> None:
    async def key(world: int, observations: str = "real", passages: int = 2) -> str:
        task = Task("?", meta={"world": world})
        async with opened(task, tools=ToolSettings(observations, passages=passages)) as held:
            return (await held.toolbox(task))["wiki_search"].fingerprint

    ways = [(0,), (7,), (0, "real", 3), (0, "wrong"), (7, "wrong")]
    assert len({await key(*way) for way in ways}) == 5
    assert await key(7) == wiki_search(any_corpus("atlas:7"), 2).fingerprint


async def inputs(task: Task, **tools: object) -> dict[str, str]:
    """What a manifest says of the tools of a task."""
    async with opened(task, tools=ToolSettings(**tools)) as held:  # type: ignore[arg-type]
        return held.inputs()


async def test_a_manifest_tells_tools_apart(tmp_path: Path) -> None:
    assert ToolSettings().identity() == {}
    first, second, same = (tmp_path / f"{name}.toml" for name in "abc")
    first.write_text("seconds = 2.0\n")
    second.write_text("seconds = 3.0\n")
    same.write_bytes(first.read_bytes())
    asked = await inputs(WEB, corpus=str(first))
    assert await inputs(WEB, corpus=str(second)) != asked == await inputs(WEB, corpus=str(same))
    usual = await inputs(WEB)
    assert set(usual) == {"grammar", "binding", "answers"} < set(asked)
    other = await inputs(WEB, corpus="atlas:7")
    assert usual["answers"] != other["answers"] != asked["answers"]
    assert other == await inputs(Task("Another?", meta={**WEB.meta, "world": 7}))
    mine = Task("Mine?")
    assert (await inputs(mine, passages=3))["answers"] != (await inputs(mine))["answers"]
    gym = await inputs(GYM)
    assert await inputs(GYM, unsafe_code=True) == {**gym, "unsafe_code": "on"}
    assert (await inputs(GYM, code_session=True))["code_session"] == "on"
    withheld = await inputs(GYM, observations="withheld")
    assert withheld == {**gym, "observations": "withheld"}


async def test_controls_on_the_web() -> None:
    peru = "https://atlas.example/country/peru"
    async with opened(WEB, tools=ToolSettings("withheld")) as held:
        box = await held.toolbox(WEB)
        assert await say(box, "web_search", "capital of Peru") == NOTHING
        assert "there is no such page" in await say(box, "crawl_page", peru)
    async with opened(WEB, tools=ToolSettings("wrong")) as held:
        box = await held.toolbox(WEB)
        first = await say(box, "web_search", "capital of Peru")
        assert "peru" not in first.lower() and "https://atlas.example/" in first
        assert first == await say(box, "web_search", "capital of Peru")
        assert "Lima" not in await say(box, "crawl_page", peru)
    async with opened(WEB, OWN, tools=ToolSettings("closed_book")) as held:
        _, (web, own) = at_home(TaskSet((WEB, OWN)))
        assert list(await held.toolbox(web)) == list(await held.toolbox(own)) == []
    async with opened(OWN) as held:
        assert list(await held.toolbox(OWN)) == ["area"]
        assert list(await held.without_tools().toolbox(OWN)) == []


async def test_controls_of_programs_look_like_the_real_tool_and_run_nothing() -> None:
    real = code_tool(Sandbox())
    program, seen = "```py\nprint(6 * 7)\n```", {}
    for observations in ("withheld", "wrong"):
        async with opened(GYM, tools=ToolSettings(observations)) as held:
            box = await held.toolbox(GYM)
            assert box["code"].role() == real.role()
            seen[observations] = await say(box, "code", program)
            assert await say(box, "code", program) == seen[observations]
    assert seen["withheld"] == PRINTED_NOTHING
    assert seen["wrong"].isdecimal() and seen["wrong"] != "42"


def test_tasks_of_a_benchmark_that_nobody_gave_a_corpus_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gaia, sums = (
        Task("?", id=name, meta={"set": name, "grammar": grammar})
        for name, grammar in (("gaia", "web"), ("aime24", "code"))
    )
    ours = [Task("?"), Task("?", id="w", meta={"set": "atlas-web"})]

    def said(*tasks: Task, grammar: str = "auto", **tools: str) -> str:
        how = ToolSettings(**tools)  # type: ignore[arg-type]
        environments, found = choose_environments((), TaskSet(tasks), tools=how, grammar=grammar)
        return "\n".join(remarks(environments, found, how))

    line = "gaia: without --corpus the tools of these tasks search the Atlas"
    assert said(gaia, sums, *ours) == said(gaia) == line
    assert not said(sums, *ours)
    assert not said(gaia, corpus="atlas:3")
    assert not said(gaia, observations="closed_book")
    assert not said(gaia, grammar="code")
    (tmp_path / "model.jsonl").write_text('{"turns": []}\n')
    TaskSet((replace(gaia, answers=("x",)),)).save(tmp_path / "t.jsonl")
    settings = EvalSettings(f"scripted:{tmp_path / 'model.jsonl'}", tasks=str(tmp_path / "t.jsonl"))
    for quiet in (False, True):
        run_eval(settings, tmp_path / f"quiet {quiet}", quiet=quiet)
        assert (line in capsys.readouterr().err) is not quiet


@pytest.mark.parametrize("unsafe", [False, True])
async def test_a_run_is_repeated_without_its_tools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unsafe: bool
) -> None:
    file, calls, found = str(tmp_path / "tools.sqlite"), [], []
    _, (web, gym) = at_home(TaskSet((WEB, GYM)))
    for mode in ("record", "replay"):
        settings = ToolSettings(cache=file, mode=mode, unsafe_code=unsafe)
        async with opened(web, gym, tools=settings) as held:
            seen = [
                await say(await held.toolbox(web), "web_search", "capital of Peru"),
                await say(await held.toolbox(gym), "code", "import time\nprint(time.time_ns())"),
            ]
            found.append(held.inputs())
        calls.append(seen)
    assert calls[0] == calls[1]
    assert found[1].pop("tools").startswith("replayed from answers ") and found[0] == found[1]
    async with opened(GYM, tools=ToolSettings(cache=file, mode="replay")) as held:
        seen_now = await say(await held.toolbox(GYM), "code", "1")
        assert "no answer of code to this is recorded" in seen_now
    assert "coa: 1 answers of tools are not recorded in" in capsys.readouterr().err


async def test_the_sources_of_shipped_tools_are_for_ones_own_environment_too() -> None:
    def double(number: int) -> int:
        """Double a number."""
        return 2 * number

    atlas = CorpusTools(any_corpus("atlas:0"), ("wiki_search", "crawl_page"))
    sources = [atlas, sandbox_tools(), double]
    env = Environment("own", tools=sources)
    async with env.open() as held:
        box = await held.toolbox(Task("?"))
        assert list(box) == ["wiki_search", "crawl_page", "code", "double"]
        assert "Lima" in await say(box, "wiki_search", "capital of Peru")
        assert await say(box, "code", "6 * 7") == "42"
        assert await say(box, "double", '{"number": 21}') == "42"
    with pytest.raises(ConfigError, match="a corpus has no tool 'wiki'"):
        corpus_tools("atlas:0", "wiki")
    twice = Environment("own", tools=[sandbox_tools(), tool(double, name="code")])
    with pytest.raises(ConfigError, match="two tools are named 'code'"):
        async with twice.open([Task("?")]):
            pass


async def test_a_sandbox_is_opened_when_a_task_needs_it_and_only_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[Sandbox] = []
    enter = Sandbox.__aenter__

    async def counted(box: Sandbox) -> Sandbox:
        begun.append(box)
        return await enter(box)

    monkeypatch.setattr(Sandbox, "__aenter__", counted)
    env = Environment(
        "own", tools=lambda task: [sandbox_tools()] if task.meta else [], grammar="code"
    )
    async with env.open([Task("?")]) as held:
        assert list(await held.toolbox(Task("?"))) == [] == begun
        for _ in range(2):  # nobody announced it, and it is opened once
            assert await say(await held.toolbox(GYM), "code", "6 * 7") == "42"
        assert len(begun) == 1
    async with open_environments((env,), [GYM], dry=True) as held:
        assert list(await held.toolbox(GYM)) == ["code"]
    for observations in ("withheld", "closed_book"):
        async with opened(GYM, tools=ToolSettings(observations)):
            pass
    assert len(begun) == 1


async def test_the_real_web_comes_from_a_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "web.toml"
    recipe.write_text("seconds = 2.0\n")
    async with opened(WEB, tools=ToolSettings(corpus=str(recipe))) as held:
        toolbox = await held.toolbox(WEB)
        assert "web search is not set up" in await say(toolbox, "web_search", "Peru")
        assert "only the public web" in await say(toolbox, "crawl_page", "http://127.0.0.1:80/")
    with pytest.raises(UsageError, match="the web has no passages for wiki_search"):
        async with opened(Task("Mine?"), tools=ToolSettings(corpus=str(recipe))):
            pass
    check = str(tmp_path / "other.toml")
    Path(check).write_text("second = 2.0\n")
    with pytest.raises(ConfigError, match=r"second is not a setting\. Did you mean 'seconds'"):
        check_any_corpus(check)
    with pytest.raises(ConfigError, match=r"second is not a setting\. Did you mean 'seconds'"):
        choose_environments((), TaskSet((WEB,)), tools=ToolSettings(corpus=check))


async def test_a_page_is_given_the_time_that_the_recipe_allows(tmp_path: Path) -> None:
    async def limit(name: str, *lines: str) -> float:
        recipe = tmp_path / f"{name}.toml"
        recipe.write_text("\n".join(lines))
        async with opened(WEB, tools=ToolSettings(corpus=str(recipe))) as held:
            return (await held.toolbox(WEB))["crawl_page"].timeout_s

    usual = await limit("usual")
    assert await limit("patient", "seconds = 120.0") == usual + 105
    summaries = ('summary_model = "m"', 'summary_url = "http://127.0.0.1:9"')
    assert await limit("summarised", *summaries) > usual + 3 * 45


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"observations": "rong"}, "observations 'rong' is not a choice. Did you mean 'wrong'?"),
        ({"mode": "record"}, "record and replay need the file of a cache"),
        ({"cache": "x"}, "a cache needs one of these modes"),
        ({"mode": "reply"}, "cache mode 'reply' is not a choice. Did you mean 'replay'?"),
    ],
)
def test_settings_that_contradict_themselves(settings: dict[str, str], message: str) -> None:
    with pytest.raises(CoaError) as caught:
        ToolSettings(**settings)  # type: ignore[arg-type]
    assert message in str(caught.value)


async def test_the_web_has_no_wrong_answers_to_give(tmp_path: Path) -> None:
    recipe = tmp_path / "w.toml"
    recipe.touch()
    with pytest.raises(ConfigError, match=r"needs a corpus, and .*w\.toml is the web"):
        async with opened(WEB, tools=ToolSettings("wrong", corpus=str(recipe))):
            pass


def test_mixed_sets_need_a_grammar_where_there_can_be_one_only(tmp_path: Path) -> None:
    web = make_tasks("atlas-web", "train", 2, 0)
    mixed = TaskSet((*web, Task("Mine?", ("Me",))))
    assert [env.value().name for env in at_home(web)[0]] == ["web"]
    assert [env.value().name for env in at_home(TaskSet(()))[0]] == ["mhqa"]
    assert sorted(env.value().name for env in at_home(mixed)[0]) == ["mhqa", "web"]
    with pytest.raises(ConfigError, match=r"several grammars: mhqa, web\. Choose one"):
        export([], "verl", tmp_path / "out", tasks=list(mixed))
