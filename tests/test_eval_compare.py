"""`coa compare`: paired figures by hand, what cannot be compared, and chains beside each other."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from coa.cli import main
from coa.errors import RecordError, UsageError
from coa.evaluation.compare import Measured, against, compare, load_measured, print_sides, spread
from coa.evaluation.run import save_summary, summarise
from coa.evaluation.spending import Tariff
from coa.io.runs import Json
from coa.recording.budget import Price
from coa.rewards import Scored
from coa.tasks import Task
from coa.trajectory import Author, Segment, StopReason, Trajectory, Usage, save_trajectories
from coa.view.terminal import print_comparison, print_summary

QUESTION = "Which city is the capital of the country in which the town of Osaka lies, today?"
SEEN = "[1] Japan lies in East Asia. The capital city of Japan is Tokyo, on the island of Honshu. "
TURN = (
    "<think>I need it.</think><plan>1. look</plan><think>Go.</think><wiki_search>{}</wiki_search>"
)


def chain(task: str, sample: int, answer: str | None, tokens: int) -> Trajectory:
    said = f"<think>It says so.</think><answer>{answer}</answer>" if answer else "no tag at all"
    made = Trajectory(task, QUESTION, "mhqa", tools=["wiki_search"], sample=sample, answer=answer)
    made.stop = StopReason.ANSWERED if answer else StopReason.MALFORMED
    made.usage = Usage(prompt_tokens=tokens, sampled_tokens=5, tool_calls=1)
    made.segments = [
        Segment(Author.PROMPT, "p"),
        Segment(Author.MODEL, TURN.format("capital of Japan")),
        Segment(Author.ENV, f"\n<observation>{SEEN * 4}</observation>\n"),
        Segment(Author.MODEL, said),
    ]
    return made


def finished(path: Path, scores: Json, tokens: int = 95, reward: str = "exact") -> Path:
    """A run directory: task -> scores of its samples; a task's first letter is its family."""
    rows, chains = list[Json](), list[Trajectory]()
    for task, found in scores.items():
        for sample, score in enumerate(found):
            groups = {"family": task[0]}
            rows.append({"task_id": task, "sample": sample, "score": score, "groups": groups})
            chains.append(chain(task, sample, "Tokyo" if score else None, tokens))
    save_trajectories(path / "trajectories.jsonl", chains)
    save_summary(path, {"reward": reward}, rows)
    return path


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    first = finished(tmp_path / "first", {"a1": [0], "a2": [1], "b1": [0], "b2": [1]})
    other = finished(tmp_path / "other", {"b2": [1], "b1": [1], "a2": [0], "a1": [1]}, tokens=195)
    return [first, other]


def test_the_figures_by_hand(pair: list[Path]) -> None:
    result = compare(pair)
    base, row = result["runs"]
    assert (base["tokens_per_task"], base["tokens_per_solved"]) == (100.0, 200.0)
    assert (row["won"], row["lost"]) == (["a1", "b1"], ["a2"])
    assert (row["wins"], row["losses"], row["ties"], row["p_value"]) == (2, 1, 1, 1.0)
    assert (row["difference"], row["tokens_difference"]) == (0.25, 100.0)
    assert row["tokens_difference_ci95"] == [100.0, 100.0]
    assert row["by_family"] == {
        "a": {"n": 2, "wins": 1, "losses": 1, "difference": 0.0},
        "b": {"n": 2, "wins": 1, "losses": 0, "difference": 0.5},
    }
    ratio = row["tokens_per_solved_ratio"]
    assert ratio["value"] == round(800 / 3 / 200, 4)
    assert ratio["ci95"][0] <= ratio["value"] <= ratio["ci95"][1]


def test_a_ratio_of_equal_costs_is_one_and_without_a_solution_there_is_none() -> None:
    names = [f"t{n}" for n in range(40)]
    one = Measured(
        "a", "exact", {n: [float(i % 2)] for i, n in enumerate(names)}, dict.fromkeys(names, 7.0)
    )
    assert against(one, one)["tokens_per_solved_ratio"] == {"value": 1.0, "ci95": [1.0, 1.0]}
    double = Measured("b", "exact", one.scores, dict.fromkeys(names, 14.0))
    assert against(one, double)["tokens_per_solved_ratio"] == {"value": 2.0, "ci95": [2.0, 2.0]}
    unsolved = Measured("c", "exact", {name: [0.0] for name in names}, one.tokens)
    assert against(one, unsolved)["tokens_per_solved_ratio"] is None
    assert "tokens_difference" not in against(one, Measured("d", "exact", one.scores))


def test_samples_of_a_task_are_one_pair(tmp_path: Path) -> None:
    first = finished(tmp_path / "first", {"a1": [0, 1], "b1": [1, 1]})
    other = finished(tmp_path / "other", {"a1": [1, 1, 1, 1], "b1": [0, 1, 1, 0]})
    row = compare([first, other])["runs"][1]
    assert (row["wins"], row["losses"], row["difference"]) == (1, 1, 0.0)
    assert load_measured(other).mean("b1") == 0.5


def test_the_tasks_that_are_shown_are_spread_over_families() -> None:
    families = {"a1": "a", "a2": "a", "a3": "a", "b1": "b", "c1": "c", "c2": "c"}
    run = Measured("x", "exact", {}, {}, families)
    assert spread(families, run, 4) == ["a1", "b1", "c1", "a2"]
    assert spread(families, run, 99) == ["a1", "b1", "c1", "a2", "c2", "a3"]


# -- what cannot be compared -----------------------------------------------------------------


def test_what_cannot_be_compared_is_said_in_one_line(pair: list[Path], tmp_path: Path) -> None:
    def refused(other: Path) -> str:
        with pytest.raises(UsageError) as error:
            compare([pair[0], other])
        assert "\n" not in str(error.value)
        return str(error.value)

    fewer = finished(tmp_path / "fewer", {"a1": [0], "zz": [0]})
    assert "fewer and " in refused(fewer) and "differ in 4 tasks; compare" in refused(fewer)
    other = finished(tmp_path / "f1", {"a1": [0]}, reward="f1")
    assert "the runs have different rewards: exact (" in refused(other)
    for path, gold in zip(pair, ("1", "2"), strict=True):
        (path / "manifest.json").write_text(f'{{"stage": "eval", "inputs": {{"tasks": "{gold}"}}}}')
    assert len(compare(pair)["runs"]) == 2  # in another order their hashes differ anyway
    same = finished(tmp_path / "same", {"a1": [0], "a2": [1], "b1": [0], "b2": [1]})
    (same / "manifest.json").write_text((pair[1] / "manifest.json").read_text())
    assert "have tasks of the same ids with other contents" in refused(same)
    (same / "manifest.json").write_text('{"stage": "eval", "recipe": {"rewards": {"judge": "x"}}}')
    assert "have the reward 'exact' with other settings" in refused(same)
    (pair[1] / "summary.json").unlink()
    (pair[1] / "manifest.json").write_text('{"stage": "eval"}')
    assert "is not finished, it has 4 rollouts so far. Give the same `coa eval`" in refused(pair[1])
    (pair[1] / "manifest.json").write_text('{"stage": "rl"}')
    assert refused(pair[1]).endswith("other: is a run of 'rl', expected one of `coa eval`.")
    assert "none: no scores.jsonl; is it the --out of" in refused(tmp_path / "none")


def test_a_damaged_line_is_named(pair: list[Path]) -> None:
    with (pair[1] / "scores.jsonl").open("a") as file:
        file.write('{"task_id": "x"}\n')
    with pytest.raises(RecordError, match=r"other/scores\.jsonl:5: no field 'score'"):
        compare(pair)


# -- for people ------------------------------------------------------------------------------


def shown(width: int, show: Callable[[Console], None]) -> list[str]:
    out = Console(file=io.StringIO(), width=width, highlight=False, markup=False, soft_wrap=True)
    show(out)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue().splitlines()


def test_the_table_says_what_matters(pair: list[Path]) -> None:
    lines = shown(200, lambda out: print_comparison(out, compare(pair)))
    text = "\n".join(lines)
    for part in (
        "100 tokens per task, 200 per solved task",
        "+25.0 points [",
        "wins 2 losses 1 p=1",
        "+100 tokens per task [+100, +100]",
        "1.33 times the tokens per solved task [",
    ):
        assert part in text
    assert re.search(r"^    b +n=2    wins 1   losses 0   \+50\.0 points$", text, re.M)


def test_a_summary_of_several_samples_has_a_line_for_each_figure() -> None:
    tasks = [Task(f"{n}?", ("a",), id=f"t{n}", meta={"hops": n}) for n in range(2)]
    made = [chain(task.id, sample, "a", 95) for task in tasks for sample in range(2)]
    scored = [Scored(score) for score in (1.0, 0.0, 0.0, 0.0)]
    summary, _ = summarise(
        tasks,
        made,
        scored,
        tariff=Tariff(Price(1.0, 2.0), "EUR"),
        groups_of=lambda task: {"hops": str(task.meta["hops"])},
    )
    seconds = {"n": 4, "mean": 1.5, "p50": 1.0, "p95": 3.0, "concurrency": 8}
    text = "\n".join(shown(120, lambda out: print_summary(out, summary, "runs/x", seconds)))
    for part in (
        "accuracy  25.0% [",
        "pass@1   25.0% [",
        "pass@2   50.0% [",
        "avg@2   25.0% [",
        "majority   50.0% [",
        "best by first   50.0% [",
        "tokens_per_task  100.0 with a cache, 100.0 without",
        "tokens_per_solved  400.0 with a cache",
        "calls by tool  wiki_search 1",
        "money  0.000105 per task, 0.00042 per solved task EUR",
        "seconds per task  mean 1.5, p50 1, p95 3, up to 4 at once",
        "hops 1    0.0% [",
    ):
        assert part in text, part
    alone, _ = summarise(tasks, made[::2], scored[::2])
    text = "\n".join(shown(120, lambda out: print_summary(out, alone, "runs/x")))
    assert "pass@" not in text and "money" not in text and "seconds" not in text


@pytest.mark.parametrize("width", [100, 200])
def test_chains_stand_beside_each_other_within_the_terminal(pair: list[Path], width: int) -> None:
    lines = shown(width, lambda out: print_sides(out, pair, compare(pair), 1))
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert "other won 2, 1 shown" in text and "other lost 1, 1 shown" in text
    assert text.count(QUESTION) == 2
    for row in (line for line in lines if "plan: 1. look" in line):
        assert row.index("plan: 1. look") == 0 and row.count("plan: 1. look") == 2
        assert row.rindex("plan: 1. look") in range(width // 2 - 2, width // 2 + 3)
    flat = " ".join(text.split())
    assert "answer: Tokyo" in flat and "malformed: " in flat and "... (+" in flat


def test_of_several_samples_the_telling_one_is_shown(tmp_path: Path) -> None:
    first = finished(tmp_path / "first", {"a1": [1, 0]})
    other = finished(tmp_path / "other", {"a1": [1, 1]})
    text = "\n".join(
        shown(120, lambda out: print_sides(out, [first, other], compare([first, other]), 1))
    )
    assert "no answer" in text and "answer: Tokyo" in text


def test_a_chain_under_an_unknown_grammar_is_shown_as_it_was_written(tmp_path: Path) -> None:
    runs = [finished(tmp_path / name, {"a1": [score]}) for name, score in (("x", 0), ("y", 1))]
    made = chain("a1", 0, "\x1b[31mTokyo", 9)
    made.grammar = "mine"
    save_trajectories(runs[1] / "trajectories.jsonl", [made])
    text = "\n".join(shown(160, lambda out: print_sides(out, runs, compare(runs), 1)))
    assert "<answer>[31mTokyo" in text and "\x1b" not in text


def run_cli(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["coa", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_the_command_has_the_task_ids_in_its_object_and_chains_for_people(
    pair: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(path) for path in pair]
    assert run_cli(["compare", *names, "--json"], monkeypatch) == 0
    row = json.loads(capsys.readouterr().out)["runs"][1]
    assert (row["won"], row["lost"]) == (["a1", "b1"], ["a2"])
    assert run_cli(["compare", *names, "--chains", "2"], monkeypatch) == 0
    assert "other won 2, 2 shown" in capsys.readouterr().out
    assert run_cli(["compare", *names, "--chains", "1", "--json"], monkeypatch) == 2
    assert "--chains is for people" in capsys.readouterr().err
    assert run_cli(["compare", names[0]], monkeypatch) == 2
    assert "needs at least two" in capsys.readouterr().err
