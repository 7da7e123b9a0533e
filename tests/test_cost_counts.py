"""Tokens of a team and of a chain: drawn on paper, counted twice, and counted by real rollouts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa.distillation.convert import convert
from coa.engines.base import TextCodec
from coa.engines.scripted import ByteCodec, ScriptedEngine
from coa.environment import shipped_home
from coa.environments import make_tasks
from coa.environments.experts import Experts
from coa.errors import ConfigError, RecordError
from coa.evaluation.spending import parse_price
from coa.grammar import load_grammar
from coa.grammar.prompt import PromptKind
from coa.io.runs import Json
from coa.lab.study_cost import (
    CACHINGS,
    PROMPTS,
    TokenCounter,
    opening_prompts,
    with_caching,
)
from coa.loop import Budget, Decoding, run
from coa.models.codec import Codec
from coa.models.references import is_pulled, model_folder, resolve
from coa.recording.budget import Price
from coa.recording.episode import USER, AgentSpec, Episode, Message, ModelCall, Tokens, ToolUse
from coa.tasks import Task
from coa.trajectory import Segment, Trajectory
from scripts import TOOLBOX_OF, episodes_of
from tiny_model import TEMPLATE, make_tokenizer

BYTES = TokenCounter(ByteCodec())
ROOMY = Budget(turns=64, tokens=1 << 20, turn_tokens=1 << 20)


def two_agents() -> Episode:
    """A planner of ten letters, a searcher of twenty, one tool call; every text is counted."""
    agents = [AgentSpec("ann", "planner", "p" * 10), AgentSpec("bob", "searcher", "s" * 20)]
    return Episode(
        "t-1",
        "qqqq",
        "test",
        agents,
        [
            Message(USER, "ann", "qqqq"),
            Message("ann", "bob", "lookup"),
            Message("bob", "system", "query"),
            ToolUse("bob", "wiki_search", "query", "found it"),
            Message("bob", "ann", "Rome"),
            Message("ann", USER, "Rome"),
        ],
        answer="Rome",
    )


# -- the team --------------------------------------------------------------------------------


def test_a_team_of_two_is_counted_as_on_paper() -> None:
    # ann is given 10 + 4 and writes 6; bob 20 + 6, writes 5; bob 31 + 8, writes 4;
    # ann 14 + 6 + 4 and writes 4.
    assert BYTES.team(two_agents()) == Tokens(
        prompt=14 + 26 + 39 + 24, cached=(26 + 5) + (14 + 6), sampled=6 + 5 + 4 + 4
    )
    assert BYTES.bare(two_agents()) == Tokens(
        prompt=4 + 6 + 19 + 14, cached=(6 + 5) + (4 + 6), sampled=19
    )


def counted_again(record: Json) -> tuple[int, int, int]:
    """The same from the raw record, sharing nothing with the code under test."""
    systems = {agent["name"]: agent["system"] for agent in record["agents"]}
    prompt, cached, sampled = 0, 0, 0
    earlier: dict[str, list[list[str]]] = {}
    for place, said in enumerate(record["events"]):
        me, branch = said["agent"], said.get("branch", "")
        if said["kind"] == "use" or me not in systems:
            continue
        seen = [systems[me]]
        for event in record["events"][:place]:
            if branch and event.get("branch", "") not in ("", branch):
                continue
            own = f"{event.get('thought', '')} {event.get('text', '')}".strip()
            if event["agent"] == me:
                seen.append(event["result"] if event["kind"] == "use" else own)
            elif event.get("to") == me:
                seen.append(event["text"])
        best = 0
        for old in earlier.setdefault(me, []):
            same = 0
            while same < min(len(old), len(seen)) and old[same] == seen[same]:
                same += 1
            best = max(best, len("".join(seen[:same]).encode()))
        wrote = f"{said.get('thought', '')} {said['text']}".strip()
        prompt += len("".join(seen).encode())
        cached += best
        sampled += len(wrote.encode())
        earlier[me].append([*seen, wrote])
    return prompt, cached, sampled


@pytest.mark.parametrize("name", ["atlas-mhqa", "atlas-web"])
def test_a_second_way_of_counting_agrees_on_what_the_experts_did(name: str) -> None:
    tasks = make_tasks(name, "train", 40, seed=2)
    for episode in episodes_of(tasks, Experts(error_rate=0.3)):
        assert BYTES.team(episode) == counted_again(episode.to_json())


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_the_length_of_a_prompt_is_paid_in_every_call_or_once_an_agent(p: int, s: int) -> None:
    bare = BYTES.bare(two_agents())
    found = BYTES.team(two_agents(), lambda agent: p if agent.name == "ann" else s)
    assert found.total == bare.total + 2 * p + 2 * s
    assert found.total_cached == bare.total_cached + p + s


def test_what_a_server_counted_with_another_tokenizer_is_counted_again() -> None:
    episode = two_agents()
    call = ModelCall("large", "lookup", prompt_tokens=9000, cached_tokens=1, sampled_tokens=900)
    events = [replace(e, call=call) if e.agent == "ann" else e for e in episode.events[1:2]]
    told = replace(episode, events=[episode.events[0], *events, *episode.events[2:]])
    assert told.count_tokens(len).prompt > 9000
    assert BYTES.team(told) == BYTES.team(episode)


def test_a_better_cache_never_costs_more_and_a_warm_one_makes_prompts_free() -> None:
    tokens, bare = BYTES.team(two_agents()), BYTES.bare(two_agents())
    by_cache = {caching: with_caching(tokens, caching, opening=30) for caching in CACHINGS}
    assert by_cache["none"].total_cached == tokens.total
    assert by_cache["task"].total_cached == tokens.total_cached
    assert by_cache["warm"].total_cached == bare.total_cached
    price = Price(input=2.0, cached=0.5, output=10.0)
    assert price.of(*Tokens(prompt=3_000_000, cached=1_000_000, sampled=100_000)) == 4 + 0.5 + 1
    costs = [price.of(*by_cache[caching]) for caching in CACHINGS]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("text", ["", "1", "1,2", "1,2,3,4", "a,b,c", "1,,3"])
def test_prices_that_are_no_three_numbers_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected three numbers joined by commas"):
        parse_price(text)


@pytest.mark.parametrize("text", ["1,-0.1,5", "nan,1,1", "1,inf,1"])
def test_prices_below_zero_or_without_a_value_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected 0 or more"):
        parse_price(text)
    assert parse_price(" 1, 0.1,5") == Price(input=1.0, cached=0.1, output=5.0)


# -- the chain -------------------------------------------------------------------------------


def bpe() -> TextCodec:
    return Codec(make_tokenizer(), TEMPLATE, {"bos_token": "<|im_start|>"})


def chains_of(name: str, n: int = 12) -> list[tuple[Task, Trajectory]]:
    tasks = list(make_tasks(name, "train", n, seed=3))
    grammar = shipped_home(tasks[0].meta).value()
    episodes = episodes_of(tasks, Experts(error_rate=0.3))
    pairs = zip(tasks, episodes, strict=True)
    return [
        (task, convert(episode, TOOLBOX_OF(task).bind(grammar)))
        for task, episode in pairs
        if episode.answer is not None
    ]


def usage_of(task: Task, chain: Trajectory, codec: TextCodec, kind: PromptKind) -> Tokens:
    """What a real rollout of the same turns counts."""
    engine = ScriptedEngine([step.model.text for step in chain.steps], codec)
    done = asyncio.run(
        run(
            task,
            engine,
            load_grammar(chain.grammar),
            TOOLBOX_OF(task),
            budget=ROOMY,
            decoding=Decoding(prompt=kind),
        )
    )
    assert done.text == chain.text
    assert done.segments[0].text == opening_prompts(chain)[kind]
    usage = done.usage
    return Tokens(usage.prompt_tokens, usage.cached_tokens, usage.sampled_tokens)


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("name", ["atlas-mhqa", "atlas-web"])
def test_a_chain_costs_what_a_rollout_of_its_turns_costs(name: str, kind: PromptKind) -> None:
    for codec in (ByteCodec(), bpe()):
        counter = TokenCounter(codec)
        for task, chain in chains_of(name):
            counted = counter.chain(chain, opening_prompts(chain)[kind])
            assert counted == usage_of(task, chain, codec, kind)
            assert counted.cached > 0


@pytest.mark.slow
@pytest.mark.skipif(not is_pulled(), reason="the base model is not here")
@pytest.mark.parametrize("kind", PROMPTS)
def test_so_it_is_with_the_tokenizer_of_the_base_model(kind: PromptKind) -> None:
    codec = Codec.from_folder(model_folder(resolve("smollm2-135m")))
    for name in ("atlas-mhqa", "atlas-web"):
        for task, chain in chains_of(name):
            counted = TokenCounter(codec).chain(chain, opening_prompts(chain)[kind])
            assert counted == usage_of(task, chain, codec, kind)


def test_a_chain_that_was_sampled_is_counted_by_its_ids() -> None:
    _, chain = chains_of("atlas-mhqa", 1)[0]
    prompt = opening_prompts(chain)["compact"]
    before = BYTES.chain(chain, prompt)
    first = chain.segments[1]
    chain.segments[1] = Segment(first.author, first.text, ids=[7] * 3)
    shorter = len(first.text.encode()) - 3
    turns = len(chain.steps)
    after = BYTES.chain(chain, prompt)
    assert after.sampled == before.sampled - shorter
    assert after.prompt == before.prompt - shorter * (turns - 1)


def test_a_chain_with_a_prompt_of_another_grammar_is_refused() -> None:
    _, chain = chains_of("atlas-mhqa", 1)[0]
    with pytest.raises(RecordError, match=r"does not open with a prompt of the grammar 'web'"):
        opening_prompts(chain, "web")
    chain.segments.pop(0)
    with pytest.raises(RecordError, match=r"Distil the episodes again"):
        opening_prompts(chain)
