"""Groups: the stream of tasks, dynamic sampling with its account, and files that are taken over."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from coa.errors import ConfigError
from coa.loop import Budget
from coa.rewards import Part, RewardSettings, Scored
from coa.tasks import Task
from coa.train.groups import Drawn, Group, ScoredRollout, TaskStream, has_void_turn
from coa.train.processes import Processes
from coa.train.rl import rollout_record
from coa.trajectory import StopReason, load_trajectories
from rl_parts import (
    CALL,
    WHOLE,
    Failed,
    Told,
    group_of,
    made,
    make_sampler,
    opened,
    questions,
    side_by_side,
)


def mixed(question: str, draw: int) -> str:
    return str(draw % 2)


def flat_unless(*lively: str) -> Callable[[str, int], str]:
    """Only these questions have different rollouts; what is asked of the others earns 0."""
    return lambda question, draw: str(draw % 97 / 97) if question in lively else "0"


@given(st.integers(1, 9), st.integers(0, 3), st.integers(0, 60), st.integers(0, 40))
def test_any_place_of_the_stream_can_be_asked_for(
    count: int, seed: int, position: int, n: int
) -> None:
    whole = TaskStream(questions(count), seed).take(0, position + n)
    assert TaskStream(questions(count), seed).take(position, n) == whole[position:]


@given(st.integers(1, 9), st.integers(0, 5))
def test_every_epoch_is_a_permutation_and_no_sample_index_comes_twice(
    count: int, seed: int
) -> None:
    size, drawn = 4, TaskStream(questions(count), seed).take(0, 5 * count)
    for epoch in range(5):
        part = drawn[epoch * count : (epoch + 1) * count]
        assert sorted(task.id for task, _ in part) == [f"t{i}" for i in range(count)]
        assert {visit for _, visit in part} == {epoch}
    indices = [(task.id, visit * size + at) for task, visit in drawn for at in range(size)]
    assert len(set(indices)) == len(indices)


def test_the_order_depends_on_seed_and_epoch() -> None:
    orders = {
        tuple(task.id for task, _ in TaskStream(questions(8), seed).take(8 * epoch, 8))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


async def test_a_group_is_the_rollouts_of_one_task_in_their_order(tmp_path: Path) -> None:
    tasks = questions(5)
    engine = Told([t.question for t in tasks], mixed)
    drawn = await make_sampler(tasks, engine, tmp_path).draw(1, 0, 3, refills=0)
    assert drawn.position == 3 and len(drawn.groups) == 3
    for group in drawn.groups:
        assert {t.task_id for t, _ in group.rollouts} == {group.task.id}
        assert [t.sample for t, _ in group.rollouts] == [0, 1, 2, 3]
        assert group.scores == [float(t.answer or "") for t, _ in group.rollouts]
    later = await make_sampler(tasks, engine, tmp_path).draw(2, 5, 5, refills=0)
    assert [t.sample for t, _ in later.groups[0].rollouts] == [4, 5, 6, 7]
    assert len(set(engine.keys)) == len(engine.keys), "no draw is made twice"


def account_of(drawn: Drawn) -> dict[str, Any]:
    """What the record of an update says of its groups."""
    names = ("groups", "groups_used", "groups_flat", "groups_solved", "refills", "rollouts")
    record = rollout_record(drawn)
    return {name: record[name] for name in names}


def test_attempts_at_the_reward_are_counted() -> None:
    parts = [Part(0.0, "it lied", suspect=True), Part(0.0), Part(None, "who knows"), Part(1.0)]
    rollouts = [ScoredRollout(made(WHOLE), Scored(part.score, {"tests": part})) for part in parts]
    drawn = Drawn(0, [Group(Task("q?", id="t0"), rollouts)])
    assert rollout_record(drawn)["suspect_rate"] == 0.25
    assert rollout_record(Drawn(0))["suspect_rate"] == 0.0


async def test_flat_groups_are_replaced_in_a_limited_number_of_rounds(tmp_path: Path) -> None:
    tasks = questions(12)
    order = [task for task, _ in TaskStream(tasks, 3).take(0, 12)]
    lively = [order[1].question, order[4].question, order[9].question]
    engine = Told([t.question for t in tasks], flat_unless(*lively))
    drawn = await make_sampler(tasks, engine, tmp_path).draw(7, 0, 3, refills=2)
    # 3 tasks, of which 1 is lively; 2 more, 1 lively; 1 more, flat.
    assert [g.task for g in drawn.groups] == [order[1], order[4]]
    assert drawn.position == 6 and drawn.refills == 2
    assert account_of(drawn) == {
        "groups": 6,
        "groups_used": 2,
        "groups_flat": 4,
        "groups_solved": 0,
        "refills": 2,
        "rollouts": 24,
    }
    names = [p.name for p in sorted(tmp_path.iterdir())]
    assert names == ["0000007-0.jsonl", "0000007-1.jsonl", "0000007-2.jsonl"]


async def test_no_round_is_wasted_when_nothing_is_missing(tmp_path: Path) -> None:
    tasks = questions(4)
    engine = Told([t.question for t in tasks], flat_unless(*[t.question for t in tasks]))
    drawn = await make_sampler(tasks, engine, tmp_path).draw(1, 0, 3, refills=5)
    assert drawn.refills == 0 and len(drawn.groups) == 3 and not drawn.dropped


async def test_without_refills_flat_groups_stay(tmp_path: Path) -> None:
    tasks = questions(4)
    engine = Told([t.question for t in tasks], lambda question, draw: "1")
    drawn = await make_sampler(tasks, engine, tmp_path).draw(1, 0, 4, refills=0)
    account = account_of(drawn)
    assert account["groups_used"] == account["groups_flat"] == account["groups_solved"] == 4


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, None]), min_size=2, max_size=4)))
def test_the_account_adds_up(scores: list[list[float | None]]) -> None:
    groups = [group_of(*((made("a"), score) for score in each)) for each in scores]
    drawn = Drawn(0)
    for group in groups:
        (drawn.dropped if group.flat else drawn.groups).append(group)
    account = account_of(drawn)
    assert account["groups"] == len(scores) == account["groups_used"] + len(drawn.dropped)
    assert account["groups_flat"] == len(drawn.dropped) >= account["groups_solved"]
    assert account["rollouts"] == sum(map(len, scores))
    for group, each in zip(groups, scores, strict=True):
        known = {score for score in each if score is not None}
        assert group.flat == (len(known) < 2) and group.solved == (set(each) == {1.0})


def test_what_the_environment_ended_has_no_score() -> None:
    failed = made("a", stop=StopReason.TOOL_FAILED)
    group = group_of((failed, 0.0), (made("b"), 1.0), (made("c"), None))
    assert group.scores == [None, 1.0, None]
    assert group.flat and not group.solved


def test_a_group_is_flat_by_those_that_take_part() -> None:
    """Otherwise dynamic sampling would keep what teaches nothing."""
    void, cut = made("no tag", WHOLE.format("a")), made("<think>cut", stop=StopReason.TOKENS)
    good = made(WHOLE.format("a"))
    group = group_of((good, 1.0), (good, 1.0), (void, 0.0), (cut, 0.0))
    assert not group.flat
    assert not replace(group, without=frozenset({"void"})).flat
    assert not replace(group, without=frozenset({"truncated"})).flat
    sifted = replace(group, without=frozenset({"void", "truncated"}))
    assert sifted.flat and not sifted.solved


async def test_a_group_that_is_flat_without_its_void_turns_is_replaced(tmp_path: Path) -> None:
    tasks = questions(12)
    order = [task for task, _ in TaskStream(tasks, 3).take(0, 12)]

    def say(question: str, draw: int) -> str:
        if question == order[0].question:  # here only void turns make the scores different
            return "1" if draw % 2 else "void"
        return str(draw % 97 / 97)

    engine = Told([t.question for t in tasks], say)
    how: dict[str, Any] = {"budget": Budget(malformed=0), "opened": opened(Failed())}
    for without, used in ((set(), order[:2]), ({"void"}, order[1:3])):
        sampler = make_sampler(tasks, engine, tmp_path / str(len(without)), without=without, **how)
        drawn = await sampler.draw(1, 0, 2, refills=2)
        assert [group.task for group in drawn.groups] == used


async def test_what_the_clock_ended_has_no_score_and_is_tried_again_by_the_same_command(
    tmp_path: Path,
) -> None:
    tasks = questions(3)
    slow = Told([t.question for t in tasks], lambda question, draw: ("hang", "1")[draw % 2])
    how: dict[str, Any] = {"budget": Budget(seconds=0.2), "opened": opened(Failed())}
    drawn = await make_sampler(tasks, slow, tmp_path, **how).draw(1, 0, 3, refills=0)
    ended = [r for group in drawn.all for r in group.rollouts]
    late = [r for r in ended if r.trajectory.stop is StopReason.TIME]
    assert late and all(r.score is None for r in late)
    assert rollout_record(drawn)["environment_rate"] == len(late) / 12
    assert rollout_record(drawn)["truncated_rate"] == 0
    mended = Told([t.question for t in tasks], mixed)
    drawn = await make_sampler(tasks, mended, tmp_path).draw(1, 0, 3, refills=0)
    assert len(mended.keys) == len(late)
    assert all(None not in group.scores for group in drawn.groups)


async def interrupt(tasks: list[Any], directory: Path, most: int) -> Told:
    engine = Told([t.question for t in tasks], mixed)
    engine.most = most
    work = asyncio.create_task(make_sampler(tasks, engine, directory).draw(1, 0, 3, refills=0))
    while len(engine.keys) < most:
        await asyncio.sleep(0)
    for _ in range(20):  # what was answered is written down
        await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    return engine


async def test_rollouts_of_the_same_weights_are_taken_over_after_a_kill(tmp_path: Path) -> None:
    tasks = questions(5)
    before = await interrupt(tasks, tmp_path, most=7)
    engine = Told([t.question for t in tasks], mixed)
    drawn = await make_sampler(tasks, engine, tmp_path).draw(1, 0, 3, refills=0)
    assert len(before.keys) == 7 and len(engine.keys) == 5
    assert not set(before.keys) & set(engine.keys)
    whole = Told([t.question for t in tasks], mixed)
    expected = await make_sampler(tasks, whole, tmp_path / "whole").draw(1, 0, 3, refills=0)
    assert drawn == expected
    files = (tmp_path / "0000001-0.jsonl", tmp_path / "whole" / "0000001-0.jsonl")
    assert files[0].read_bytes() == files[1].read_bytes()


async def test_rollouts_of_other_weights_are_not_taken_over(tmp_path: Path) -> None:
    tasks = questions(5)
    await interrupt(tasks, tmp_path, most=7)
    engine = Told([t.question for t in tasks], mixed)
    engine.weights = "update-0-of-another-try"
    drawn = await make_sampler(tasks, engine, tmp_path).draw(1, 0, 3, refills=0)
    assert len(engine.keys) == 12
    versions = {t.weights for g in drawn.all for t, _ in g.rollouts}
    assert versions == {"update-0-of-another-try"}
    kept = load_trajectories(tmp_path / "0000001-0.jsonl")
    assert len(kept) == 12 and {t.weights for t in kept} == versions


async def test_a_torn_last_line_costs_one_rollout(tmp_path: Path) -> None:
    tasks = questions(5)
    await interrupt(tasks, tmp_path, most=7)
    path = tmp_path / "0000001-0.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    engine = Told([t.question for t in tasks], mixed)
    drawn = await make_sampler(tasks, engine, tmp_path).draw(1, 0, 3, refills=0)
    assert len(engine.keys) == 6 and account_of(drawn)["rollouts"] == 12


async def test_what_the_environment_ended_is_tried_again_by_the_same_command(
    tmp_path: Path,
) -> None:
    tasks = questions(3)
    broken = Told([t.question for t in tasks], lambda question, draw: "fail")
    drawn = await make_sampler(tasks, broken, tmp_path).draw(1, 0, 3, refills=0)
    assert all(group.scores == [None] * 4 for group in drawn.groups)
    mended = Told([t.question for t in tasks], mixed)
    drawn = await make_sampler(tasks, mended, tmp_path).draw(1, 0, 3, refills=0)
    assert len(mended.keys) == 12
    assert all(None not in group.scores for group in drawn.groups)


async def test_a_refill_that_asks_for_other_tasks_than_before_the_kill_gets_them(
    tmp_path: Path,
) -> None:
    """A judge that works again finds other groups flat, so the second round has other tasks."""
    tasks = questions(8)
    engine = Told([t.question for t in tasks], lambda question, draw: "none")
    await make_sampler(tasks, engine, tmp_path).draw(1, 0, 3, refills=1)
    (tmp_path / "0000001-0.jsonl").unlink()
    order = [task for task, _ in TaskStream(tasks, 3).take(0, 8)]
    lively = flat_unless(order[0].question, order[1].question, order[3].question)
    engine = Told([t.question for t in tasks], lively)
    drawn = await make_sampler(tasks, engine, tmp_path).draw(1, 0, 3, refills=1)
    assert drawn.position == 4 and len(engine.keys) == 12, "the task of the refill was there"
    assert len(load_trajectories(tmp_path / "0000001-1.jsonl")) == 4


async def test_a_reward_that_is_no_number_names_task_and_reward_and_loses_no_rollout(
    tmp_path: Path,
) -> None:
    tasks = questions(2)
    engine = Told([t.question for t in tasks], mixed)
    (env,), reward = opened().environments, RewardSettings("test_groups:no_number")
    async with env.open(reward=reward) as judged:
        with pytest.raises(
            ConfigError, match=r"reward 'test_groups:no_number', on task t\d: found nan"
        ):
            await make_sampler(tasks, engine, tmp_path, opened=judged).draw(1, 0, 2, refills=0)
    assert len(load_trajectories(tmp_path / "0000001-0.jsonl")) == 8
    again = Told([t.question for t in tasks], mixed)
    await make_sampler(tasks, again, tmp_path).draw(1, 0, 2, refills=0)
    assert again.keys == []


def no_number(task: Any, trajectory: Any) -> float:
    return float("nan")


@pytest.mark.parametrize("wanted", [1, 2, 3, 5])
async def test_processes_share_the_tasks_and_all_get_all_groups_in_order(
    tmp_path: Path, wanted: int
) -> None:
    tasks = questions(7)
    alone = Told([t.question for t in tasks], mixed)
    expected = await make_sampler(tasks, alone, tmp_path / "alone").draw(1, 0, wanted, refills=2)
    engines = [Told([t.question for t in tasks], mixed) for _ in range(2)]

    def draw(processes: Processes) -> Drawn:
        sampler = make_sampler(tasks, engines[processes.index], tmp_path, processes=processes)
        return asyncio.run(sampler.draw(1, 0, wanted, refills=2))

    found = await asyncio.to_thread(side_by_side, 2, draw)
    assert found == [expected, expected]
    assert sorted([*engines[0].keys, *engines[1].keys]) == sorted(alone.keys)
    assert {p.name for p in tmp_path.glob("0000001-0*.jsonl")} == {
        "0000001-0.0-of-2.jsonl",
        "0000001-0.1-of-2.jsonl",
    }


@pytest.mark.parametrize(
    ("turns", "stop", "void"),
    [
        ((WHOLE.format("a"),), StopReason.ANSWERED, False),
        ((CALL, WHOLE.format("a")), StopReason.ANSWERED, False),
        (("<think>only", WHOLE.format("a")), StopReason.ANSWERED, True),
        ((CALL, "<think>only</think>"), StopReason.MALFORMED, True),
        ((CALL, "<think>cut in the mid"), StopReason.TOKENS, False),
        (("no tag", "<think>cut in the mid"), StopReason.TOKENS, True),
        ((), StopReason.CONTEXT, False),
    ],
)
def test_a_void_turn_neither_calls_nor_answers_and_was_not_cut(
    turns: tuple[str, ...], stop: StopReason, void: bool
) -> None:
    assert has_void_turn(made(*turns, stop=stop)) == void


async def test_what_is_drawn_is_what_the_files_say(tmp_path: Path) -> None:
    tasks = questions(3)
    engine = Told([t.question for t in tasks], mixed)
    drawn = await make_sampler(tasks, engine, tmp_path).draw(1, 0, 3, refills=0)
    lines = (tmp_path / "0000001-0.jsonl").read_text().splitlines()
    stored = Counter((r["task_id"], r["sample"]) for r in map(json.loads, lines))
    assert stored == {(t.task_id, t.sample): 1 for g in drawn.all for t, _ in g.rollouts}
