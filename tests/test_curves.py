"""Learning curves: a self-contained SVG of a run's metrics, whatever they hold."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chromium_tab import CHROMIUM, Browser
from coa.errors import RecordError
from coa.view.plots import PANELS, curve, learning_curves, points, scale, trailing_mean

SVG = "{http://www.w3.org/2000/svg}"


def run(updates: int = 40) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for update in range(updates + 1):
        if update % 10 == 0:
            low, high = 0.3 + update / 100, 0.5 + update / 100
            middle = (low + high) / 2
            records.append({"update": update, "eval_accuracy": middle, "eval_low": low})
            records[-1] |= {"eval_high": high, "eval_n": 128}
        if update:
            wave = 0.05 * math.sin(update)
            record = {"update": update, "reward": 0.3 + update / 100 + wave, "pass_rate": 0.3}
            record |= {"entropy": 0.4 * math.exp(-update / 20), "length_mean": 300 + update}
            records.append(record | {"sampler_gap": 0.01 + wave / 100})
    return records


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def texts(svg: str) -> list[str]:
    return [node.text or "" for node in ET.fromstring(svg).iter(f"{SVG}text")]


def test_the_figure_names_its_panels_and_where_they_went(tmp_path: Path) -> None:
    svg = curve(write(tmp_path / "metrics.jsonl", run()), "A run")
    found = texts(svg)
    assert "A run" in found and all(panel.name in found for panel in PANELS)
    assert "40.0% to 80.0%" in found, "of the evaluation"
    assert "0.35 to 0.67" in found, "of the mean reward, over its first and last eight updates"
    desc = ET.fromstring(svg).find(f"{SVG}desc")
    assert desc is not None and "evaluation: 40.0% to 80.0%" in (desc.text or "")


def test_the_figure_asks_for_nothing_and_runs_nothing(tmp_path: Path) -> None:
    svg = learning_curves(run(), "</title><script>alert(1)</script>")
    assert "<script" not in svg and "href" not in svg and "url(" not in svg and "@import" not in svg
    assert {node.tag.removeprefix(SVG) for node in ET.fromstring(svg).iter()} <= {
        *("svg", "title", "desc", "style", "rect", "text", "g", "line", "polyline", "circle")
    }
    assert svg == learning_curves(run(), "</title><script>alert(1)</script>"), (
        "the same bytes again"
    )


def test_evaluations_have_their_intervals() -> None:
    svg = ET.fromstring(learning_curves(run(), "A run"))
    assert len([node for node in svg.iter(f"{SVG}circle") if node.get("r") == "3.5"]) == 5
    assert len([node for node in svg.iter(f"{SVG}line") if node.get("class") == "range"]) == 5
    without = [{k: v for k, v in r.items() if k != "eval_low"} for r in run()]
    assert 'class="range"' not in learning_curves(without, "")


def test_a_missing_update_breaks_the_line() -> None:
    records = [r for r in run() if "reward" in r]
    whole = learning_curves(records, "").count("<polyline")
    records[20] |= {"reward": None}
    records[30] |= {"reward": math.nan}
    assert learning_curves(records, "").count("<polyline") == whole + 2


def test_a_run_that_is_going_on_can_be_drawn(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", run(3))
    path.write_text(path.read_text() + '{"update": 4, "rew')
    assert "mean reward" in texts(curve(path))


@pytest.mark.parametrize("records", [[], [{"update": 1, "loss": 0.5}]])
def test_metrics_of_something_else_are_refused(
    records: list[dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.raises(RecordError, match=r"metrics.jsonl: holds no figure of RL. Expected the"):
        curve(write(tmp_path / "metrics.jsonl", records))


def test_a_mean_is_of_the_last_updates_and_begins_when_there_are_enough() -> None:
    assert trailing_mean([(1, 1.0), (2, 2.0), (4, 6.0)], 2) == [(2, 1.5), (4, 4.0)]
    assert trailing_mean([(1, 1.0)], 2) == []


@given(st.lists(st.floats(-1e200, 1e200), max_size=9))
def test_ticks_are_round_and_hold_all_values(values: list[float]) -> None:
    ticks = scale(values)
    assert 2 <= len(ticks) <= 7 and ticks == sorted(ticks)
    slack = 1e-6 * (ticks[-1] - ticks[0])
    assert all(ticks[0] - slack <= value <= ticks[-1] + slack for value in [0.0, *values])


strange = st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=4)
names = st.sampled_from(["update", "eval_low", "eval_high", *(panel.key for panel in PANELS)])


@given(st.lists(st.dictionaries(names, strange), max_size=30), st.text())
def test_whatever_the_records_hold_the_figure_is_sound(
    records: list[dict[str, Any]], title: str
) -> None:
    printable = "".join(letter for letter in title if letter.isprintable())
    svg = learning_curves(records, printable)
    ET.fromstring(svg)
    assert "nan" not in svg.split("</desc>")[1].replace(printable, "").lower()
    assert all(math.isfinite(y) for _, y in points(records, "reward"))


OUTSIDE = """(() => {
  const frame = document.querySelector('svg').getBoundingClientRect();
  return [...document.querySelectorAll('text, polyline, circle, line')].filter((node) => {
    const box = node.getBoundingClientRect();
    return box.left < frame.left - 1 || box.right > frame.right + 1
      || box.bottom > frame.bottom + 1;
  }).map((node) => node.outerHTML);
})()"""
OVERLAPS = """(() => {
  const boxes = [...document.querySelectorAll('text')].map((node) => node.getBoundingClientRect());
  const meet = (a, b) => a.left < b.right && b.left < a.right
    && a.top + 3 < b.bottom && b.top + 3 < a.bottom;
  return boxes.filter((a, i) => boxes.some((b, j) => j > i && meet(a, b))).length;
})()"""


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no chromium: apt-get install chromium")
def test_in_a_browser_it_stays_within_its_frame_and_no_text_covers_another(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><main>{learning_curves(run(), 'A run')}</main>")
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(page)
        assert browser.ask(OUTSIDE) == []
        assert browser.ask(OVERLAPS) == 0
        assert not browser.troubles
    finally:
        browser.close()
