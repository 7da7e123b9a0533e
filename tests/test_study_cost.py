"""The cost study: intervals, who pays for failures, and how the prompts matter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa.distillation.convert import convert
from coa.engines.scripted import ByteCodec
from coa.environment import shipped_home
from coa.environments import make_tasks
from coa.errors import RecordError, UsageError
from coa.evaluation.compare import Resamples
from coa.grammar.prompt import PromptKind
from coa.io.runs import dumps
from coa.lab.study_cost import (
    PEER_CALLS,
    PROMPTS,
    Case,
    CostSide,
    CostStudy,
    Files,
    TokenCounter,
    compare,
    cost_lines,
    peer_prompts,
    read_cases,
    study_cost,
    study_files,
)
from coa.recording.agents import agents_of
from coa.recording.budget import Price
from coa.recording.episode import AgentSpec, Episode, Message, Tokens
from coa.tasks import TaskSet
from scripts import TOOLBOX_OF, episodes_of

BYTES = TokenCounter(ByteCodec())
FEW = 200
"""Resamples: enough for the shape of a result."""


# -- intervals -------------------------------------------------------------------------------


def test_ratios_are_of_sums_and_pairing_takes_out_what_both_share() -> None:
    hard = [float(10 + 7 * i % 90) for i in range(60)]
    table = Resamples(
        {"a": hard, "half": [x / 2 for x in hard], "one": [1.0] * 60, "b": hard[::-1]},
        resamples=FEW,
    )
    mean = table.ratio("a", "one")
    assert mean.value == pytest.approx(sum(hard) / 60)
    assert mean.low < mean.value < mean.high and mean.n == 60
    halved = table.reduction(("a", "one"), ("half", "one"))
    assert halved == pytest.approx((0.5, 0.5, 0.5, 60))  # the same in every resample
    unlike = table.reduction(("a", "one"), ("b", "one"))
    assert unlike.value == pytest.approx(0.0) and unlike.low < -0.05 < 0.05 < unlike.high


def test_the_same_seed_gives_the_same_interval_and_another_one_does_not() -> None:
    columns = {"a": [1.0, 5.0, 2.0, 9.0, 4.0], "one": [1.0] * 5}
    found = [Resamples(columns, seed, FEW).ratio("a", "one") for seed in (1, 1, 2)]
    assert found[0] == found[1]
    assert found[0].value == found[2].value and found[0] != found[2]


def test_an_interval_is_that_of_the_normal_approximation_where_that_holds() -> None:
    values = [float(i % 10) for i in range(400)]
    found = Resamples({"a": values, "one": [1.0] * 400}, resamples=4000).ratio("a", "one")
    mean = sum(values) / 400
    error = (sum((x - mean) ** 2 for x in values) / 400 / 400) ** 0.5
    assert found.low == pytest.approx(mean - 1.96 * error, abs=0.03)
    assert found.high == pytest.approx(mean + 1.96 * error, abs=0.03)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.booleans()), min_size=1, max_size=30))
def test_resamples_in_which_nothing_is_solved_do_no_harm(cases: list[tuple[float, bool]]) -> None:
    cases = [*cases, (1.0, True)]
    columns = {"cost": [c for c, _ in cases], "solved": [float(s) for _, s in cases]}
    found = Resamples(columns, resamples=20).ratio("cost", "solved")
    assert found.low <= found.high and found.value >= 0


def test_what_hardly_anything_is_solved_with_has_no_upper_bound() -> None:
    solved = [1.0, 1.0] + [0.0] * 98
    columns = {"cost": [1.0] * 100, "solved": solved, "one": [1.0] * 100}
    table = Resamples(columns, resamples=1000)
    found = table.times(("cost", "solved"), ("cost", "one"))
    assert found.value == 50.0 and found.low > 10 and found.high == float("inf")
    assert table.reduction(("cost", "one"), ("cost", "solved")).low == -float("inf")


# -- the comparison --------------------------------------------------------------------------


def said() -> Episode:
    """An episode of one call, for cases whose costs are made up."""
    return Episode(
        "t-1", "q", "test", [AgentSpec("ann", "planner", "p")], [Message("ann", "b", "x")]
    )


def side(tokens: int, *, solved: bool, tool_calls: int = 1) -> CostSide:
    return CostSide(Tokens(tokens, 0, 0), 0, 0, 1, tool_calls, solved)


def made_case(team_tokens: int, chain_tokens: int | None, *, solved: bool = True) -> Case:
    chains: dict[PromptKind, CostSide] = {}
    if chain_tokens is not None:
        chains = {kind: side(chain_tokens, solved=solved) for kind in PROMPTS}
    return Case(said(), side(team_tokens, solved=solved), chains)


def reduction(found: dict[str, dict[str, dict[str, dict[str, float]]]]) -> float:
    return found["compact"]["tokens.none"]["reduction"]["value"]


def test_each_cache_has_its_own_tokens_and_its_own_money() -> None:
    spent = CostSide(
        Tokens(1000, 400, 10), system=300, opening=100, model_calls=3, tool_calls=2, solved=True
    )
    found = spent.measures(Price(input=1e6, cached=1e5, output=2e6))
    assert found["tokens.none"] == 1010 and found["money.none"] == 1000 + 20
    assert found["tokens.task"] == 610 and found["money.task"] == 600 + 40 + 20
    assert found["tokens.warm"] == 510 and found["money.warm"] == 500 + 50 + 20
    assert (found["tool_calls"], found["solved"]) == (2, 1)


def test_every_task_is_paid_for_and_only_solved_ones_count() -> None:
    cases = [made_case(100, 25), made_case(300, 75), made_case(200, 60, solved=False)]
    found = compare(cases, BYTES, resamples=FEW)
    tokens = found["per_solved"]["compact"]["tokens.none"]
    assert tokens["team"]["value"] == 600 / 2
    assert tokens["chain"]["value"] == 160 / 2
    assert found["solved"] == {"team": 2, "chain": 2}
    assert found["paired_tasks"] == 2
    assert reduction(found["paired"]) == 0.75


def test_a_task_without_a_chain_is_charged_like_the_team_and_not_solved_by_it() -> None:
    cases = [made_case(100, 20), made_case(100, 20), made_case(100, None)]
    found = compare(cases, BYTES, resamples=FEW)
    assert found["solved"] == {"team": 3, "chain": 2}
    assert found["solved_and_converted"]["value"] == pytest.approx(2 / 3, rel=1e-5)
    tokens = found["per_solved"]["compact"]["tokens.none"]
    assert (tokens["team"]["value"], tokens["chain"]["value"]) == (100, 70)
    assert reduction(found["paired"]) == 0.8


def test_a_changed_number_of_tool_calls_is_seen() -> None:
    cases = [made_case(100, 20), made_case(100, 20)]
    assert compare(cases, BYTES, resamples=FEW)["tool_calls_changed"] == 0
    dropped = {kind: side(20, solved=True, tool_calls=0) for kind in PROMPTS}
    cases[1] = replace(cases[1], chains=dropped)
    assert compare(cases, BYTES, resamples=FEW)["tool_calls_changed"] == 1


def test_tasks_are_grouped_by_their_tool_calls_where_there_are_enough() -> None:
    cases = [made_case(100, 20)] * 20 + [made_case(100, 50)] * 3
    longer = {kind: side(40, solved=True, tool_calls=5) for kind in PROMPTS}
    cases += [Case(said(), side(100, solved=True, tool_calls=5), longer)] * 25
    cases += [Case(said(), side(100, solved=True, tool_calls=6), longer)] * 19
    rows = compare(cases, BYTES, resamples=FEW)["by_tool_calls"]
    assert [(row["tool_calls"], row["n"]) for row in rows] == [(1, 23), (5, 25)]
    assert rows[1]["reduction"]["none"]["value"] == 0.6


def test_nothing_that_both_solve_is_nothing_to_compare() -> None:
    with pytest.raises(UsageError, match=r"no task was solved by the team and has a chain"):
        compare([made_case(100, None), made_case(100, 20, solved=False)], BYTES)


def recorded(folder: Path, sets: tuple[str, ...] = ("atlas-mhqa",), n: int = 10) -> Files:
    """Tasks, episodes and conversions as the stages write them, made without processes."""
    files = Files(folder / "tasks.jsonl", folder / "episodes.jsonl", folder / "distilled")
    tasks = TaskSet(tuple(task for name in sets for task in make_tasks(name, "train", n, seed=4)))
    tasks.save(files.tasks)
    episodes = episodes_of(tasks)
    files.episodes.write_text("".join(dumps(each.to_json()) + "\n" for each in episodes))
    lines = []
    for task, episode in zip(tasks, episodes, strict=True):
        grammar = shipped_home(task.meta).value()
        chain = convert(episode, TOOLBOX_OF(task).bind(grammar))
        record = {"key": task.id, "task_id": task.id, "trajectory": chain.to_json()}
        lines.append(dumps({**record, "score": 1.0, "replay": "", "reason": "", "detail": ""}))
    files.distilled.mkdir()
    (files.distilled / "converted.jsonl").write_text("\n".join(lines) + "\n")
    return files


def rewrite(files: Files, line: int, **changed: object) -> None:
    path = files.distilled / "converted.jsonl"
    lines = path.read_text().splitlines()
    lines[line] = json.dumps(json.loads(lines[line]) | changed)
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("sets", [("atlas-mhqa",), ("atlas-mhqa", "atlas-web")])
def test_the_agents_prompts_decide_and_our_own_length_gives_our_own_figure(
    tmp_path: Path, sets: tuple[str, ...]
) -> None:
    result = study_files({"mine": recorded(tmp_path, sets)}, codec=ByteCodec(), resamples=FEW)
    found = result["sets"]["mine"]
    rows = {row["prompts"]: row for row in found["sensitivity"]}
    assert list(rows) == ["0x", "0.5x", "1x", "2x", "4x", "smolagents"]
    for kind in PROMPTS:
        for caching in ("none", "task"):
            saved = [rows[f"{f}x"]["reduction"][kind][caching]["value"] for f in (0, 0.5, 1, 2, 4)]
            assert saved == sorted(saved)
            assert saved[2] == found["paired"][kind][f"tokens.{caching}"]["reduction"]["value"]
    assert rows["0x"]["tokens_a_call"] == 0
    assert found["tool_calls_changed"] == 0
    makeup, lengths = found["makeup"]["team"], found["prompts"]["team"].values()
    system = sum(part["tokens"] * part["calls"] for part in lengths)
    assert makeup["system"] == pytest.approx(system, rel=0.01)  # calls have two decimals
    parts = sum(makeup[name] for name in ("system", "context", "written"))
    team_tokens = found["paired"]["compact"]["tokens.none"]["team"]["value"]
    assert parts == pytest.approx(team_tokens, rel=1e-4)


def test_prompts_as_long_as_the_claim_needs_give_the_claimed_saving(tmp_path: Path) -> None:
    files = recorded(tmp_path)
    result = study_files({"mine": files}, codec=ByteCodec(), resamples=FEW)
    needed = result["sets"]["mine"]["prompt_tokens_for_claim"]
    cases, _ = read_cases(files, BYTES)
    both = [case for case in cases if case.paired]
    for kind in PROMPTS:
        length = needed[kind]["task"]
        spent = sum(BYTES.team(case.episode, lambda _, n=length: n).total_cached for case in both)
        chain = sum(case.chain(kind).tokens.total_cached for case in both)
        assert 1 - chain / spent == pytest.approx(result["claim"], abs=1e-3)


def test_reasons_for_missing_chains_are_counted(tmp_path: Path) -> None:
    files = recorded(tmp_path)
    rewrite(files, 0, trajectory=None, reason="no answer")
    rewrite(files, 1, replay="turns")
    path = files.distilled / "converted.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    _, missing = read_cases(files, BYTES)
    assert missing == {"no answer": 1, "does not replay": 1, "was not distilled": 1}


def test_a_repeated_chain_counts_once(tmp_path: Path) -> None:
    files = recorded(tmp_path)
    once = study_files({"a": files}, codec=ByteCodec(), resamples=FEW)
    path = files.distilled / "converted.jsonl"
    path.write_text(path.read_text() * 2)
    assert study_files({"a": files}, codec=ByteCodec(), resamples=FEW) == once


def test_a_task_without_an_episode_is_named(tmp_path: Path) -> None:
    files = recorded(tmp_path)
    files.episodes.write_text("\n".join(files.episodes.read_text().splitlines()[1:]) + "\n")
    with pytest.raises(RecordError, match=r"has no episode of task .* Every task counts"):
        read_cases(files, BYTES)


def test_a_task_without_gold_is_named(tmp_path: Path) -> None:
    files = recorded(tmp_path)
    TaskSet(tuple(task.public() for task in TaskSet.load(files.tasks))).save(files.tasks)
    with pytest.raises(RecordError, match=r"has no gold, so nobody knows whether it was solved"):
        read_cases(files, BYTES)


def test_a_directory_that_was_not_distilled_is_named(tmp_path: Path) -> None:
    files = recorded(tmp_path)
    with pytest.raises(UsageError, match=r"converted.jsonl: no such file"):
        read_cases(replace(files, distilled=tmp_path), BYTES)


# -- the peer, and the whole -----------------------------------------------------------------


def test_every_part_of_our_teams_has_a_call_of_the_peer() -> None:
    calls = peer_prompts()["tokens"]
    for team in (
        agents_of("wiki"),
        agents_of("web"),
        agents_of("calculation"),
        agents_of("coding"),
    ):
        for agent in team:
            assert sum(calls[PEER_CALLS[agent.part]].values()) > 0


def test_the_study_makes_its_own_tasks_and_says_the_same_again(tmp_path: Path) -> None:
    small = CostStudy(n=8, sets=("atlas-mhqa",))
    first = study_cost(small, tmp_path, codec=ByteCodec(), resamples=FEW)
    written = (tmp_path / "cost.json").read_bytes()
    again = study_cost(small, tmp_path, codec=ByteCodec(), resamples=FEW)
    assert again == first and (tmp_path / "cost.json").read_bytes() == written
    assert first["sets"]["atlas-mhqa"]["n"] == 8
    text = "\n".join(cost_lines(first))
    assert "atlas-mhqa: 8 tasks" in text and "example prices" in text
    assert "the paper claims 84.6% fewer tokens" in text
    dearer = replace(small, prices="1,1,1")
    priced = study_cost(dearer, tmp_path, codec=ByteCodec(), resamples=FEW)
    assert "\nprices, for a million tokens: 1 read, 1 from a" in "\n".join(cost_lines(priced))
    for caching in ("none", "task"):
        money = priced["sets"]["atlas-mhqa"]["paired"]["full"][f"money.{caching}"]
        tokens = priced["sets"]["atlas-mhqa"]["paired"]["full"]["tokens.none"]
        assert money["team"]["value"] == pytest.approx(tokens["team"]["value"] / 1e6, rel=1e-4)


def test_an_unknown_set_is_named_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'atlas' is not a task set; expected atlas-mhqa"):
        study_cost(CostStudy(sets=("atlas",)), tmp_path)
    assert not list(tmp_path.iterdir())
