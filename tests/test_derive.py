"""A grammar derived from a team at work, and what becomes of its episodes under it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_server import ChatServer
from coa.distillation.convert import NotConvertible, convert
from coa.distillation.dataset import DistillSettings, recorded_tools
from coa.distillation.derive import derive_grammar, sound_episodes, words_of_model
from coa.distillation.flow import HANDED_OVER, SoFar, job_of, read_flow, words_of
from coa.engines.scripted import ScriptedEngine
from coa.environment import load_environment
from coa.environments import make_tasks
from coa.errors import CoaError, UsageError
from coa.grammar import Block, Grammar, check, grammar_from_toml, load_grammar, parse, turn_grammar
from coa.grammar.load import PRESETS, block_names, grammar_to_toml
from coa.io.runs import dumps
from coa.loop import run
from coa.recording.episode import SYSTEM, USER, Episode, Message, ToolSpec, ToolUse
from coa.tasks import Task
from coa.trajectory import Author, Trajectory
from made_teams import CONVERT, LOOKUP, SEARCH, SHAPES, Script, autogen, smolagents, team
from scripts import distil, episodes_of
from test_distill import ROOMY

KINDS = {
    "smolagents": {("researcher", "delegation"), ("accountant", "delegation")},
    "langgraph": {("billing_expert", "delegation"), ("Math-Expert", "delegation")},
    "handoff": {("Billing", "delegation"), ("Exchange", "delegation")},
    "crewai": {("Converter", "delegation"), ("Writer", "delegation")},
    "pydantic_ai": {("finance", "delegation")},
    "autogen": {("reader", "reflection")},
    "planned": {("strategist", "plan"), ("inspector", "reflection")},
    "reviewed": {("clerk", "delegation"), ("second_pair_of_eyes", "reflection")},
    "own_plan": {("agent", "plan")},
}
"""What the agents of each team are; whoever answers the user has no block but the answer."""


def bound(grammar: Grammar, episode: Episode) -> Grammar:
    return recorded_tools(episode, grammar, episode.tools).bind(grammar)


def chain_of(episode: Episode, grammar: Grammar) -> Trajectory:
    return convert(episode, bound(grammar, episode))


def blocks_of(chain: Trajectory, grammar: Grammar) -> list[Block]:
    texts = (s.text for s in chain.segments if s.author is Author.MODEL)
    return [block for text in texts for block in parse(grammar, text).blocks]


def replayed(chain: Trajectory, episode: Episode, grammar: Grammar) -> Trajectory:
    """What the student's own loop makes of the same turns, with tools that answer as they did."""
    engine = ScriptedEngine([step.model.text for step in chain.steps])
    box = recorded_tools(episode, grammar, episode.tools)
    task = Task(episode.question, id=episode.task_id)
    return asyncio.run(run(task, engine, grammar, box, budget=ROOMY))


def agents_of(grammar: Grammar) -> set[tuple[str, str]]:
    return {(role.agent, role.kind) for role in grammar.roles if role.agent}


# -- what agents are ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_agents_are_what_they_do(shape: str) -> None:
    assert agents_of(derive_grammar(team(shape)).grammar) == KINDS[shape]


@pytest.mark.parametrize("shape", SHAPES)
def test_names_and_prompts_decide_nothing_where_the_flow_does(shape: str) -> None:
    episodes, names = team(shape), dict[str, str]()

    def other(name: str) -> str:
        return name if name in (USER, SYSTEM) else names.setdefault(name, f"n{len(names)}")

    for episode in episodes:
        episode.agents = [replace(a, name=other(a.name), system="") for a in episode.agents]
        episode.events = [
            replace(e, agent=other(e.agent), to=other(e.to))
            if isinstance(e, Message)
            else replace(e, agent=other(e.agent))
            for e in episode.events
        ]
    found = {(agent, kind) for agent, kind in agents_of(derive_grammar(episodes).grammar)}
    assert found == {(names[agent], kind) for agent, kind in KINDS[shape]}


def test_a_critic_that_was_always_content_is_told_by_its_name_or_its_prompt() -> None:
    for part, system, kind in (
        ("", "You read drafts.", "delegation"),
        ("reviewer", "You read drafts.", "reflection"),
        ("", "You read drafts. Say APPROVED when nothing is wrong with one.", "reflection"),
    ):
        content = [autogen(number) for number in range(0, 12, 2)]
        for episode in content:
            lead, reader = episode.agents
            episode.agents = [lead, replace(reader, part=part, system=system)]
        assert agents_of(derive_grammar(content).grammar) == {("reader", kind)}


def test_what_a_critic_says_to_the_next_agent_is_a_criticism_and_no_job() -> None:
    episodes = []
    for number in range(4):
        prompts = {"clerk": "You look up bills.", "reviewer": "", "editor": "You write."}
        euros = str(100 + number)
        script = Script(f"v{number}", f"What did customer {number} pay?", "own", prompts, LOOKUP)
        script.call("clerk", LOOKUP.name, euros, customer=str(number))
        script.say("clerk", "reviewer", f"It is {euros} euros.")
        script.say("reviewer", "editor", "APPROVED")
        episodes.append(script.answer("editor", euros, euros))
    grammar = derive_grammar(episodes).grammar
    assert agents_of(grammar) == {("reviewer", "reflection")}
    text = chain_of(episodes[0], grammar).text
    assert "<reviewer> APPROVED</reviewer>\n<answer> 100</answer>" in text, text


def test_a_tool_that_only_reaches_an_agent_is_no_tool_where_the_agent_was_not_asked() -> None:
    ask, refund = ToolSpec("ask_clerk", "Ask the clerk."), ToolSpec("refund_clerk", "Refunds.")
    episodes = []
    for number in range(4):
        prompts = {"lead": "You lead.", **({"Clerk": "You look up bills."} if number % 2 else {})}
        had = [LOOKUP, refund] if number % 2 else [ask, refund]
        script = Script(f"k{number}", f"What did customer {number} pay?", "own", prompts, *had)
        if number % 2:
            script.say("lead", "Clerk", "Look it up, please.")
            script.call("Clerk", LOOKUP.name, "7", customer=str(number))
            script.say("Clerk", "lead", "It is 7 euros.")
        episodes.append(script.answer("lead", "7 euros", "7 euros"))
    grammar = derive_grammar(episodes).grammar
    assert [*grammar.tool_roles] == [refund.name, LOOKUP.name]
    assert agents_of(grammar) == {("Clerk", "delegation")}


@pytest.mark.parametrize(
    ("prompt", "about"),
    [
        (
            "Tools:\n- look(q): looks it up\n\n# Rules\nUse them.\nYou are a clerk for bills.",
            "a clerk for bills",
        ),
        ("Returns a value of type: string\nYou find the bills of customers.", ""),
        ("Tool Name: look up\nYour goal is: find the bills.", "Your goal is: find the bills"),
        ("Never guess what a customer paid.", "Never guess what a customer paid"),
        (
            "\u4f60\u662f\u7814\u7a76\u5458\u3002\u4f60\u67e5\u627e\u53d1\u7968\u3002",
            "\u4f60\u662f\u7814\u7a76\u5458\u3002",
        ),
        ("- lookup_invoice: looks a bill up", "it has lookup_invoice"),
        (f'def lookup_invoice(q):\n    """{LOOKUP.about}\n    """', "it has lookup_invoice"),
    ],
)
def test_an_agent_is_described_by_what_its_prompt_says_to_it(prompt: str, about: str) -> None:
    episodes = team("reviewed")
    for episode in episodes:
        episode.agents = [
            replace(each, system=prompt) if each.name == "clerk" else each
            for each in episode.agents
        ]
    told = derive_grammar(episodes).grammar.by_name["clerk"].about
    assert told.endswith(f": {about or 'You find the bills of customers'}")


def test_chains_of_a_team_without_tools_are_kept(tmp_path: Path) -> None:
    episodes = []
    for number in range(4):
        prompts = {"planner": "You plan texts.", "writer": "You write texts."}
        script = Script(f"w{number}", f"Write about {number}.", "own", prompts)
        script.say("planner", "writer", f"First the past of {number}, then its future.")
        episodes.append(script.answer("writer", f"All of {number}.", f"All of {number}."))
    grammar = derive_grammar(episodes).grammar
    assert grammar.preamble.startswith("You solve a task. ") and not grammar.tool_roles
    recipe = DistillSettings(grammar=str(saved(tmp_path, grammar)), tools="recorded")
    made = distil(tmp_path / "d", episodes, recipe=recipe)
    assert len(made.kept) == 4 and made.funnel["rejected"] == {}


def test_names_without_a_letter_of_a_blocks_name_are_numbered() -> None:
    named = block_names(["\u691c\u7d22", "\u00dcber", "\u641c\u7d22", "Math.Hypot"], {"think"})
    assert [*named.values()] == ["call_1", "uber", "call_3", "math_hypot"]


def test_a_part_that_was_written_by_hand_holds() -> None:
    episodes = team("smolagents")
    for episode in episodes:
        place = next(i for i, e in enumerate(episode.events) if isinstance(e, Message))
        episode.events[place] = replace(episode.events[place], facts={"part": "plan"})
    grammar = derive_grammar(episodes).grammar
    plan = grammar.by_name["plan"]
    assert plan.kind == "plan" and not plan.agent and grammar.start == ("plan",)
    text = chain_of(episodes[1], grammar).text
    assert text.startswith("<plan> Find what Borealis was billed in 2021.</plan>")


def test_a_team_whose_parts_were_all_written_by_hand() -> None:
    episodes = episodes_of(make_tasks("atlas-mhqa", "train", 40, seed=3))
    derived = derive_grammar(episodes)
    kinds = {role.kind for role in derived.grammar.roles}
    assert {"think", "plan", "tool", "answer"} <= kinds and derived.converted == derived.read
    for episode in episodes:
        if episode.answer is not None:
            assert check(derived.grammar, parse_of(episode, derived.grammar)) is None


def parse_of(episode: Episode, grammar: Grammar) -> Any:
    return parse(grammar, convert(episode, grammar).text, env=True)


def test_only_work_that_nobody_found_wrong_is_evidence() -> None:
    good, bad = team("smolagents", 4), [replace(smolagents(9), meta={"success": 0.0})]
    bad[0].events.insert(0, ToolUse("manager", "panic", "{}", "?"))
    derived = derive_grammar([*good, *bad])
    assert derived.read == 4 and "panic" not in derived.grammar.by_name
    with pytest.raises(UsageError, match="none of 1 episodes has an answer that nobody found"):
        derive_grammar(bad)


# -- the chains --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_every_chain_is_legal_and_the_students_loop_replays_it(shape: str) -> None:
    episodes = team(shape)
    derived = derive_grammar(episodes, shape)
    grammar = grammar_from_toml(derived.toml(), shape)
    assert grammar == derived.grammar and grammar.fingerprint() == derived.grammar.fingerprint()
    assert derived.converted == len(episodes) and not derived.reasons
    for episode in episodes:
        chain = chain_of(episode, grammar)
        assert check(grammar, parse(grammar, chain.text, env=True)) is None
        own = blocks_of(chain, grammar)
        written = [s.text for s in chain.segments if s.author is Author.MODEL]
        assert grammar.render(own) == "\n".join(written)
        assert own[-1].body.strip() == episode.answer == chain.answer
        again = replayed(chain, episode, grammar)
        assert (again.text, again.answer) == (chain.text, chain.answer)


def test_jobs_are_blocks_and_reports_that_repeat_a_result_are_not() -> None:
    episodes = team("smolagents")
    text = chain_of(episodes[3], derive_grammar(episodes).grammar).text
    assert text.splitlines() == [
        "<researcher> Find what Dunlin was billed in 2023.</researcher>",
        "<search_documents> Dunlin 2023</search_documents>",
        "<observation>Dunlin is a customer.</observation>",
        '<lookup_invoice> {"year": 2023, "customer": "Dunlin"}</lookup_invoice>',
        '<observation>{"euros": 211}</observation>',
        "<accountant> Convert 211 euros to USD.</accountant>",
        "<think> I convert.</think>",
        '<convert_currency> {"amount": 211, "to": "USD"}</convert_currency>',
        "<observation>263.75</observation>",
        "<answer> 263.75</answer>",
    ]


def test_a_chain_has_a_fifth_of_the_characters_that_the_team_was_given() -> None:
    episodes = team("smolagents")
    grammar = derive_grammar(episodes).grammar
    for episode in episodes:
        given = sum(len(m.text) for at in episode.calls for m in episode.messages_of(at))
        assert len(chain_of(episode, grammar).text) < 0.4 * given  # prompts of a line each


def test_a_report_that_adds_something_is_thought() -> None:
    heard = SoFar()
    heard.add('{"euros": 211, "customer": "Acme"}')
    assert heard.news("### Outcome (short version):\nAcme owes 211 euros.") == ""
    assert heard.news("Acme owes 211 euros. It is overdue since May.") == "It is overdue since May."
    assert heard.news("That makes 263.75.") == "That makes 263.75."
    assert heard.news("So it is 263.75.", known="263.75") == ""
    assert heard.news("") == ""


def test_branches_stand_one_after_the_other_each_with_its_job() -> None:
    episodes = team("pydantic_ai")
    text = chain_of(episodes[0], derive_grammar(episodes).grammar).text
    order = ["<think> Both at once.", "euros to USD</f", '"to": "USD"', "euros to NOK</f", 'NOK"}']
    places = [text.index(each) for each in order]
    assert places == sorted(places)


def test_a_handoff_without_words_says_go_on() -> None:
    assert job_of("", "Billing") == HANDED_OVER == job_of("transfer_to_billing", "Billing")
    assert job_of("Bill Acme", "Billing") == "Bill Acme"
    crew = {"context": "The year 2014.", "coworker": "Finder", "task": "Find Acme.", "n": {}}
    assert job_of(json.dumps(crew), "Finder") == "Find Acme.\nThe year 2014."
    chain = chain_of(team("langgraph")[0], derive_grammar(team("langgraph")).grammar)
    assert f"<math_expert> {HANDED_OVER}</math_expert>" in chain.text


def edited(number: int, handed: str = "") -> Episode:
    """A clerk that looks something up, and an editor that is handed its report."""
    customer, euros = f"Customer {number}", str(100 + number)
    prompts = {"clerk": "You look up bills.", "editor": "You write the answer."}
    script = Script(f"e{number}", f"What did {customer} pay?", "own", prompts, LOOKUP)
    script.call("clerk", LOOKUP.name, euros, customer=customer)
    script.say("clerk", "editor", handed or f"{customer}: {euros}.")
    return script.answer("editor", euros, euros)


@pytest.mark.parametrize("handed", ["", "transfer_to_editor"])
def test_a_job_that_is_never_in_words_of_an_agent_without_tools_has_no_block(handed: str) -> None:
    episodes = [edited(n, handed) for n in range(4)]
    derived = derive_grammar(episodes)
    assert agents_of(derived.grammar) == set() and derived.wordless == ["editor"]
    told = "editor has no block: it was always handed the work without a word, and used no tool"
    assert told in list(derived.lines()) and f"# {told}\n" in derived.toml()
    text = chain_of(episodes[0], derived.grammar).text
    assert HANDED_OVER not in text and "transfer" not in text
    assert [b.role for b in blocks_of(chain_of(episodes[0], derived.grammar), derived.grammar)] == [
        LOOKUP.name,
        "answer",
    ]


def test_a_job_that_is_in_words_once_has_a_block() -> None:
    episodes = [*(edited(n) for n in range(3)), edited(3, "Write it with the currency, please.")]
    derived = derive_grammar(episodes)
    assert agents_of(derived.grammar) == {("editor", "delegation")} and not derived.wordless


def test_the_prompt_names_all_agents_of_a_team() -> None:
    preamble = derive_grammar([edited(n) for n in range(4)]).grammar.preamble
    assert preamble.endswith("share one memory: clerk and editor.")
    assert derive_grammar(team("own_plan")).grammar.preamble.endswith("share one memory.")


def test_a_critics_word_is_a_block_whether_it_objects_or_agrees() -> None:
    episodes = team("autogen")
    grammar = derive_grammar(episodes).grammar
    said = [b.body.strip() for b in blocks_of(chain_of(episodes[1], grammar), grammar)]
    assert said[-3:] == [
        "The currency is missing, and so is your confidence.",
        "APPROVED",
        episodes[1].answer,
    ]


def test_what_cannot_become_a_chain_has_its_reason() -> None:
    episodes = team("smolagents")
    odd = smolagents(0)
    odd.events[0] = replace(odd.events[0], text="Write </answer> and stop.")
    derived = derive_grammar([*episodes, odd])
    assert derived.reasons == {"a block would hold a tag of the grammar": 1}
    assert list(derived.lines())[1:] == [
        "12 of 13 episodes become chains under it",
        "  1: a block would hold a tag of the grammar",
    ]
    with pytest.raises(NotConvertible, match=r"event 1 .manager.: <researcher> holds </answer>"):
        convert(odd, derived.grammar)


def test_a_tool_that_the_team_had_and_never_used_is_offered_and_may_be_called(
    tmp_path: Path,
) -> None:
    grammar = derive_grammar(team("crewai")).grammar
    assert "search_documents" in grammar.by_name["lookup_invoice"].next
    assert grammar.by_name["search_documents"].next == ("converter", "writer", "answer")
    recipe = DistillSettings(grammar=str(saved(tmp_path, grammar)), tools="recorded")
    for chain in distil(tmp_path / "d", team("smolagents"), recipe=recipe).kept:
        assert set(chain.tools) == {SEARCH.name, LOOKUP.name, CONVERT.name}


def test_what_the_recording_judged_wrong_is_dropped_without_a_task_file(tmp_path: Path) -> None:
    episodes = team("smolagents", 4)
    episodes[2].meta["success"] = 0.0
    recipe = DistillSettings(
        grammar=str(saved(tmp_path, derive_grammar(episodes, "office").grammar)), tools="recorded"
    )
    made = distil(tmp_path / "d", episodes, recipe=recipe)
    assert [chain.task_id for chain in made.kept] == ["s0", "s1", "s3"]
    assert [(note["task_id"], note["reason"]) for note in made.rejected] == [("s2", "wrong answer")]


def saved(folder: Path, grammar: Grammar) -> Path:
    path = folder / f"{grammar.name}.toml"
    path.write_text(grammar_to_toml(grammar))
    return path


def test_a_job_that_the_program_gives_is_in_no_chain() -> None:
    script = Script("t", "Who?", "crew", {"a": "You are a.", "b": "You are b."}, SEARCH)
    script.say(SYSTEM, "a", "Do the first of two things that the program wants.")
    script.call("a", SEARCH.name, "Ada", query="who")
    script.say("a", SYSTEM, "Ada it is.").say(SYSTEM, "b", "Do the second thing.")
    episode = script.answer("b", "Ada", "Ada")
    assert [d.doing for d in read_flow(episode) if d] == ["acts", "remarks", "answers"]
    assert "thing" not in chain_of(episode, derive_grammar([episode]).grammar).text


# -- the file ----------------------------------------------------------------------------------


def test_the_file_says_on_what_evidence_and_in_whose_words() -> None:
    lines = derive_grammar(team("smolagents"), "office").toml().splitlines()
    assert lines[0] == "# Derived from 12 episodes of smolagents."
    assert "# 'researcher' was handed work 12 times, by manager; in 12 of 12 chains" in lines
    assert 'next = ["lookup_invoice", "search_documents"]  # seen 8, 4 times' in lines
    told = "Hand the work to researcher: a researcher who finds invoices and documents"
    assert f'about = "{told}"' in lines
    said = "Look up what a customer was billed in a year; the content is a JSON object"
    shape = '{\\"year\\": integer, \\"customer\\": string}'
    assert f'about = "{said} {shape}"' in lines
    assert 'about = "Search the company\'s documents; the content is the query"' in lines


def test_names_of_several_lines_do_not_break_the_file() -> None:
    episodes = team("smolagents")
    for episode in episodes:
        episode.teacher = "my\nteam\x00"
        episode.agents = [replace(a, name=a.name.replace("man", "man\n")) for a in episode.agents]
        episode.events = [
            replace(e, **{k: getattr(e, k).replace("man", "man\n") for k in ("agent", "to")})
            if isinstance(e, Message)
            else e
            for e in episode.events
        ]
    derived = derive_grammar(episodes)
    assert grammar_from_toml(derived.toml()) == derived.grammar
    assert derived.toml().startswith("# Derived from 12 episodes of my team .\n")


def test_the_words_of_a_long_episode_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()

    def reads(text: str) -> set[str]:
        read.append(text)
        return words_of(text)

    monkeypatch.setattr("coa.distillation.evidence.words_of", reads)
    script = Script("t", "Who?", "long", {"lead": "", "clerk": ""}, LOOKUP)
    for number in range(50):
        script.say("lead", "clerk", f"Find bill {number}.")
        script.call("clerk", LOOKUP.name, f"Bill {number}", customer="Acme", year=number)
        script.say("clerk", "lead", f"It is {number}.")
    derive_grammar([script.answer("lead", "Ada", "Ada")])
    assert read.count("Bill 0") == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_no_question_and_no_answer_is_in_it(shape: str) -> None:
    episodes = team(shape, 6)
    for number, episode in enumerate(episodes):
        secret = f"You help with this: {episode.question} Say {episode.answer}."
        episode.agents = [replace(a, system=f"{secret} {a.system}") for a in episode.agents]
        name = episode.tools[0].name
        about = f"Answers {episode.question}"
        episode.tools[0] = replace(episode.tools[0], about=about if number else about.upper())
        assert name == episode.tools[0].name
    text = derive_grammar(episodes).toml().casefold()
    for episode in episodes:
        assert episode.question.casefold() not in text
        assert f" {episode.answer}." not in text


def test_agents_and_tools_get_names_that_blocks_can_have() -> None:
    prompts = {"Lead!": "", "answer": "", "think": "", "Deep Search": "", "lookup": ""}
    specs = [ToolSpec("lookup"), ToolSpec("Math.Hypot"), ToolSpec("observation")]
    script = Script("t", "Who?", "odd", prompts, *specs)
    for agent in ("answer", "think", "Deep Search", "lookup"):
        script.say("Lead!", agent, f"Do it, {agent}.")
        for spec in specs:
            script.call(agent, spec.name, "something", x=agent)
        script.say(agent, "Lead!", "Done.")
    episode = script.answer("Lead!", "Ada", "Ada")
    grammar = derive_grammar([episode]).grammar
    named = {role.agent or role.tool: role.name for role in grammar.roles}
    assert {named[agent] for agent in ("answer", "think", "Deep Search")} == {
        *("agent_answer", "agent_think", "deep_search")
    }
    assert grammar.by_name["agent_lookup"].agent == "lookup" and "lookup" in grammar.by_name
    assert named["Math.Hypot"] == "math_hypot" and named["observation"] == "call_observation"
    chain = chain_of(episode, grammar)
    assert replayed(chain, episode, grammar).text == chain.text


@pytest.mark.parametrize("name", PRESETS)
def test_any_grammar_can_be_written_to_a_file(name: str) -> None:
    grammar = load_grammar(name)
    assert grammar_from_toml(grammar_to_toml(grammar)) == grammar
    added = {"agent", "call", "free"} | (set() if grammar.sparing else {"sparing"})
    assert not (added - {name for name in added if getattr(grammar, name, "")}) & {
        *grammar.record()
    }
    assert not {"agent", "argument", "example"} & {*grammar.record()["roles"][0]}


@settings(deadline=None)
@given(st.text(max_size=30), st.text(max_size=30))
def test_any_text_can_stand_in_a_file(about: str, hint: str) -> None:
    from coa.grammar import Role

    roles = (Role("act", "tool", ("answer",), about, hint), Role("answer", "answer"))
    grammar = Grammar("any", roles, ("act",), preamble=about)
    try:
        dumps({"text": about + hint}).encode()
    except UnicodeEncodeError:
        return  # half a letter can stand in no file
    assert grammar_from_toml(grammar_to_toml(grammar)) == grammar


# -- the words of a model ----------------------------------------------------------------------


def test_a_model_may_name_agents_and_nothing_else() -> None:
    shown: list[Any] = []

    def words(known: Any) -> Any:
        shown.append(known)
        return {
            "agents": [
                {"agent": "researcher", "was": "researcher", "block": "clerk", "about": "Finds."},
                {"agent": "accountant", "was": "accountant", "block": "No Name", "kind": "king"},
                {"agent": "nobody", "was": "nobody", "block": "somebody"},
                "rubbish",
            ]
        }

    episodes = team("smolagents")
    derived = derive_grammar(episodes, words=words)
    grammar = derived.grammar
    assert grammar.by_name["clerk"].agent == "researcher"
    assert grammar.by_name["clerk"].about == "Finds"
    assert grammar.by_name["accountant"].kind == "delegation" and len(agents_of(grammar)) == 2
    assert "words of a model" in derived.toml()
    told = json.dumps(shown)
    assert "researcher who finds invoices" in told
    assert not any(e.question in told or f'"{e.answer}"' in told for e in episodes)
    assert chain_of(episodes[0], grammar).text.startswith("<clerk> Find what Acme")


def test_of_a_model_only_texts_are_taken_over() -> None:
    plain = derive_grammar(team("smolagents")).grammar
    odd = [
        {"agent": "researcher", "was": "researcher", "block": None, "kind": None, "about": None},
        {"agent": "accountant", "was": ["accountant"], "about": "Converts."},
        {"agent": "accountant", "was": "accountant", "about": {"text": "Converts."}},
    ]
    assert derive_grammar(team("smolagents"), words=lambda known: {"agents": odd}).grammar == plain


def test_an_agent_of_another_kind_is_described_as_one() -> None:
    def words(known: Any) -> Any:
        return {"agents": [{"agent": "reader", "was": "reader", "kind": "delegation"}]}

    reader = derive_grammar(team("autogen"), words=words).grammar.by_name["reader"]
    assert (reader.kind, reader.hint) == ("delegation", "job")
    assert reader.about.startswith("Hand the work to reader")


def test_a_model_may_take_the_only_plan_from_a_team_that_checks_by_score() -> None:
    def words(known: Any) -> Any:
        return {"agents": [{"agent": "strategist", "was": "strategist", "kind": "delegation"}]}

    episodes = team("planned")
    for each in episodes:
        stated = {"suggestion": {}, "check": {"score": 4}}.items()
        each.events[-1:-1] = [
            Message("inspector", SYSTEM, f"{each.answer} Score: 4", facts={"part": part, **more})
            for part, more in stated
        ]
    assert derive_grammar(episodes).grammar.by_name["double_check"].pass_score == 3
    grammar = derive_grammar(episodes, words=words).grammar
    assert not grammar.of_kind("plan") and grammar.by_name["double_check"].pass_score == 0


def test_a_model_on_a_server_is_asked_once_and_left_out_where_it_cannot_be_read() -> None:
    named = {"agent": "clerk", "was": "clerk", "block": "bookkeeper", "kind": "delegation"}
    told = f"Sure:\n```json\n{json.dumps({'agents': [named]})}\n```"
    said: list[str] = []
    with ChatServer(lambda body: told) as server:
        words = words_of_model(server.ref, said.append)
        assert "bookkeeper" in derive_grammar(team("reviewed"), words=words).grammar.by_name
        assert len(server.bodies) == 1 and not said
    with ChatServer(lambda body: "I would call it Bob.") as server:
        words = words_of_model(server.ref, said.append)
        assert "clerk" in derive_grammar(team("reviewed"), words=words).grammar.by_name
        assert len(server.bodies) == 3
    assert said == [f"{server.ref}: no reply could be read, so the rules alone name the agents"]


# -- the kind of block -------------------------------------------------------------------------


def test_a_delegation_goes_on_without_an_observation() -> None:
    grammar = derive_grammar(team("smolagents")).grammar
    job = parse(grammar, "<researcher> Find it.</researcher>").blocks[0]
    from coa.grammar import Fault, FaultKind, GrammarState

    state = grammar.advance(GrammarState(), job)
    assert isinstance(state, GrammarState) and not state.awaiting and not state.done
    assert grammar.allowed(state) == ("think", "lookup_invoice", "search_documents")
    empty = grammar.advance(GrammarState(), replace(job, body=" "))
    assert isinstance(empty, Fault) and empty.kind is FaultKind.EMPTY
    assert "</researcher>" not in grammar.stop_strings


def test_thoughts_are_spared_where_the_team_had_none() -> None:
    from coa.grammar import GrammarState

    grammar = derive_grammar(team("smolagents")).grammar
    assert grammar.sparing and grammar.allowed(GrammarState()) == ("think", "researcher")
    assert grammar.allowed(GrammarState(thought=True)) == ("researcher",)
    always = replace(grammar, sparing=False)
    assert always.allowed(GrammarState()) == ("think",)
    assert always.fingerprint() != grammar.fingerprint()


@pytest.mark.parametrize("shape", SHAPES)
def test_constrained_decoding_writes_what_the_team_wrote(shape: str) -> None:
    llguidance = pytest.importorskip("llguidance")
    from coa.grammar import GrammarState
    from coa.loop import read_turn

    episodes = team(shape, 4)
    grammar = derive_grammar(episodes).grammar
    for episode in episodes:
        box = recorded_tools(episode, grammar, episode.tools)
        own = box.bind(grammar)
        chain, state = convert(episode, own), GrammarState()
        for step in chain.steps:
            lark = turn_grammar(own, state, schemas=box.schemas(own))
            matcher = llguidance.LLMatcher(
                byte_tokens(llguidance), llguidance.grammar_from("lark", lark)
            )
            tokens = byte_tokens(llguidance).tokenize_bytes(step.model.text.encode())
            assert matcher.try_consume_tokens(tokens) == len(tokens), (lark, step.model.text)
            state, _, fault = read_turn(own, state, step.model.text)
            assert fault is None
            state = replace(state, awaiting=False, thought=False)


def byte_tokens(llguidance: Any) -> Any:
    return llguidance.LLTokenizer("byte")


# -- random teams ------------------------------------------------------------------------------

NAMES = ("root", "alpha", "beta", "gamma", "delta")
WORDS = st.lists(st.sampled_from("red blue 7 12 Acme stone river not due".split()), max_size=6)
TEXT = WORDS.map(" ".join)
TOOLS = (SEARCH, LOOKUP, ToolSpec("Odd.Tool"), ToolSpec("noted", schema="{"))


@st.composite
def works(draw: st.DrawFn, script: Script, agent: str, depth: int) -> None:
    """An agent at work: it thinks, calls tools, and asks others, who report or do not."""
    for _ in range(draw(st.integers(0, 3))):
        match draw(st.sampled_from(("call", "ask", "remark", "many"))):
            case "call":
                spec = draw(st.sampled_from(TOOLS))
                argument = {"query": draw(TEXT)} if spec is SEARCH else {"q": draw(TEXT), "n": 1}
                script.call(agent, spec.name, draw(TEXT), draw(TEXT), **argument)
            case "ask" if depth:
                other = draw(st.sampled_from([n for n in NAMES if n != agent]))
                script.say(agent, other, draw(TEXT), draw(TEXT))
                draw(works(script, other, depth - 1))
                script.say(other, draw(st.sampled_from((agent, agent, SYSTEM))), draw(TEXT))
            case "many" if depth and not script.branch:
                script.say(agent, SYSTEM, thought=draw(TEXT))
                for branch, other in enumerate(draw(st.permutations(NAMES[1:]))[:2]):
                    script.branch = str(branch)
                    script.say(SYSTEM, other, draw(TEXT))
                    draw(works(script, other, 0))
                    script.say(other, agent, draw(TEXT))
                script.branch = ""
            case _:
                script.say(agent, SYSTEM, draw(TEXT))


@st.composite
def episodes_at_random(draw: st.DrawFn) -> Episode:
    prompts = {name: draw(TEXT) for name in NAMES}
    script = Script(str(draw(st.integers(0, 999))), "What is it?", "random", prompts, *TOOLS)
    draw(works(script, "root", 2))
    answer = draw(TEXT.filter(str.strip))
    return script.answer("root", f"{draw(TEXT)} {answer}", answer)


@settings(max_examples=60, deadline=None)
@given(st.lists(episodes_at_random(), min_size=1, max_size=3))
def test_whatever_a_team_does_its_chains_are_legal_and_replay(episodes: list[Episode]) -> None:
    try:
        derived = derive_grammar(episodes, "random")
    except UsageError as wrong:
        assert "becomes a chain" in str(wrong)
        return
    grammar = grammar_from_toml(derived.toml(), "random")
    assert grammar == derived.grammar
    chains = 0
    for episode in episodes:
        try:
            chain = chain_of(episode, grammar)
        except NotConvertible:
            continue
        chains += 1
        assert check(grammar, parse(grammar, chain.text, env=True)) is None
        again = replayed(chain, episode, grammar)
        assert (again.text, again.answer) == (chain.text, chain.answer)
    assert chains == derived.converted == len(episodes)


# -- files -------------------------------------------------------------------------------------


def test_lines_that_are_no_episode_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_text(dumps(smolagents(0).to_json()) + "\n" + dumps({"schema": 9}) + "\n")
    said: list[str] = []
    assert len(sound_episodes(path, said.append)) == 1
    assert "1 lines are no episode; line 2: found episode schema 9" in said[0]
    path.write_text(dumps({"schema": 9}) + "\n")
    with pytest.raises(CoaError, match=r"holds no episode. line 1"):
        sound_episodes(path, said.append)


def test_the_grammar_of_a_folder_is_an_environments(tmp_path: Path) -> None:
    saved(tmp_path, derive_grammar(team("smolagents"), "office").grammar)
    (tmp_path / "environment.toml").write_text('grammar = "office.toml"\n')
    assert load_environment(tmp_path).value().name == "office"
