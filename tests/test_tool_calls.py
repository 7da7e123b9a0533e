"""A chat model asked in its native tool-calling format, through the one loop, on a real server of
loopback whose replies are scripted."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.asking import ask_once
from coa.distillation.dataset import DistillSettings
from coa.engines import load_engine
from coa.engines.chat import ChatReply
from coa.engines.tool_calls import FourBytes, ToolCallEngine
from coa.errors import ConfigError
from coa.evaluation.run import EvalSettings, run_eval
from coa.grammar import Grammar, check, load_grammar, parse
from coa.io.runs import manifest_beside, read_jsonl
from coa.loop import Budget, Rollout, run
from coa.recording.chat import journal_of
from coa.recording.episode import ToolUse, load_episodes
from coa.recording.record import Recording, rehearse_recording, run_recording
from coa.rollouts import AgentSettings
from coa.tasks import Task, TaskSet
from coa.tools import Tool, Toolbox, tool
from coa.trajectory import StopReason, Trajectory
from scripted_provider import Asked, Reply, ScriptedProvider, ToolCall
from scripts import distil

TASK = Task("What is the capital of Peru?", ("Lima",), meta={"world": 0})
REACT = load_grammar("react")


async def _search(query: str) -> str:
    return f"Found {query}."


SEARCH = Tool("wiki_search", _search, about="Search", parameter="query", pure=True)


@tool
async def weather(city: str, days: int = 1) -> str:
    """Forecast the weather of a city."""
    return f"{city}: rain for {days} days"


def call(name: str = "wiki_search", **given: Any) -> ToolCall:
    return ToolCall(name, given or {"query": "capital of Peru"})


def play(
    *replies: Reply | str,
    grammar: Grammar = REACT,
    tools: Toolbox | None = None,
    budget: Budget | None = None,
    **options: Any,
) -> tuple[Trajectory, ScriptedProvider]:
    """What the replies, one after the other, come to."""

    def script(asked: Asked) -> Reply | str:
        turn = sum(message["role"] == "assistant" for message in asked.messages)
        return replies[turn]

    with ScriptedProvider(script) as provider:
        engine = load_engine(f"openai:m@{provider.url}", dialect="tools", **options)

        async def go() -> Trajectory:
            try:
                box = tools if tools is not None else Toolbox([SEARCH])
                return await run(TASK, engine, grammar, box, budget=budget)
            finally:
                await engine.close()

        return asyncio.run(go()), provider


def test_messages_become_the_blocks_of_the_grammar_in_one_trajectory() -> None:
    made, provider = play(
        Reply("I look it up.", (call(),), reasoning="The capital is wanted."),
        Reply("Lima", reasoning="It says so."),
    )
    assert made.text == (
        "<think>The capital is wanted. I look it up.</think>\n"
        "<wiki_search>capital of Peru</wiki_search>\n"
        "<observation>Found capital of Peru.</observation>\n"
        "<think>It says so.</think>\n<answer>Lima</answer>"
    )
    assert (made.stop, made.answer, made.prompt) == (StopReason.ANSWERED, "Lima", "compact")
    assert made.meta == {"exact": False, "dialect": "tools"}
    assert check(made.protocol, parse(made.protocol, made.text, env=True)) is None
    assert (made.usage.prompt_tokens, made.usage.sampled_tokens, made.usage.turns) == (22, 14, 2)
    first, second = provider.asked
    (declared,) = first.body["tools"]
    assert declared["function"]["name"] == "wiki_search"
    assert declared["function"]["parameters"]["required"] == ["query"]
    assert "<think>" not in first.system and first.messages[1]["content"] == TASK.question
    asked, answered = second.messages[2:]
    (sent,) = asked["tool_calls"]
    assert (asked["role"], sent["function"]["name"]) == ("assistant", "wiki_search")
    assert answered == {
        "role": "tool",
        "tool_call_id": sent["id"],
        "content": "Found capital of Peru.",
    }


def test_a_typed_tool_is_declared_with_its_schema_and_called_with_json() -> None:
    made, provider = play(
        Reply(calls=(call("weather", city="Lima", days=2),)), "Rain", tools=Toolbox([weather])
    )
    assert '<weather>{"city": "Lima", "days": 2}</weather>' in made.text
    assert "<observation>Lima: rain for 2 days</observation>" in made.text
    declared = provider.asked[0].body["tools"][0]["function"]
    assert declared["parameters"] == json.loads(weather.schema)
    assert made.text.startswith("<think>Next step.</think>\n<weather>")


def test_several_calls_of_one_reply_are_made_one_after_the_other_and_paid_once() -> None:
    calls = (call(query="Peru"), call(query="Chile"))
    made, provider = play(Reply("Both.", calls), Reply("yes"))
    assert [step.model.text for step in made.steps] == [
        "<think>Both.</think>\n<wiki_search>Peru</wiki_search>",
        "<think>Next step.</think>\n<wiki_search>Chile</wiki_search>",
        "<think>Next step.</think>\n<answer>yes</answer>",
    ]
    assert len(provider.asked) == 2 and made.usage.prompt_tokens == 22
    results = [m["content"] for m in provider.asked[1].messages if m["role"] == "tool"]
    assert results == ["Found Peru.", "Found Chile."]


async def _run_code(text: str) -> str:
    return f"ran {text}"


def test_a_program_is_fenced_and_text_that_looks_like_a_tag_is_none() -> None:
    code = Tool("code", _run_code, body="code")
    program = "print('</code><answer>9</answer>')"
    made, _ = play(
        Reply("I use <answer>.", (ToolCall("code", {"code": program}),)),
        Reply("a <think> b"),
        tools=Toolbox([code]),
    )
    assert made.steps[0].model.text.endswith(f"<code>```py\n{program}\n```</code>")
    assert "<think>I use &lt;answer>.</think>" in made.text
    assert made.answer == "a &lt;think> b" and made.usage.malformed == 0
    typed, _ = play(
        Reply(calls=(call("weather", city="</weather><answer>9</answer>"),)),
        "so",
        tools=Toolbox([weather]),
    )
    assert typed.answer == "so" and typed.usage.malformed == 0
    assert "rain for 1 days" in typed.text  # the tool got the text whole


@pytest.mark.parametrize(
    ("reply", "complaint"),
    [
        (Reply(calls=(ToolCall("wikipedia", {"query": "x"}),)), "'<wikipedia>' is not a block"),
        (Reply(calls=(ToolCall("wiki_search", {"q": "x"}),)), "&lt;wiki_search> is empty"),
        (Reply(calls=(ToolCall("wiki_search", {"query": 5}),)), "&lt;wiki_search> is empty"),
        (Reply(""), "The turn ended without a call or an answer"),
        (Reply('<tool_call>{"name": "wiki_search"'), "'<tool_call>' is not a block"),
    ],
)
def test_a_malformed_call_is_explained_and_counted_as_elsewhere(
    reply: Reply, complaint: str
) -> None:
    made, provider = play(reply, "Lima")
    assert made.answer == "Lima" and made.usage.malformed == 1 and made.usage.tool_calls == 0
    last = provider.asked[-1].messages[-1]
    assert last["content"].startswith(f"Error: {complaint}")
    assert last["role"] == ("tool" if reply.calls else "user")
    spoilt, _ = play(reply, reply, reply, budget=Budget(malformed=1))
    assert spoilt.stop is StopReason.MALFORMED


def test_arguments_that_are_nearly_json_are_repaired_and_others_explained() -> None:
    made, _ = play(
        Reply(calls=(ToolCall("weather", "{'city': 'Lima'}"),)), "so", tools=Toolbox([weather])
    )
    assert "Lima: rain for 1 days" in made.text
    made, _ = play(Reply(calls=(ToolCall("weather", "what"),)), "so", tools=Toolbox([weather]))
    assert "<observation>what: rain for 1 days</observation>" in made.text


def test_thoughts_that_a_server_left_in_the_text_are_thoughts() -> None:
    made, _ = play(Reply("<think>\nEasy.\n</think>\n\nLima"))
    assert made.text == "<think>Easy.</think>\n<answer>Lima</answer>"


def test_tokens_that_nobody_counted_are_estimated() -> None:
    made, _ = play(Reply("Lima", usage=None))
    assert made.usage.sampled_tokens == len(FourBytes().encode(made.text)) > 0


def test_a_reply_that_was_cut_ends_the_rollout_as_truncated() -> None:
    made, _ = play(
        Reply(
            captured=({"choices": [{"message": {"content": "Lim"}, "finish_reason": "length"}]}, [])
        )
    )
    assert made.stop is StopReason.TOKENS and made.answer is None


def test_the_formats_of_other_grammars_are_written_too() -> None:
    async def crawl(text: str) -> str:
        return "page"

    box = Toolbox([Tool("web_search", _search, parameter="query"), Tool("crawl_page", crawl)])
    made, _ = play(
        Reply(calls=(ToolCall("search", {"query": "Peru"}),)),
        "Lima",
        grammar=load_grammar("webdancer"),
        tools=box,
    )
    assert (
        '<tool_call>\n{"name": "search", "arguments": {"query": "Peru"}}\n</tool_call>' in made.text
    )
    assert made.answer == "Lima" and "<tool_response>Found Peru.</tool_response>" in made.text


# -- what is refused -----------------------------------------------------------------------------


def test_what_messages_cannot_say_is_refused_in_one_line() -> None:
    engine = ToolCallEngine("openai:m@http://127.0.0.1:1")
    for name in ("mhqa", "web", "code"):
        box = Toolbox([Tool("wiki_search", _search), Tool("code", _search, body="code")])
        with pytest.raises(ConfigError, match=f"the grammar '{name}' wants more blocks than"):
            Rollout(TASK, engine, load_grammar(name), box)
    with pytest.raises(ConfigError, match="--dialect tools: smollm2-135m is asked in this process"):
        load_engine("smollm2-135m", dialect="tools")
    with pytest.raises(ConfigError, match="--prompt is about blocks; leave it out"):
        AgentSettings(dialect="tools", prompt="full").decoding("openai:m@http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="--constrain is about blocks"):
        AgentSettings(dialect="tools", constrain=True).decoding("openai:m@http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="dialect 'json': expected blocks or tools"):
        AgentSettings(dialect="json").decoding("openai:m@http://127.0.0.1:1")


def test_without_a_tool_the_model_is_offered_none() -> None:
    made, provider = play("Lima", tools=Toolbox())
    assert made.answer == "Lima" and "tools" not in provider.asked[0].body


# -- hostile servers -----------------------------------------------------------------------------

JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["content", "tool_calls", "function", "name", "arguments", "id", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
TEXTS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(["<answer>1</answer>", "</think>", "<observation>x</observation>", "<think>"]),
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "id": TEXTS,
            "function": st.fixed_dictionaries(
                {
                    "name": st.sampled_from(["wiki_search", "weather", "answer", "x<y>"]),
                    "arguments": st.one_of(
                        TEXTS,
                        st.dictionaries(st.sampled_from(["query", "city"]), TEXTS).map(json.dumps),
                    ),
                }
            ),
        }
    ),
    max_size=3,
)
MESSAGES = st.one_of(
    JSONS, st.fixed_dictionaries({"content": TEXTS | st.none(), "tool_calls": CALLS | JSONS})
)


@settings(max_examples=60, deadline=None)
@given(messages=st.lists(MESSAGES, min_size=1, max_size=4))
def test_any_message_is_a_turn_and_no_text_of_it_becomes_a_block(messages: list[Any]) -> None:
    async def reply(body: Any) -> ChatReply:
        said = messages[
            min(len(messages) - 1, sum(m["role"] == "assistant" for m in body["messages"]))
        ]
        json.dumps(body)
        return ChatReply.read({"choices": [{"message": said, "finish_reason": "stop"}]})

    engine = ToolCallEngine("openai:m@http://127.0.0.1:1", ask=reply)
    box, budget = Toolbox([SEARCH, weather]), Budget(turns=6, tokens=100_000, context=1 << 15)
    made = asyncio.run(run(TASK, engine, REACT, box, budget=budget))
    assert made.stop is not StopReason.ENGINE_FAILED, made.error
    for step in made.steps:
        blocks = parse(made.protocol, step.model.text).blocks
        assert len([b for b in blocks if b.role in ("answer", *made.protocol.tool_roles)]) <= 1


@given(st.lists(st.text(max_size=30)))
def test_four_bytes_an_id_lose_nothing(texts: list[str]) -> None:
    codec = FourBytes()
    whole = "".join(texts).encode("utf-8", "replace").decode()
    assert codec.decode([i for text in texts for i in codec.encode(text)]) == whole


# -- commands ------------------------------------------------------------------------------------


def _oracle(asked: Asked) -> Reply | str:
    """Searches for the question, then answers with the first word of what came back."""
    if not asked.results:
        return Reply("I search.", (call(query=asked.messages[1]["content"]),))
    return asked.results[-1].split()[1]


def test_ask_and_eval_take_the_dialect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedProvider(_oracle) as provider:
        model = f"openai:m@{provider.url}"
        native = AgentSettings(model=model, dialect="tools")
        made = asyncio.run(ask_once(TASK.question, native, None, quiet=True))
        assert made.stop is StopReason.ANSWERED and made.grammar == "react"
        tasks = tmp_path / "tasks.jsonl"
        TaskSet((TASK, Task("What is the capital of Chile?", ("Santiago",)))).save(tasks)
        how = {"model": model, "tasks": str(tasks), "concurrency": 2, "grammar": "react"}
        summary = run_eval(EvalSettings(dialect="tools", **how), tmp_path / "run", quiet=True)
        assert summary["tasks"] and summary["model"] == model
        assert '"dialect": "tools"' in (tmp_path / "run" / "manifest.json").read_text()
        with pytest.raises(ConfigError, match="dialect"):
            run_eval(EvalSettings(prompt="compact", **how), tmp_path / "run", quiet=True)


def test_a_strong_model_is_a_teacher_whose_chains_are_distilled(tmp_path: Path) -> None:
    out = tmp_path / "episodes.jsonl"
    tasks = TaskSet(
        tuple(Task(f"What is thing {n}?", ("Found",), meta={"world": 0}) for n in range(3))
    )

    def script(asked: Asked) -> Reply | str:
        last = asked.messages[-1]["content"] or ""
        if "thing 2" in asked.messages[1]["content"] and len(asked.messages) < 4:
            return Reply(calls=(ToolCall("wikipedia", {"query": "x"}),))
        return "yes" if asked.results and "Error" not in last else Reply("I look.", (call(),))

    with ScriptedProvider(script) as provider:
        given = {"model": f"openai:m@{provider.url}", "dialect": "tools"}
        recording = Recording(tasks=tasks, teacher="llm", options=given)
        expected = rehearse_recording(recording, out)
        assert expected.to_json()["calls"] == 3 * 4 and not provider.asked
        recorded = run_recording(recording, out)
        assert (recorded.answered, recorded.calls) == (3, len(provider.asked))
        asked = len(provider.asked)
        whole = out.read_bytes()
        out.unlink()
        manifest_beside(out).unlink()
        run_recording(recording, out)  # from the journal
        assert len(provider.asked) == asked and out.read_bytes() == whole
    assert len(list(read_jsonl(journal_of(out)))) == asked == 3 * 2 + 1
    episodes = load_episodes(out)
    assert [episode.answer for episode in episodes] == ["yes"] * 3
    for episode in episodes:
        (used,) = [event for event in episode.events if isinstance(event, ToolUse)]
        assert (used.tool, used.argument) == ("wiki_search", "capital of Peru")
        assert episode.usage.prompt == 11 * len(episode.calls)
    made = distil(tmp_path / "d", episodes, recipe=DistillSettings(grammar="react"))
    assert "<think> I look.</think>" in made.kept[0].text and len(made.kept) == 3


def test_a_task_over_its_budget_ends_alone_and_a_wrong_key_ends_the_run(tmp_path: Path) -> None:
    tasks = TaskSet((TASK,))
    with ScriptedProvider(_oracle) as provider:
        given = {"model": f"openai:m@{provider.url}", "dialect": "tools", "task_tokens": 1050}
        out = tmp_path / "episodes.jsonl"
        run_recording(Recording(tasks=tasks, teacher="llm", options=given), out)
        assert load_episodes(out)[0].error == "over the task's budget of 1050 tokens"
