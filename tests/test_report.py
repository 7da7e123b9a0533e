"""Reports: what is on the page, what is chosen, and what is said of the rest."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coa.cli import app
from coa.errors import CoaError
from coa.tasks import Task, TaskSet
from coa.view.report import OUTCOMES, write_report
from coa.view.report_parts import model_name
from made_pages import Page
from made_runs import (
    AT_ONCE,
    CUT,
    LOST,
    MISTAKEN,
    RECOVERED,
    STUCK,
    attempt,
    damage,
    distilled,
    evaluated,
    report,
    run_of,
    speedrun,
    tasks,
    trained,
)


def text(page: Page) -> str:
    """What a reader without eyes for plots reads, on one line."""
    shell = re.sub(r"(?s)<(script|style)\b.*?</\1>", "", page.html)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", shell)).split())


def headings(page: Page) -> list[str]:
    found = re.findall(r'<section id="(\w+)"(?! hidden)', page.html)
    return [name for name in found if name != "notes"]


# -- what is on the page --------------------------------------------------------------------


def test_a_speedrun_has_everything_under_the_names_of_its_table(tmp_path: Path) -> None:
    page = report(tmp_path / "page.html", speedrun(tmp_path / "run"))
    assert headings(page) == [
        *("results", "differences", "cost", "breakdown", "agents", "stops", "training", "funnel"),
        "chains",
    ]
    said = text(page)
    assert "1 distillation, 1 training run, 3 evaluations" in said
    assert "Report on run" in said and "base model base-model, m seeds" in said
    assert page.content["runs"] == ["team of experts", "the base", "the trained"]
    assert "team of experts multi-agent teacher 100.0% 51.0\u2013100.0" in said
    assert "the trained m + adapter 75.0% 30.1\u201395.4" in said
    assert "quality 8 \u22122 \u2013 wrong answer 2" in said
    assert "correction 9 \u2013 +1 again 1" in said


def test_differences_are_paired_and_name_what_cannot_be(tmp_path: Path) -> None:
    first = run_of(tmp_path / "a" / "first", MISTAKEN, MISTAKEN, AT_ONCE, AT_ONCE)
    second = run_of(tmp_path / "b" / "second", AT_ONCE, AT_ONCE, MISTAKEN, AT_ONCE)
    unlike = TaskSet(tuple(tasks(6))[4:])
    made = [attempt(task, AT_ONCE) for task in unlike]
    others = evaluated(tmp_path / "c" / "others", unlike, made)
    said = text(report(tmp_path / "page.html", first, second, others))
    assert re.search(r"second against first \+25\.0 \u2212\d+\.\d to \+\d+\.\d 4 2 1 1 1 ", said)
    assert "Alone with its tasks or its reward, so not compared: others ." in said


def test_a_run_is_compared_with_the_first_and_the_one_before_and_a_control_with_its_model(
    tmp_path: Path,
) -> None:
    base = run_of(tmp_path / "base", MISTAKEN, MISTAKEN)
    sft = run_of(tmp_path / "sft", AT_ONCE, MISTAKEN, model="m+sft/adapter")
    rl = run_of(tmp_path / "rl", AT_ONCE, AT_ONCE, model="m+rl/adapter")
    chosen = {"model": "m+rl/adapter", "observations": "wrong"}
    wrong = run_of(tmp_path / "wrong", MISTAKEN, MISTAKEN, **chosen)
    said = text(report(tmp_path / "page.html", base, sft, rl, wrong))
    pairs = re.findall(r"(\w+) against (\w+) ([+\u2212][\d.]+)", said)
    assert pairs == [
        ("sft", "base", "+50.0"),
        ("rl", "base", "+100.0"),
        ("rl", "sft", "+50.0"),
        ("wrong", "rl", "\u2212100.0"),
    ]


def test_cost_and_breakdown_put_together_what_is_on_the_same_tasks(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / "a" / name, *[AT_ONCE] * 4) for name in ("one", "two")]
    runs += [run_of(tmp_path / "b" / name, *[AT_ONCE] * 3) for name in ("three", "four")]
    alone = run_of(tmp_path / "c" / "five", AT_ONCE, MISTAKEN)
    page = report(tmp_path / "page.html", *runs, alone)
    plots = re.findall(r"<figure>.*?<title>(.*?)</title>", page.html)
    assert [re.findall(r"(\w+): \d+ tokens", plot) for plot in plots] == [
        ["one", "two"],
        ["three", "four"],
    ]
    families = re.findall(r"Family (tasks(?: \w{8})?) ((?:\w+ )+?)family 0", text(page))
    assert [names for _, names in families] == ["one two ", "three four ", "five "]
    assert len({name for name, _ in families}) == 3, "files of one name are told apart"


def test_a_breakdown_is_by_what_the_environment_of_ones_own_groups_by(tmp_path: Path) -> None:
    given = TaskSet(
        tuple(Task(f"{n}?", ("Lima",), id=f"t{n}", meta={"by_day <b>": n % 2}) for n in range(4))
    )
    made = [attempt(task, AT_ONCE) for task in given]
    page = report(tmp_path / "page.html", evaluated(tmp_path / "run", given, made))
    assert "breakdown" in headings(page) and "<b>0</b>" not in page.html
    assert re.search(r"By day <b> run 0 100\.0% n 2 1 100\.0% n 2", text(page))


def test_what_is_left_out_of_the_agents_is_said(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / f"run{at}", AT_ONCE) for at in range(11)]
    said = text(report(tmp_path / "page.html", *runs)).partition("Agents at work")[2]
    assert "left out: 1 more runs" in said.partition("How rollouts ended")[0]


def test_a_speedrun_that_is_not_finished_has_its_team_and_the_order_of_the_work(
    tmp_path: Path,
) -> None:
    run = speedrun(tmp_path / "run")
    trained(run / "rl", "rl", 3)
    (run / "result.json").unlink()
    page = report(tmp_path / "page.html", run)
    assert page.content["runs"] == ["eval-base-new", "eval-sft-new", "eval-team-new"]
    said = text(page)
    assert "eval-team-new multi-agent teacher 100.0% 51.0\u2013100.0" in said
    assert said.index("sft sft, 20 updates") < said.index("rl rl, 3 updates")


def test_the_teacher_of_an_older_table_is_a_row_of_it(tmp_path: Path) -> None:
    run = speedrun(tmp_path / "run")
    (run / "eval-team-new" / "team.json").unlink()
    page = report(tmp_path / "page.html", run)
    assert "team of experts multi-agent teacher 100.0% 51.0\u2013100.0" in text(page)
    assert "team of experts: 2,000 tokens, 100.0%" in page.html


def test_models_are_named_without_the_folders_of_this_machine(tmp_path: Path) -> None:
    model = f"hf:{tmp_path}/models/tiny+{tmp_path}/a+b/sft/adapter"
    page = report(tmp_path / "page.html", run_of(tmp_path / "run", AT_ONCE, model=model))
    assert "hf:tiny + sft/adapter" in text(page) and "base model hf:tiny " in text(page)
    assert str(tmp_path) not in page.html
    for ref in ("afm-135m", "hf:owner/name"):
        assert model_name(ref) == ref
    for ref in ("openai:m@http://10.0.0.5:8000/v1", "openai:/models/m@http://h:1", "openai:m"):
        assert model_name(ref) == "openai:m"


def test_ids_that_two_files_share_make_no_pair(tmp_path: Path) -> None:
    """A column `id` often counts from 1."""
    both = []
    for name, asked in (("capitals", "Where"), ("chemistry", "What")):
        made = TaskSet(tuple(Task(f"{asked} is it, {n}?", ("x",), id=str(n)) for n in range(3)))
        both.append(evaluated(tmp_path / name, made, [attempt(task, AT_ONCE) for task in made]))
    said = text(report(tmp_path / "page.html", *both))
    assert "chemistry against" not in said and "capitals against" not in said


def test_a_chain_without_a_score_is_not_called_wrong(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", AT_ONCE, CUT)
    (run / "scores.jsonl").unlink()
    page = report(tmp_path / "page.html", run)
    assert [entry["outcome"] for entry in page.content["entries"]] == ["cut", "not scored"]


def test_several_samples_have_their_own_table(tmp_path: Path) -> None:
    given = tasks(2)
    likes = {("t0", 0): AT_ONCE, ("t0", 1): MISTAKEN, ("t1", 0): MISTAKEN, ("t1", 1): MISTAKEN}
    made = [attempt(task, likes[task.id, at], at) for task in given for at in (0, 1)]
    page = report(tmp_path / "page.html", evaluated(tmp_path / "run", given, made))
    said = text(page)
    assert "run n pass@1 pass@2 mean vote best" in said
    assert re.search(r"run 2 25\.0% [\d.\u2013]+ 50\.0% ", said), said
    assert "run: 25.0% to 50.0%" in page.html, "the plot says it in words"
    assert "2 \u00d7 2" in said, "tasks times samples"


def test_seconds_and_money_are_there_when_they_are_known(tmp_path: Path) -> None:
    money = {"per_task": 0.0125, "per_solved": 0.025, "currency": "EUR"}
    run = run_of(tmp_path / "run", AT_ONCE, MISTAKEN, money=money)
    said = text(report(tmp_path / "page.html", run))
    assert "EUR / 1,000 tasks EUR / 1,000 solved" in said and "12.5 25.0" in said
    assert "seconds" not in said
    damage(run / "latency.json", {"n": 2, "mean": 3.0, "p50": 2.5, "p95": 9.25})
    said = text(report(tmp_path / "page.html", run))
    assert "seconds, median 95th percentile" in said and "2.5 9.2" in said
    damage(run / "latency.json", {"n": 0})
    assert "seconds, median" not in text(report(tmp_path / "page.html", run))


def test_curves_are_drawn_for_every_training_and_have_a_table_behind(tmp_path: Path) -> None:
    sft, rl = trained(tmp_path / "one"), trained(tmp_path / "two", "rl", 30, finished=False)
    page = report(tmp_path / "page.html", sft, rl)
    said = text(page)
    assert "one sft, 20 updates" in said and "two rl, 30 updates, not finished" in said
    assert page.tags.count("polyline") >= 8
    assert "The numbers of 11 updates (9 left out)" in said
    assert "evaluation: 50.0%" in page.html
    assert headings(page) == ["training"]


def test_missing_parts_are_left_out_and_said_so(tmp_path: Path) -> None:
    said = text(report(tmp_path / "page.html", distilled(tmp_path / "d")))
    assert "No evaluation was given: no results, cost or chains." in said
    assert "No training was given: no learning curves." in said
    run = run_of(tmp_path / "run", AT_ONCE, MISTAKEN)
    for name in ("trajectories.jsonl", "scores.jsonl"):
        (run / name).unlink()
    page = report(tmp_path / "page.html", run)
    assert "run: no scores.jsonl, so it is in no comparison." in text(page)
    assert "run: no trajectories.jsonl, so none of its chains is shown." in text(page)
    assert page.content["entries"] == [] and "chains" not in headings(page)


def test_what_a_study_sums_up_beside_its_evaluations_is_no_evaluation(tmp_path: Path) -> None:
    run_of(tmp_path / "study" / "eval-held-out", AT_ONCE)
    (tmp_path / "study" / "unstopped").mkdir()
    (tmp_path / "study" / "unstopped" / "texts.jsonl").touch()
    (tmp_path / "study" / "unstopped" / "summary.json").write_text('{"n": 1, "called": 1.0}')
    assert "eval-held-out" in text(report(tmp_path / "page.html", tmp_path / "study"))


def test_what_is_not_finished_is_left_out_and_said_so(tmp_path: Path) -> None:
    done, going = (run_of(tmp_path / name / name, AT_ONCE) for name in ("done", "going"))
    (going / "summary.json").unlink()
    said = text(report(tmp_path / "page.html", done, going))
    assert "going: the evaluation is not finished, so it is left out." in said


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / name / "eval", AT_ONCE) for name in ("a", "b")]
    assert report(tmp_path / "page.html", *runs).content["runs"] == ["a/eval", "b/eval"]
    above = report(tmp_path / "page.html", tmp_path)
    assert above.content["runs"] == ["a/eval", "b/eval"], "found inside a directory, too"


def test_the_same_runs_give_the_same_bytes_and_records_are_never_replaced(tmp_path: Path) -> None:
    run = speedrun(tmp_path / "run")
    first = report(tmp_path / "page.html", run).html
    assert report(tmp_path / "page.html", run).html == first
    with pytest.raises(CoaError, match=r"scores.jsonl: a report is a file whose name ends in"):
        write_report([run], run / "eval-sft-new" / "scores.jsonl")


# -- which chains ---------------------------------------------------------------------------


def test_chains_are_told_apart_by_how_they_ended(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", AT_ONCE, RECOVERED, MISTAKEN, CUT, STUCK, LOST)
    page = report(tmp_path / "page.html", run)
    ended = {entry["task"]: entry["outcome"] for entry in page.content["entries"]}
    assert ended == {
        **{"t0": "right at once", "t1": "recovered", "t2": "wrong"},
        **{"t3": "cut", "t4": "malformed", "t5": "failed outside"},
    }
    assert set(ended.values()) <= OUTCOMES.keys()
    assert page.content["counts"] == [dict.fromkeys(ended.values(), 1)]
    wrong = next(entry for entry in page.content["entries"] if entry["task"] == "t2")
    assert (wrong["answer"], wrong["gold"], wrong["family"]) == ("Cusco", ["Lima"], "family_0")


def test_some_of_every_outcome_are_chosen_and_the_same_tasks_of_all_runs(tmp_path: Path) -> None:
    first = run_of(tmp_path / "a" / "first", *[AT_ONCE] * 90, *[MISTAKEN] * 9, CUT)
    second = run_of(tmp_path / "b" / "second", *[STUCK] * 100)
    page = report(tmp_path / "page.html", first, second, chains=24)
    entries = page.content["entries"]
    assert len(entries) == 24 == len(page.records)
    shown = [{e["task"] for e in entries if e["run"] == run} for run in (0, 1)]
    assert shown[0] == shown[1] and len(shown[0]) == 12
    ended = {entry["outcome"] for entry in entries if entry["run"] == 0}
    assert ended == {"right at once", "wrong", "cut"}
    assert "24 of 200 chains are here, 176 are left out" in text(page)
    assert page.content["counts"][0] == {"right at once": 90, "wrong": 9, "cut": 1}


def test_no_chains_are_there_when_nobody_wants_them(tmp_path: Path) -> None:
    page = report(tmp_path / "page.html", run_of(tmp_path / "run", AT_ONCE), chains=0)
    assert page.records == [] and "chains" not in headings(page)


def test_a_very_long_observation_is_cut_and_says_by_how_much(tmp_path: Path) -> None:
    long = attempt(tasks(1)[0], AT_ONCE)
    long.segments[2].text = "\n<observation>" + "far " * 50_000 + "</observation>\n"
    page = report(tmp_path / "page.html", evaluated(tmp_path / "run", tasks(1), [long]))
    seen = page.records[0]["segments"][2]["text"]
    assert len(seen) < 6_100 and seen.endswith("far far </observation>\n")
    assert "(194,029 characters left out)" in seen


def test_tasks_that_have_changed_are_not_shown_as_right_answers(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", AT_ONCE)
    tasks(5).save(tmp_path / "tasks.jsonl")
    page = report(tmp_path / "page.html", run)
    assert page.content["entries"][0]["gold"] is None
    assert "are not there or have changed, so its chains stand without" in text(page)


@pytest.mark.slow
def test_thousands_of_chains_do_not_make_a_large_file(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", *[AT_ONCE, RECOVERED, MISTAKEN, CUT, STUCK] * 1000)
    made = write_report([run], tmp_path / "page.html")
    assert (made.chains, made.chains_in_all) == (200, 5000)
    assert made.size == (tmp_path / "page.html").stat().st_size < 500_000


# -- mistakes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "held", "wanted"),
    [
        ("summary.json", [], "summary.json: found a list, expected an object."),
        (
            "summary.json",
            {"n": 1},
            "summary.json: not a summary of coa eval (KeyError('accuracy'))",
        ),
        (
            "summary.json",
            {"n": 1, "accuracy": "x", "ci95": [0, 1]},
            "summary.json: not a summary of coa eval (ValueError(\"found 'x', expected a",
        ),
        ("result.json", {"rows": [{}]}, "result.json: not a result of coa speedrun."),
        ("funnel.json", {"episodes": 1}, "funnel.json: not a funnel of coa distill (KeyError("),
        ("manifest.json", 7, "manifest.json: found a int, expected an object."),
    ],
)
def test_a_damaged_file_is_named_in_one_line(
    name: str, held: object, wanted: str, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text(json.dumps(held))
    with pytest.raises(CoaError) as caught:
        write_report([tmp_path / "run"], tmp_path / "page.html")
    assert wanted in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "page.html").exists()


def test_a_directory_that_is_no_run_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    ask = CliRunner()
    for name, wanted in (
        ("empty", "empty: holds no run. Give a directory that coa eval, coa sft, coa rl, "),
        ("file", "file: is a file, expected a run directory."),
        ("nowhere", "nowhere: no such directory."),
    ):
        done = ask.invoke(app, ["report", str(tmp_path / name), "--out", str(tmp_path / "p.html")])
        assert isinstance(done.exception, CoaError) and wanted in str(done.exception)
    going = trained(tmp_path / "going", updates=0, finished=False)
    with pytest.raises(CoaError, match=r"nothing in it can be reported yet. going: metrics.jsonl"):
        write_report([going], tmp_path / "page.html")


def test_the_command_says_what_it_wrote(tmp_path: Path) -> None:
    run, out = run_of(tmp_path / "run", AT_ONCE, MISTAKEN), tmp_path / "page.html"
    said = CliRunner().invoke(app, ["report", str(run), "--out", str(out)])
    assert said.exit_code == 0 and f"1 runs and 2 of 2 chains in {out}, 0.0 MB" in said.stderr
    asked = CliRunner().invoke(app, ["report", str(run), "--out", str(out), "--json"])
    told = json.loads(asked.stdout)
    assert (told["evaluations"], told["chains"]) == (1, 2) and told["size"] == out.stat().st_size
