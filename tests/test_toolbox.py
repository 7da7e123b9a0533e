"""The environment `toolbox`: its tasks, the services behind them, and the team that reads."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.distillation.dataset import Conversion, convert_one
from coa.environment import load_environment
from coa.environments.experts import Experts
from coa.environments.toolbox import service_tools
from coa.environments.toolbox.catalogue import generated, held_out_words
from coa.environments.toolbox.services import BUSY, FORMS, ServiceState, draw, schema_of, words
from coa.environments.toolbox.tasks import (
    FAMILIES,
    MISSING,
    NO_TOOL,
    ToolboxMaking,
    make_tasks,
    written,
)
from coa.errors import RecordError, ToolMistake, Unavailable, UsageError
from coa.recording.episode import Episode
from coa.rewards import exact
from coa.tasks import Task, TaskSet
from coa.tools.arguments import find_problem
from coa.trajectory import Author, StopReason, Trajectory

N = 51
NOTHING = ("none", "missing")


@cache
def made(
    split: str = "train", n: int = N, seed: int = 0, masked: float = 0.15, source: str = "generated"
) -> TaskSet:
    return make_tasks(split, n, seed, making=ToolboxMaking(sources=(source,), masked=masked))


def public_text(task: Task) -> str:
    return json.dumps(task.public().to_json(), ensure_ascii=False)


# -- tasks -----------------------------------------------------------------------------------


def test_the_same_arguments_give_the_same_tasks_and_fewer_the_first() -> None:
    again = make_tasks("train", 20, 0)
    assert again.tasks == made().tasks[:20]
    assert not {task.id for task in again} & {task.id for task in make_tasks("train", 20, 1)}


def test_gold_is_in_nothing_that_is_public() -> None:
    for task in made():
        assert not task.public().answers and not task.public().gold
        if task.meta["family"] in ("create", "update", "remove", "sum", "feed"):
            assert task.answers[0] not in public_text(task), task.id


def test_the_calls_of_gold_give_the_answer_and_fit_the_declarations() -> None:
    for task in made():
        declared = {tool["name"]: tool["parameters"] for tool in task.meta["tools"]}
        state, result = ServiceState(task.meta["service"]), {}
        for call in task.gold["calls"]:
            assert not find_problem(call["arguments"], declared[call["name"]]), task.id
            try:
                result = state.call(call["name"], call["arguments"])
            except ToolMistake as busy:
                assert str(busy) == BUSY
                result = state.call(call["name"], call["arguments"])
        if task.meta["family"] == "compare":
            assert task.answers[0] in task.question
        elif task.gold["calls"]:
            told = {
                json.dumps(each) if isinstance(each, bool) else str(each)
                for each in result.values()
            }
            assert told & {*task.answers}, (task.id, result)


def test_families_come_as_often_as_they_are_meant_to() -> None:
    counted = Counter(task.meta["family"] for task in made(n=2 * sum(FAMILIES.values())))
    assert counted == {name: 2 * times for name, times in FAMILIES.items()}
    assert abs(FAMILIES["none"] / sum(FAMILIES.values()) - 1 / 8) < 0.02


def test_tools_on_offer_are_one_to_twelve_and_the_needed_ones_are_among_them() -> None:
    sizes = Counter(len(task.meta["tools"]) for task in made())
    assert min(sizes) == 1 and max(sizes) == 12
    for task in made():
        names = [tool["name"] for tool in task.meta["tools"]]
        assert len(set(names)) == len(names)
        assert {call["name"] for call in task.gold["calls"]} <= {*names}
        assert set(task.meta["service"]["tools"]) == {*names}


def test_where_nothing_can_be_called_the_answer_says_so_in_fixed_words() -> None:
    for task in made():
        if task.meta["family"] == "none":
            assert task.answers == (NO_TOOL,) and not task.gold["calls"]
        elif task.meta["family"] == "missing":
            name = task.answers[0].removeprefix(MISSING.format(""))
            assert f'"{name}"' in public_text(task) and not task.gold["calls"]
        else:
            assert 1 <= task.meta["calls"] == len(task.gold["calls"]) <= 4


def test_masked_tools_have_names_without_meaning_and_descriptions_of_all_arguments() -> None:
    plain = {verb for table in ("things", "sums") for verb in words(table)}
    for task in made(n=30, masked=1.0):
        for tool in task.meta["tools"]:
            assert not any(word in tool["name"] for word in plain)
            parameters = [tool["parameters"]["properties"]]
            while parameters:
                for part in parameters.pop().values():
                    assert part["description"]
                    parameters += [part["properties"]] if part["type"] == "object" else []
        assert task.meta["masked"]


def test_what_is_held_out_is_never_in_training() -> None:
    for table in ("things", "sums"):
        kept = held_out_words(table)
        assert 0.08 < len(kept) / len(words(table)) < 0.4
    every = held_out_words("things") | held_out_words("sums")

    def behind(tasks: TaskSet) -> set[str]:
        tools = (does for task in tasks for does in task.meta["service"]["tools"].values())
        return {str(does["thing"]).rpartition("/")[2] for does in tools}

    assert not behind(made()) & every
    assert behind(made("test")) <= every


def test_names_and_descriptions_of_generated_tools_are_many() -> None:
    tools = [o.declaration for number in range(100) for o in generated(number).operations]
    schemas = {json.dumps([t["name"], sorted(t["parameters"]["properties"])]) for t in tools}
    assert len(schemas) > 0.8 * len(tools) and len(tools) > 900


@pytest.mark.parametrize(
    ("making", "said"),
    [
        ({"sources": ("openapy",)}, "sources: 'openapy' is none. Did you mean 'openapi'"),
        ({"sources": ()}, "expected each of them once"),
        ({"offered": 0}, "offered 0"),
        ({"masked": 1.5}, "masked 1.5"),
        ({"schemas": 0}, "schemas 0"),
    ],
)
def test_settings_out_of_range_are_refused(making: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("?", r"\?")):
        ToolboxMaking(**making)


def test_a_split_or_a_family_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match=r"unknown split 'tset'. Did you mean 'test'"):
        make_tasks("tset", 3, 0)
    with pytest.raises(UsageError, match=r"unknown family 'raed'. Did you mean 'read'"):
        make_tasks("train", 3, 0, ["raed"])
    with pytest.raises(UsageError, match="n = 0"):
        make_tasks("train", 0, 0)


def test_too_few_schemas_for_a_family_are_refused() -> None:
    with pytest.raises(
        UsageError, match="no further task of follow could be made of so few schemas"
    ):
        make_tasks("train", 3, 0, ["follow"], ToolboxMaking(offered=1))


def test_fewer_schemas_are_fewer_tools() -> None:
    def names(schemas: int) -> set[str]:
        tasks = make_tasks(
            "train", 40, 0, ["read", "sum"], ToolboxMaking(schemas=schemas, masked=0)
        )
        return {task.meta["provider"] for task in tasks}

    assert len(names(30)) <= 3 < len(names(10_000))


# -- services --------------------------------------------------------------------------------

PARCELS: dict[str, Any] = {
    "seed": 7,
    "things": {
        "parcel": {
            "noun": "parcel",
            "id": "parcel_id",
            "prefix": "PA",
            "fields": {"weight": "kg", "status": "held|sent", "sent_on": "date"},
        }
    },
    "tools": {
        "get": {"does": "get", "thing": "parcel", "by": {"id": "#"}, "gives": ["status"]},
        "list": {"does": "list", "thing": "parcel", "by": {"status": "status"}},
        "set": {"does": "update", "thing": "parcel", "by": {"id": "#", "status": "status"}},
        "add": {
            **{
                "does": "create",
                "thing": "parcel",
                "by": {"in.weight": "weight", "day": "sent_on"},
            },
            "forms": {"day": "dotted"},
        },
        "drop": {"does": "remove", "thing": "parcel", "by": {"id": "#"}, "busy": True},
    },
}


def test_what_a_call_changes_is_seen_by_later_ones_of_the_same_rollout_only() -> None:
    state, other = ServiceState(PARCELS), ServiceState(PARCELS)
    key = next(iter(state.records["parcel"]))
    old = state.call("get", {"id": key})["status"]
    new = "sent" if old == "held" else "held"
    before = state.call("list", {"status": new})["count"]
    assert state.call("set", {"id": key, "status": new})["receipt"].startswith("R")
    assert state.call("get", {"id": key})["status"] == new
    assert state.call("list", {"status": new})["count"] == before + 1
    assert other.call("get", {"id": key})["status"] == old
    code = state.call("add", {"in": {"weight": 2}, "day": "31.12.2025"})["parcel_id"]
    assert state.records["parcel"][code]["sent_on"] == "2025-12-31"
    with pytest.raises(ToolMistake, match="busy"):
        state.call("drop", {"id": code})
    state.call("drop", {"id": code})
    with pytest.raises(ToolMistake, match=f"there is no parcel '{code}'"):
        state.call("get", {"id": code})


def test_a_new_code_depends_on_every_argument_and_not_on_how_it_is_written() -> None:
    def code(**given: Any) -> str:
        return str(ServiceState(PARCELS).call("add", given)["parcel_id"])

    assert code(**{"in": {"weight": 2}, "day": "31.12.2025"}) == code(
        **{"day": "31.12.2025", "in": {"weight": 2.0}}
    )
    assert code(**{"in": {"weight": 3}, "day": "31.12.2025"}) != code(
        **{"in": {"weight": 2}, "day": "31.12.2025"}
    )


def test_an_argument_in_another_form_is_explained() -> None:
    with pytest.raises(ToolMistake, match=r"day is '2025-12-31', expected day.month.year as in 31"):
        ServiceState(PARCELS).call("add", {"in": {"weight": 2}, "day": "2025-12-31"})
    for form, (read, expected) in FORMS.items():
        value = "2025-12-31" if "2025" in expected else "AB-1234"
        assert read(str(written(value, form))) == value
        assert str(written(value, form))[:1] in expected


@pytest.mark.parametrize("service", [{}, [], {"seed": 1}, {"seed": 1, "things": 3, "tools": {}}])
def test_a_service_that_is_none_is_refused(service: Any) -> None:
    with pytest.raises(RecordError, match="expected seed, things and tools"):
        ServiceState(service)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(PARCELS["tools"])),
    st.dictionaries(st.sampled_from(["id", "status", "in", "day", "x"]), _JSON),
)
def test_any_arguments_are_answered_or_refused(name: str, arguments: dict[str, Any]) -> None:
    try:
        json.dumps(ServiceState(PARCELS).call(name, arguments))
    except ToolMistake as refused:
        assert str(refused)


def test_every_kind_of_value_fits_its_schema() -> None:
    import random

    kinds = {
        part.partition(":")[2]
        for table in ("things", "sums")
        for line in words(table).values()
        for part in line.partition(" -> ")[0].split()
    }
    for kind in sorted(each for each in kinds if not each.startswith(">")):
        assert not find_problem(draw(kind, random.Random(1)), schema_of(kind)), kind


# -- the team --------------------------------------------------------------------------------


async def _worked(tasks: Sequence[Task]) -> list[tuple[Task, Episode, Conversion]]:
    env = load_environment("toolbox")
    done = []
    async with env.open(tasks) as opened:
        from coa.rewards import RewardSettings

        await opened.open_rewards(RewardSettings(), tasks)
        for task in tasks:
            async with opened.session(task) as session:
                episode = await Experts().record(task.public(), session.tools)
            done.append((task, episode, await convert_one(task.id, episode, opened, task)))
    return done


@cache
def worked(split: str = "test", n: int = N) -> list[tuple[Task, Episode, Conversion]]:
    return asyncio.run(_worked(list(made(split, n))))


def test_the_team_solves_most_tasks_and_its_chains_replay() -> None:
    solved = [exact(task, _answered(task, e)) == 1.0 for task, e, _ in worked()]
    assert sum(solved) > 0.7 * N
    chains = [each.trajectory for (*_, each), right in zip(worked(), solved, strict=True) if right]
    assert all(chain is not None and chain.stop is StopReason.ANSWERED for chain in chains)
    assert all(not each.replay for (*_, each), right in zip(worked(), solved, strict=True) if right)


def _answered(task: Task, episode: Episode) -> Trajectory:
    return Trajectory(task.id, task.question, "react", answer=episode.answer)


def test_chains_are_short() -> None:
    for *_, made_one in worked():
        if made_one.trajectory is not None:
            said = [s.text for s in made_one.trajectory.segments if s.author is Author.MODEL]
            assert sum(map(len, said)) < 1500


def test_the_team_never_sees_gold_nor_what_stands_behind_the_tools() -> None:
    """With another family, other gold and other answers in the task it does the same."""
    tasks = list(made("test", 14))
    lied = [
        replace(
            task,
            answers=("rubbish",),
            gold={"calls": []},
            meta={**task.meta, "family": "none", "calls": 9, "masked": True},
        )
        for task in tasks
    ]
    told, other = asyncio.run(_worked(tasks)), asyncio.run(_worked(lied))
    for (_, one, _), (_, two, _) in zip(told, other, strict=True):
        assert one.answer == two.answer
        assert one.events == two.events


def test_tools_of_a_task_without_a_service_note_the_call() -> None:
    task = replace(made()[0], meta={"tools": made()[0].meta["tools"]})
    tools = service_tools(task)
    assert all("noted" in asyncio.run(each.run("{}")) for each in tools)


@settings(max_examples=20, deadline=None)
@given(st.text(max_size=300))
def test_the_team_stands_any_question(question: str) -> None:
    if not question.strip():
        return
    task = replace(made("test", 14)[0], question=question)

    async def once() -> Episode:
        env = load_environment("toolbox")
        async with env.open([task]) as opened, opened.session(task) as session:
            return await Experts().record(task.public(), session.tools)

    episode = asyncio.run(once())
    assert episode.answer or episode.error


@pytest.mark.slow
@pytest.mark.parametrize(("source", "n"), [("generated", 1000), ("openapi", 600)])
def test_the_funnel_by_family(source: str, n: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints what docs/toolbox.md says: pytest -m slow -s tests/test_toolbox.py"""
    for split in ("train", "test"):
        right, every = Counter[str](), Counter[str]()
        try:
            tasks = list(made(split, n, source=source))
        except Unavailable as away:
            pytest.skip(str(away))
        for task, episode, _ in asyncio.run(_worked(tasks)):
            every[str(task.meta["family"])] += 1
            right[str(task.meta["family"])] += exact(task, _answered(task, episode)) == 1.0
        with capsys.disabled():
            print(f"\n{source}, {split}: {right.total()} of {every.total()}")
            print({name: (right[name], every[name]) for name in FAMILIES if every[name]})
        assert right.total() > (0.9 if source == "generated" else 0.6) * every.total()
