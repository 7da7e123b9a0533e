"""Reports: no text of a run can become markup, and damaged runs are shown or refused."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.distillation.funnel import Funnel, FunnelStage
from coa.errors import CoaError
from coa.grammar import load_grammar
from coa.grammar.load import GrammarBook
from coa.statistics import Estimate
from coa.tasks import Task, TaskSet
from coa.trajectory import Chain, Trajectory
from coa.view.plots import Spot, ascii_only, cost_plot, cost_ticks, el, inner, interval
from coa.view.report import render_report, select, write_report
from coa.view.report_parts import EvaluationRun, Parts, Training
from made_pages import HOSTILE, Page, read
from made_runs import AT_ONCE, MISTAKEN, attempt, distilled, evaluated, report, run_of, trained

Shape = list[tuple[str, ...]]
BIDI = "\u202eevil\u2066 <b>"


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: Shape = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, *(name for name, _ in attrs)))


def shape(html: str) -> Shape:
    """The elements of a page with the names of their attributes."""
    parser = _Elements()
    parser.feed(html)
    return parser.found


def hostile_runs(place: Path, text: str) -> list[Path]:
    """An evaluation, a training and a distillation with this text wherever a stranger has a say."""
    strange = Task(text or "?", (text,), "t0", {"family": text, "hops": text})
    usual = Task("Who?", ("Lima",), "t1", {"family": "f", "hops": "h"})
    made = [attempt(strange, MISTAKEN), attempt(usual, AT_ONCE)]
    made[0].answer = made[0].error = made[0].weights = text
    made[0].segments[2].text = f"\n<observation>{text}</observation>\n"
    run = evaluated(place / "run", TaskSet((strange, usual)), made, model=text)
    summary = json.loads((run / "summary.json").read_text())
    summary |= {"stop_reasons": {text: 2}, "tool_calls_by_agent": {text: 1.0, "b": 2.0}}
    summary["money"] = {"per_task": 1.0, "per_solved": 1.0, "currency": text}
    (run / "summary.json").write_text(json.dumps(summary))
    training = trained(place / "sft", updates=2)
    manifest = json.loads((training / "manifest.json").read_text())
    manifest["recipe"]["model"] = manifest["commit"] = text
    (training / "manifest.json").write_text(json.dumps(manifest))
    funnel = distilled(place / "d")
    held = json.loads((funnel / "funnel.json").read_text())
    held["stages"][0] |= {"stage": text, "reasons": {text: 2}}
    (funnel / "funnel.json").write_text(json.dumps(held))
    return [run, training, funnel]


@pytest.mark.parametrize("text", [HOSTILE, BIDI, '" onload="alert(1)', "{{page}}", "\x00\x1b[2J"])
def test_hostile_text_stays_text(text: str, tmp_path: Path) -> None:
    plain = report(tmp_path / "plain.html", *hostile_runs(tmp_path / "plain", "harmless"))
    page = report(tmp_path / "page.html", *hostile_runs(tmp_path / "hostile", text), title=text)
    assert shape(page.html) == shape(plain.html)
    assert page.content["entries"][0]["question"] == text
    assert text in page.records[0]["segments"][2]["text"]
    assert "<img" not in page.html and "<script>alert" not in page.html


def test_what_a_stranger_named_does_not_turn_what_stands_around_it(tmp_path: Path) -> None:
    page = report(tmp_path / "page.html", *hostile_runs(tmp_path / "runs", BIDI), title=BIDI)
    shell = re.sub(
        r'(?s)<script type="application/json".*?</script>|<title>.*?</title>', "", page.html
    )
    turned = [found.start() for found in re.finditer("&#8238;", shell)]
    isolated = re.finditer(r"(?s)<bdi>.*?</bdi>|<svg.*?</svg>|<td[^>]*>[^<]*</td>", shell)
    spans = [found.span() for found in isolated]
    loose = [shell[at - 60 : at] for at in turned if not any(a <= at < b for a, b in spans)]
    assert turned and not loose


def strange_parts(text: str) -> Parts:
    """What was read, with this text in every place that holds one."""
    right = Estimate(0.5, 0.4, 0.6, 2)
    task = Task("Who?", (text,), "t0", {"family": text})
    run = EvaluationRun(text, right, text, text, 2, text)
    run.figures = {"tokens_per_task": 5.0, "money_per_task": 1.0, "money_per_solved": 2.0}
    run.stops = {text: 2}
    run.groups = {"family": {text: right, f"{text}2": right}}
    run.pass_at, run.together = [(1, right), (2, right)], {text: right}
    run.calls, run.currency, run.tasks = {text: 1.0}, text, {"t0": task}
    made = attempt(task, MISTAKEN)
    made.question = made.answer = made.error = text
    made.segments[1].text = f"<think>{text}</think>"
    run.chains, run.scores = [Chain.read(made)], {("t0", 0): 0.0}
    run.on = text
    other = replace(run, observations="real", team=True, on=f"{text}2")
    third = replace(other, on=f"{text}3")
    return Parts(
        [run, other, replace(other), third, replace(third)],
        [Training(text, "rl", [{"update": 1, "reward": 0.5}], text, False)],
        [(text, Funnel(3, 2, [FunnelStage(text, 3, 2, 1, 0, {text: 1})]))],
        [text],
        {text: [text], "when": ["2026-01-01T00:00"]},
    )


@pytest.fixture(scope="module")
def usual() -> Shape:
    parts = strange_parts("text")
    return shape(render_report(parts, select(parts.evaluations, 9), "text"))


@settings(max_examples=30, deadline=None)
@given(text=st.text(min_size=1))
def test_no_text_changes_the_markup(usual: Shape, text: str) -> None:
    parts = strange_parts(text)
    made = render_report(parts, select(parts.evaluations, 9), text)
    assert made.isascii() and shape(made) == usual


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[object] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, attrs))

    def handle_data(self, text: str) -> None:
        self.found.append(text)


@given(st.text("<>&\"';={}x \u202e\U0001f600"), st.text("<>&\"';={}x \u202e\U0001f600"))
def test_an_element_holds_what_it_was_given(text: str, value: str) -> None:
    parser = _Text()
    parser.feed(ascii_only(el("p", text, title=value)))
    parser.close()
    opened, *held = parser.found
    assert opened == ("p", [("title", value)]) and "".join(map(str, held)) == text


def test_what_is_markup_is_not_escaped_again_and_what_is_nothing_is_left_out() -> None:
    made = inner(el("b", "<"), None, ["&", el("line", x1=1.0, stroke_width=2, hidden=False)])
    assert made == '<b>&lt;</b>&amp;<line x1="1" stroke-width="2"/>'


finite = st.floats(0, 1e9)


@given(
    st.lists(st.tuples(st.text(), finite, finite, finite, st.floats(0, 1)), min_size=1, max_size=6)
)
def test_costs_of_any_size_have_a_place_in_the_plot(
    found: list[tuple[str, float, float, float, float]],
) -> None:
    spots = []
    for name, *costs, right in found:
        low, middle, high = sorted(costs)
        spots.append(
            Spot(name, Estimate(middle + 1, low + 1, high + 1, 9), Estimate(right, 0, 1, 9))
        )
    made = cost_plot(spots, "tokens", "words")
    assert "nan" not in re.sub(r"(?s)<t.*?</t\w+>", "", made) and "inf" not in made
    ticks, _ = cost_ticks(spots)
    assert (
        list(ticks) == sorted(set(ticks)) and ticks[-1] >= max(s.cost.value for s in spots) * 0.99
    )


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_labels_of_the_plot_cover_neither_each_other_nor_the_scale(right: list[float]) -> None:
    spots = [Spot("run", Estimate(5, 4, 6, 9), Estimate(each, each, each, 9)) for each in right]
    made = cost_plot(spots, "tokens", "words")
    lines = [float(y) for y in re.findall(r'<text [^>]*y="([\d.]+)"[^>]*class="label"', made)]
    floor = max(float(y) for y in re.findall(r'y1="([\d.]+)"[^>]*class="grid"', made))
    assert len(lines) == len(right) and max(lines) < floor
    assert all(low - high >= 18.9 for high, low in pairwise(lines))


def test_an_interval_stays_within_its_cell() -> None:
    made = interval(Estimate(2.0, -3.0, 9.0, 5), "words")
    assert re.findall(r'="([\d.]+)%"', made.replace("50%", ""))
    assert all(2 <= float(x) <= 98 for x in re.findall(r'(?:x1|x2|cx)="([\d.]+)%"', made))


def test_only_our_script_and_style_may_run_and_nothing_is_asked_for(tmp_path: Path) -> None:
    html = report(tmp_path / "page.html", run_of(tmp_path / "run", AT_ONCE, MISTAKEN)).html
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy and "default-src 'none'" in policy.group(1) and "unsafe" not in policy.group(1)
    shell = re.sub(r'(?s)<script type="application/json".*?</script>', "", html)
    assert not re.findall(r"\b(?:src|srcset|action|poster|style)\s*=\s*\"", shell)
    assert not re.findall(r"url\(|@import|fetch\(|XMLHttpRequest|WebSocket|import\(", shell)
    assert set(re.findall(r"https?://[^\s\"]+", shell)) == {"http://www.w3.org/2000/svg"}
    (script,) = re.findall(r"(?s)<script>(.*?)</script>", html)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b", script)


# -- damaged runs ---------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(), inside, max_size=3),
    max_leaves=4,
)
FILES = ("summary.json", "manifest.json", "scores.jsonl", "trajectories.jsonl", "grammars.json")


def places_in(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside a record."""
    if not isinstance(value, (dict, list)):
        return [at]
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    return [at, *(way for key, item in inside for way in places_in(item, (*at, key)))]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = run_of(tmp_path_factory.mktemp("whole") / "run", AT_ONCE, MISTAKEN)
    GrammarBook([load_grammar("mhqa")]).save(run)
    return run


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FILES), st.integers(0, 10**6), JSON)
def test_a_damaged_run_is_shown_or_refused_and_never_a_crash(
    whole: Path, name: str, pick: int, put: Any
) -> None:
    place = Path(tempfile.mkdtemp(dir=whole.parent))
    run = place / "run"
    shutil.copytree(whole, run)
    first, *rest = (run / name).read_text().split("\n") if name.endswith("l") else [""]
    record = json.loads(first or (run / name).read_text())
    ways = [way for way in places_in(record) if way]
    *way, last = ways[pick % len(ways)]
    inside: Any = record
    for key in way:
        inside = inside[key]
    inside[last] = put
    (run / name).write_text("\n".join([json.dumps(record), *rest]))
    try:
        write_report([run], place / "page.html")
    except CoaError as refusal:
        assert "\n" not in str(refusal)
    else:
        page: Page = read(place / "page.html")
        assert all(isinstance(entry["question"], str) for entry in page.content["entries"])


def test_a_trajectory_of_another_kind_is_named_with_its_line(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", AT_ONCE, MISTAKEN)
    path = run / "trajectories.jsonl"
    first, second = path.read_text().splitlines()
    record = Trajectory.from_json(json.loads(second)).to_json() | {"question": 7}
    path.write_text(f"{first}\n{json.dumps(record)}\n")
    with pytest.raises(CoaError, match=r"trajectories.jsonl:2: question is 7, expected text"):
        write_report([run], tmp_path / "page.html")
