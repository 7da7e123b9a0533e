"""Which tools a task gets, and the controls, caches and corpora behind them."""

from __future__ import annotations

from pathlib import Path

import pytest

from coa import Task, ToolCall, load_grammar
from coa.corpus.site import load_corpus
from coa.errors import CoaError, ConfigError, UsageError
from coa.tasks import make_tasks
from coa.tasks.sets import grammar_for
from coa.tools.base import Toolbox
from coa.tools.code import NOTHING as PRINTED_NOTHING
from coa.tools.code import code_tool
from coa.tools.kits import (
    KitSettings,
    atlas_by_default,
    check_corpus,
    one_of_each,
    open_kit,
    toolbox_for,
)
from coa.tools.sandbox import Sandbox
from coa.tools.search import NOTHING

WEB = Task("What is the capital of Peru?", meta={"set": "atlas-web"})
GYM = Task("What is 6 * 7?", meta={"set": "gym-code"})
OWN = Task("Draw it.", meta={"tools": [{"name": "area", "parameters": {}}]})


async def say(toolbox: Toolbox, tool: str, argument: str) -> str:
    return (await toolbox.call(ToolCall(tool, argument))).text


async def test_a_task_gets_the_tools_of_its_set() -> None:
    async with open_kit([WEB, GYM]) as toolbox_of:
        assert list(toolbox_of(Task("Mine?"))) == ["wiki_search"]
        assert list(toolbox_of(WEB)) == ["web_search", "crawl_page"]
        assert await say(toolbox_of(GYM), "code", "```py\nprint(6 * 7)\n```") == "42"
        seen = await say(toolbox_of(WEB), "web_search", "capital of Peru")
        assert "https://atlas.example/country/peru" in seen
        seen = await say(toolbox_of(WEB), "crawl_page", "https://atlas.example/country/peru")
        assert "Lima" in seen
        # Limits and counts are those of the run, not of one task.
        assert toolbox_of(WEB).usage["crawl_page"].calls == 1


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
    async with open_kit([mine], grammar=chosen) as toolbox_of:
        assert sorted(toolbox_of(mine)) == sorted(tools)
        assert toolbox_of(mine).bind(chosen).tool_roles
    own = Task("Mine?", meta={"set": "math500", "grammar": grammar})
    async with open_kit(one_of_each([mine, own])) as toolbox_of:
        assert sorted(toolbox_of(own)) == sorted(tools)
        assert list(toolbox_of(mine)) == ["wiki_search"]


async def test_programs_of_a_rollout_share_their_variables_when_asked() -> None:
    async with open_kit([GYM], KitSettings(code_session=True)) as toolbox_of:
        async with toolbox_of(GYM).opened() as box:
            await say(box, "code", "x = 41")
            assert await say(box, "code", "x + 1") == "42"
        async with toolbox_of(GYM).opened() as box:
            assert "NameError" in await say(box, "code", "x + 1")


def test_the_key_of_a_recording_holds_what_decides_the_answer() -> None:
    def key(world: int, observations: str = "real", passages: int = 2) -> str:
        task = Task("?", meta={"world": world})
        return toolbox_for(observations, passages)(task)["wiki_search"].fingerprint

    assert len({key(0), key(7), key(0, passages=3), key(0, "wrong"), key(7, "wrong")}) == 5


def test_a_manifest_tells_kits_apart(tmp_path: Path) -> None:
    assert KitSettings().identity() == {}
    recipe = tmp_path / "web.toml"
    recipe.write_text("seconds = 2.0\n")
    first = KitSettings(corpus=str(recipe)).identity()
    recipe.write_text("seconds = 3.0\n")
    assert KitSettings(corpus=str(recipe)).identity() != first
    assert KitSettings(corpus="atlas:7").identity() == {
        "corpus": load_corpus("atlas:7").fingerprint
    }
    assert KitSettings(unsafe_code=True).identity() == {"unsafe_code": True}


async def test_controls_on_the_web() -> None:
    peru = "https://atlas.example/country/peru"
    async with open_kit([WEB], KitSettings("withheld")) as toolbox_of:
        assert await say(toolbox_of(WEB), "web_search", "capital of Peru") == NOTHING
        assert "there is no such page" in await say(toolbox_of(WEB), "crawl_page", peru)
    async with open_kit([WEB], KitSettings("wrong")) as toolbox_of:
        first = await say(toolbox_of(WEB), "web_search", "capital of Peru")
        assert "peru" not in first.lower() and "https://atlas.example/" in first
        assert first == await say(toolbox_of(WEB), "web_search", "capital of Peru")
        assert "Lima" not in await say(toolbox_of(WEB), "crawl_page", peru)
    async with open_kit([WEB], KitSettings("closed_book")) as toolbox_of:
        assert list(toolbox_of(WEB)) == list(toolbox_of(OWN)) == []


async def test_controls_of_programs_look_like_the_real_tool_and_run_nothing() -> None:
    real = code_tool(Sandbox())
    program, seen = "```py\nprint(6 * 7)\n```", {}
    for observations in ("withheld", "wrong"):
        async with open_kit([GYM], KitSettings(observations)) as toolbox_of:
            assert toolbox_of(GYM)["code"].role() == real.role()
            seen[observations] = await say(toolbox_of(GYM), "code", program)
            assert await say(toolbox_of(GYM), "code", program) == seen[observations]
    assert seen["withheld"] == PRINTED_NOTHING
    assert seen["wrong"].isdecimal() and seen["wrong"] != "42"


def test_what_is_opened_is_known_from_one_task_of_each_kind() -> None:
    assert one_of_each([Task("Mine?"), Task("Yours?"), OWN]) == [Task("Yours?"), OWN]
    made_for_code = Task("Mine?", meta={"grammar": "code"})
    assert one_of_each([Task("Mine?"), made_for_code]) == [Task("Mine?"), made_for_code]


def test_tasks_of_a_benchmark_that_nobody_gave_a_corpus_are_named() -> None:
    gaia, sums = (
        Task("?", id=name, meta={"set": name, "grammar": grammar})
        for name, grammar in (("gaia", "web"), ("aime24", "code"))
    )
    ours = [Task("?"), Task("?", id="w", meta={"set": "atlas-web"})]
    line = "gaia: without --corpus the tools of these tasks search the Atlas"
    assert atlas_by_default([gaia, sums, *ours], KitSettings()) == line
    assert not atlas_by_default([sums, *ours], KitSettings())
    assert not atlas_by_default([gaia], KitSettings(corpus="atlas:3"))
    assert not atlas_by_default([gaia], KitSettings(observations="closed_book"))
    assert not atlas_by_default([gaia], KitSettings(), load_grammar("code"))


@pytest.mark.parametrize("unsafe", [False, True])
async def test_a_run_is_repeated_without_its_tools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unsafe: bool
) -> None:
    file, calls = str(tmp_path / "tools.sqlite"), []
    for mode in ("record", "replay"):
        settings = KitSettings(cache=file, mode=mode, unsafe_code=unsafe)
        async with open_kit([WEB, GYM], settings) as toolbox_of:
            seen = [
                await say(toolbox_of(WEB), "web_search", "capital of Peru"),
                await say(toolbox_of(GYM), "code", "import time\nprint(time.time_ns())"),
            ]
        calls.append(seen)
    assert calls[0] == calls[1]
    async with open_kit([GYM], KitSettings(cache=file, mode="replay")) as toolbox_of:
        assert "no answer of code to this is recorded" in await say(toolbox_of(GYM), "code", "1")
    assert "coa: 1 answers of tools are not recorded in" in capsys.readouterr().err


def test_a_task_that_needs_a_sandbox_says_so_where_none_is_open() -> None:
    with pytest.raises(UsageError, match="needs the tool code; open its sandbox with `open_kit`"):
        toolbox_for()(GYM)


async def test_the_real_web_comes_from_a_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "web.toml"
    recipe.write_text("seconds = 2.0\n")
    async with open_kit([WEB], KitSettings(corpus=str(recipe))) as toolbox_of:
        toolbox = toolbox_of(WEB)
        assert "web search is not set up" in await say(toolbox, "web_search", "Peru")
        assert "only the public web" in await say(toolbox, "crawl_page", "http://127.0.0.1:80/")
        with pytest.raises(UsageError, match="the web has no passages for wiki_search"):
            toolbox_of(Task("Mine?"))
    check = str(tmp_path / "other.toml")
    Path(check).write_text("second = 2.0\n")
    with pytest.raises(ConfigError, match=r"second is not a setting\. Did you mean 'seconds'"):
        check_corpus(check)


async def test_a_page_is_given_the_time_that_the_recipe_allows(tmp_path: Path) -> None:
    async def limit(name: str, *lines: str) -> float:
        recipe = tmp_path / f"{name}.toml"
        recipe.write_text("\n".join(lines))
        async with open_kit([WEB], KitSettings(corpus=str(recipe))) as toolbox_of:
            return toolbox_of(WEB)["crawl_page"].timeout_s

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
        ({"observations": "wrong", "corpus": "w.toml"}, "needs a corpus, and w.toml is the web"),
        ({"mode": "reply"}, "cache mode 'reply' is not a choice. Did you mean 'replay'?"),
    ],
)
def test_settings_that_contradict_themselves(settings: dict[str, str], message: str) -> None:
    with pytest.raises(CoaError) as caught:
        KitSettings(**settings)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_mixed_sets_need_a_grammar() -> None:
    web = make_tasks("atlas-web", "train", 2, 0)
    assert grammar_for(web) == "web" and grammar_for([]) == "mhqa"
    with pytest.raises(ConfigError, match=r"several grammars: mhqa, web\. Choose one"):
        grammar_for([*web, Task("Mine?")])
