"""Tools that answer from a record, and the environment that `coa init --from` makes of one."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coa.cli import app
from coa.distillation.home import record_of, write_home
from coa.environment import load_environment, open_environments
from coa.errors import CoaError, ConfigError, RecordError, UsageError
from coa.grammar import load_grammar
from coa.io.runs import dumps
from coa.recording.episode import Episode, ToolUse
from coa.tasks import Task
from coa.tools.arguments import canonical, in_order, only_text
from coa.tools.base import Toolbox, ToolCall
from coa.tools.functions import tool
from coa.tools.recorded import RecordedCall, RecordedTool, ToolRecord
from coa.trajectory import load_trajectories
from made_teams import CONVERT, LOOKUP, SEARCH, smolagents, team

runner = CliRunner()
REAL = '''
def search_documents(query: str) -> str:
    """Search."""
    return f"{query.split()[0]} is a customer."


def lookup_invoice(customer: str, year: int) -> dict:
    """Look up."""
    names = ("Acme", "Borealis", "Cobalt", "Dunlin", "Ember", "Fjord")
    pairs = {(names[n % 6], 2020 + n % 5): 100 + 37 * n for n in reversed(range(30))}
    return {"euros": pairs[customer, year]}


def convert_currency(amount: float, to: str) -> str:
    """Convert."""
    return f"{amount * 1.25:g}"
'''


def answered(tool: RecordedTool, answers: dict[str, list[str]], *arguments: str) -> list[str]:
    """What one rollout is shown for these calls."""

    async def called() -> list[str]:
        async with Toolbox([tool.answering(answers)]).opened() as box:
            return [(await box.call(ToolCall(tool.name, each))).text for each in arguments]

    return asyncio.run(called())


# -- arguments ---------------------------------------------------------------------------------


def test_a_text_is_the_only_argument_that_must_be_given() -> None:
    assert only_text(json.loads(SEARCH.schema)) == "query"
    assert only_text(json.loads(LOOKUP.schema)) == ""
    optional = {"properties": {"query": {"type": "string"}}}
    assert only_text(optional) == "" == only_text({}) == only_text({"properties": {"n": True}})
    choice = {"properties": {"to": {"type": "string", "enum": ["EUR"]}}, "required": ["to"]}
    assert only_text(choice) == ""


def test_the_same_call_is_the_same_however_it_is_written() -> None:
    assert canonical('{"b": 1, "a": "x"}') == canonical(' {"a":"x","b":1}')
    assert canonical("red", "q") == canonical('{"q": " red "}', "q") == '{"q": "red"}'
    assert canonical("  red ") == "red" and canonical("[1]", "q") == '{"q": "[1]"}'
    schema = json.loads(LOOKUP.schema)
    assert in_order('{"customer": "A", "x": 0, "year": 1}', schema) == (
        '{"year": 1, "customer": "A", "x": 0}'
    )
    assert in_order("no object", schema) == "no object"
    assert in_order('{"b": 1, "a": 2}', {}) == '{"b": 1, "a": 2}'


# -- answers -----------------------------------------------------------------------------------

SPEC = RecordedTool("lookup_invoice", schema=LOOKUP.schema, body="json")
KEY = canonical('{"customer": "Acme", "year": 2020}')


def test_a_call_is_answered_as_it_was_then_and_again_with_the_next_answer() -> None:
    said = answered(
        SPEC,
        {KEY: ["1", "2"]},
        '{"year": 2020, "customer": "Acme"}',
        KEY,
        KEY,
        '{"year": "2020","customer": "Acme"}',
    )
    assert said == ["1", "2", "2", "2"]
    assert answered(SPEC, {KEY: ["1", "2"]}, KEY) == ["1"], "another rollout begins again"


def test_a_call_that_was_never_made_has_no_answer_and_a_wrong_one_has_its_own() -> None:
    wrong = canonical('{"year": 2020}')
    said = answered(SPEC, {wrong: ["customer, please"]}, wrong, '{"year": 2021}', KEY)
    assert said[0] == "customer, please"
    assert said[1].startswith("Error: customer is missing. Expected")
    assert said[2] == f"Error: lookup_invoice: the record has no answer to {KEY}"


def test_only_the_missing_answer_is_the_worlds_fault() -> None:
    async def failures() -> list[str | None]:
        async with Toolbox([SPEC.answering({})]).opened() as box:
            calls = [ToolCall(SPEC.name, each) for each in ('{"year": 1}', KEY)]
            return [(await box.call(call)).failure for call in calls]

    assert asyncio.run(failures()) == ["mistake", "failed"]


def test_a_record_answers_for_the_task_first_and_else_for_any(tmp_path: Path) -> None:
    calls = [RecordedCall("t", "{}", "one", "a"), RecordedCall("t", "{}", "two", "b")]
    record = ToolRecord((RecordedTool("t"),), tuple(calls))
    assert record.answers("t", "b") == {"{}": ["two"]}
    assert record.answers("t", "a") == record.answers("t", "new") == {"{}": ["one"]}
    path = tmp_path / "recorded.jsonl"
    path.write_text("".join(dumps(line) + "\n" for line in record.to_lines()))
    assert ToolRecord.load(path) == record


@pytest.mark.parametrize(
    "line", ['{"oops": 1}', '{"offered": 3}', '{"offered": {"name": "a", "schema": "{"}}']
)
def test_a_file_that_is_no_record_is_named_with_its_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(RecordError, match=r"recorded.jsonl: line 1: found no tool"):
        ToolRecord.load(path)
    with pytest.raises(ConfigError, match="no such record of tools"):
        ToolRecord.load(tmp_path / "none.jsonl")


# -- coa init --from ---------------------------------------------------------------------------


def coa(*given: Any) -> str:
    done = runner.invoke(app, [str(each) for each in given])
    assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
    return done.output


def refused(*given: Any) -> str:
    error = runner.invoke(app, [str(each) for each in given]).exception
    assert isinstance(error, CoaError), error
    return str(error)


@pytest.fixture
def office(tmp_path: Path) -> Path:
    """The home of thirty episodes, of which every third was judged and every sixth is wrong."""
    episodes = team("smolagents", 30)
    for number, episode in enumerate(episodes):
        if number % 3 == 0:
            episode.meta["success"] = float(number % 6 == 0)
    save(tmp_path / "episodes.jsonl", episodes)
    coa("init", tmp_path / "office", "--from", tmp_path / "episodes.jsonl")
    return tmp_path / "office"


def save(path: Path, episodes: list[Episode]) -> Path:
    path.write_text("".join(dumps(each.to_json()) + "\n" for each in episodes))
    return path


def test_init_writes_an_environment_that_works(office: Path) -> None:
    assert {path.name: path.stat().st_mode & 0o777 for path in office.iterdir()} == dict.fromkeys(
        ("environment.toml", "grammar.toml", "recorded.jsonl", "tasks.jsonl"), 0o600
    )
    text = coa("check", office)
    assert "office: search_documents, lookup_invoice, convert_currency answer from" in text
    assert "tool         lookup_invoice: Look up what a customer was billed in a year" in text
    env = load_environment(office)
    tasks = [*env.load_tasks("train"), *env.load_tasks("test")]
    assert len(tasks) == 25 and sum(task.meta["verified"] for task in tasks) == 5
    assert all(task.answers for task in tasks)
    assert load_grammar(str(office / "grammar.toml")) == env.value()


def test_the_way_from_episodes_to_a_measured_student(office: Path, tmp_path: Path) -> None:
    episodes = tmp_path / "episodes.jsonl"
    said = coa("distill", "--episodes", episodes, "--env", office, "--out", tmp_path / "d")
    train = load_environment(office).load_tasks("train")
    assert f"{len(train)} trajectories of 30 episodes" in said
    chains = load_trajectories(tmp_path / "d")
    assert {tuple(chain.tools) for chain in chains} == {(SEARCH.name, LOOKUP.name, CONVERT.name)}
    assert len({chain.segments[0].text for chain in chains}) == 1, "one prompt for one team"
    every = record_chains(tmp_path, office, episodes)
    lines = ({"question": q, "turns": turns} for q, turns in every.items())
    script = tmp_path / "script.jsonl"
    script.write_text("".join(json.dumps(line) + "\n" for line in lines))
    name_real_tools(office)
    coa("eval", "--env", office, "--model", f"scripted:{script}", "--out", tmp_path / "e")
    assert json.loads((tmp_path / "e" / "summary.json").read_text())["accuracy"] == 1.0


def record_chains(folder: Path, office: Path, episodes: Path) -> dict[str, list[str]]:
    """Question -> turns, of all episodes, held out or not."""
    grammar = office / "grammar.toml"
    given = (
        "--episodes",
        episodes,
        "--grammar",
        grammar,
        "--out",
        folder / "all",
        "tools=recorded",
    )
    coa("distill", *given)
    chains = load_trajectories(folder / "all")
    return {chain.question: [step.model.text for step in chain.steps] for chain in chains}


def name_real_tools(office: Path, tools: str = REAL) -> None:
    (office / "tools.py").write_text(tools)
    path = office / "environment.toml"
    lines = path.read_text().splitlines()
    named = next(line for line in lines if line.startswith("# tools = ["))
    lines[lines.index('tools = "recorded"')] = named.removeprefix("# ")
    path.write_text("\n".join(lines))


def test_real_tools_are_bound_by_name(office: Path) -> None:
    name_real_tools(office)
    text = coa("check", office)
    assert "note " not in text and '{"customer": string, "year": integer}' in text


def test_a_real_tool_that_takes_other_arguments_is_one_line(office: Path) -> None:
    name_real_tools(office, REAL.replace("to: str", "to: str, day: str = ''"))
    (line,) = [line for line in coa("check", office).splitlines() if line.startswith("note")]
    now = '{"amount": number, "to": string, "day": string (optional)}'
    then = '{"amount": number, "to": string}'
    assert line == f"note         office: convert_currency takes {now}, the team's took {then}"


def test_arguments_that_are_only_written_in_another_way_are_the_same() -> None:
    def real(parts: list[Any], day: str | None = None) -> str:
        """Does it."""
        return ""

    def other(parts: list[int], day: str | None = None) -> str:
        """Does it."""
        return ""

    parts = {"parts": {"type": "array"}, "day": {"type": "string", "nullable": True}}
    schema = json.dumps({"type": "object", "properties": parts, "required": ["parts"]})
    record = ToolRecord((RecordedTool("real", schema=schema),), ())
    assert record.differences([tool(real)]) == []
    assert len(record.differences([tool(other, name="real")])) == 1


def test_a_tool_that_no_function_can_be_called_has_one_that_says_its_name(tmp_path: Path) -> None:
    episode = smolagents(0)
    names = {SEARCH.name: "web-search", LOOKUP.name: "class"}
    episode.tools = [replace(each, name=names.get(each.name, each.name)) for each in episode.tools]
    episode.events = [
        replace(each, tool=names.get(each.tool, each.tool)) if isinstance(each, ToolUse) else each
        for each in episode.events
    ]
    write_home(tmp_path / "home", [episode])
    text = (tmp_path / "home" / "environment.toml").read_text()
    named = ("web_search", "call_class", CONVERT.name)
    listed = ", ".join(f'"tools:{each}"' for each in named)
    assert f"\n# tools = [{listed}]\n" in text
    assert '\n# The tool of web_search says its name: @coa.tool(name="web-search")\n' in text
    assert "The tool of convert_currency" not in text


def test_some_tools_may_be_real_and_the_others_recorded(office: Path) -> None:
    name_real_tools(office)
    path = office / "environment.toml"
    text = path.read_text().replace('"tools:convert_currency"]', '"recorded"]', 2)
    path.write_text(text)
    env = load_environment(office)

    async def offered() -> list[tuple[str, bool]]:
        async with open_environments([env]) as opened:
            box = await opened.toolbox(Task("?"))
            return [(tool.name, tool.checked) for tool in box.values()]

    assert asyncio.run(offered()) == [
        *((SEARCH.name, True), (LOOKUP.name, True), (CONVERT.name, False))
    ]


def test_a_tool_of_the_grammar_that_nobody_named_is_refused(office: Path) -> None:
    name_real_tools(office)
    path = office / "environment.toml"
    path.write_text(path.read_text().replace(', "tools:convert_currency"]', "]"))
    assert "names the tool 'convert_currency', which the environment does not" in refused(
        "check", office
    )


def test_recorded_tools_need_a_record(office: Path) -> None:
    path = office / "environment.toml"
    path.write_text(path.read_text().replace('recorded = "recorded.jsonl"', ""))
    assert "tools has 'recorded', and no record is named" in refused("check", office)


def test_controls_work_with_recorded_tools(office: Path) -> None:
    from coa.environment import ToolSettings

    env = load_environment(office)

    async def seen(observations: str) -> str:
        settings = ToolSettings(observations=observations)
        async with (
            open_environments([env], tools=settings) as opened,
            opened.session(Task("What did Acme pay?", id="s0")) as session,
        ):
            call = ToolCall(LOOKUP.name, '{"customer": "Acme", "year": 2020}')
            return (await session.tools.call(call)).text

    assert asyncio.run(seen("real")) == '{"euros": 100}'
    assert "euros" not in asyncio.run(seen("withheld"))
    with pytest.raises(ConfigError, match="has no wrong answers to give"):
        asyncio.run(seen("wrong"))


def test_questions_without_a_sound_answer_are_left_out_and_counted(tmp_path: Path) -> None:
    good, wrong, none = smolagents(0), smolagents(1), smolagents(2)
    wrong.meta["success"], none.answer = 0.0, None
    home = write_home(tmp_path / "few", [good, wrong, none, replace(wrong, meta={"success": 1.0})])
    assert [(task.id, task.meta["verified"]) for task in home.tasks] == [
        ("s0", False),
        ("s1", True),
    ]
    assert home.left_out == 1 and "1 questions have no answer" in "\n".join(home.lines())
    assert '\ntasks = "tasks.jsonl"\n' in (tmp_path / "few" / "environment.toml").read_text()
    write_home(tmp_path / "one", [good])  # which the hash leaves for the test
    one = (tmp_path / "one" / "environment.toml").read_text()
    assert '\ntasks = {train = "tasks.jsonl", test = "tasks.jsonl"}\n' in one
    coa("check", tmp_path / "few")
    with pytest.raises(UsageError, match="is not empty"):
        write_home(tmp_path / "few", [good])


@pytest.mark.parametrize("success", [None, "unverified", "yes", 7, True, 1.0])
def test_only_what_was_judged_right_is_verified(success: Any, tmp_path: Path) -> None:
    other = smolagents(0)
    other.meta["success"] = success
    (task,) = write_home(tmp_path / "office", [other]).tasks
    assert task.meta["verified"] == (success == 1)


def test_that_a_tool_was_down_is_no_answer_of_it() -> None:
    episodes = [smolagents(1), smolagents(1), smolagents(1)]
    for episode, failure in zip(episodes, ("failed", "timeout", None), strict=True):
        place = next(i for i, e in enumerate(episode.events) if isinstance(e, ToolUse))
        use = episode.events[place]
        result = "no connection" if failure else "137"
        episode.events[place] = replace(use, result=result, failure=failure)
    answers = record_of(episodes).answers(LOOKUP.name, "s1")
    assert [*answers.values()] == [["137"]]


def test_a_team_without_tools_has_a_home(tmp_path: Path) -> None:
    episode = smolagents(1)
    episode.tools = []
    episode.events = [each for each in episode.events if not isinstance(each, ToolUse)]
    home = write_home(tmp_path / "talkers", [episode])
    assert home.tools == () and not any("answer from" in line for line in home.lines())
    coa("check", tmp_path / "talkers")


def test_a_record_holds_the_tools_that_were_called_and_those_that_were_not() -> None:
    episode = smolagents(1)
    episode.events.insert(1, ToolUse("manager", "unknown", "x", "y"))
    record = record_of([episode])
    assert [tool.name for tool in record.tools] == [
        *(SEARCH.name, LOOKUP.name, CONVERT.name, "unknown")
    ]
    assert record.answers("unknown", episode.task_id) == {"x": ["y"]}
    assert [tool.body for tool in record.tools] == ["text", "json", "json", "text"]


# -- the command -------------------------------------------------------------------------------


def test_grammar_derive_writes_a_new_file_or_prints_it(tmp_path: Path) -> None:
    episodes = save(tmp_path / "e.jsonl", team("reviewed"))
    out = tmp_path / "clerks.toml"
    coa("grammar", "derive", episodes, "--out", out)
    assert load_grammar(str(out)).by_name["clerk"].agent == "clerk"
    assert "12 of 12 episodes become chains" in coa("grammar", "derive", episodes)
    report = runner.invoke(app, ["grammar", "derive", str(episodes), "--json"]).stdout
    assert json.loads(report)["converted"] == 12
    assert "exists, and may have been edited" in refused(
        "grammar", "derive", episodes, "--out", out
    )
    assert "expected a name that ends in .toml" in refused(
        "grammar", "derive", episodes, "--out", tmp_path / "x"
    )


def test_a_model_without_episodes_names_nobody(tmp_path: Path) -> None:
    assert "--model names the agents of a team" in refused(
        "init", tmp_path / "x", "--model", "openai:a@http://127.0.0.1:1"
    )
