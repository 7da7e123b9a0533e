"""Reports in a real browser: Chromium, spoken to through a pair of pipes.

Needs Debian's `chromium` (or CHROMIUM=/path/to/it); skipped where there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from chromium_tab import CHROMIUM, CONTRAST, Browser
from coa.tasks import Task, TaskSet
from coa.view.report import write_report
from made_pages import HOSTILE
from made_runs import (
    AT_ONCE,
    CUT,
    MISTAKEN,
    RECOVERED,
    STUCK,
    attempt,
    evaluated,
    run_of,
    speedrun,
    trained,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no chromium: apt-get install chromium"),
]
TEXTS = "[...document.querySelectorAll('{}')].map((node) => node.textContent)"
RUNS = "document.querySelector('#list .case')"
"""The list is there once the chains are unpacked."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with every section."""
    place = tmp_path_factory.mktemp("report")
    run = speedrun(place / "run")
    likes = (AT_ONCE, RECOVERED, MISTAKEN, CUT, STUCK)
    samples = [attempt(task, likes[at], at) for task in TASKS for at in range(len(likes))]
    several = evaluated(place / "several" / "sampled", TASKS, samples)
    other = run_of(place / "other" / "other", MISTAKEN, AT_ONCE, CUT, AT_ONCE)
    write_report([run, other, several, trained(place / "rl", "rl")], place / "page.html")
    return place / "page.html"


TASKS = TaskSet(tuple(Task(f"Which {at}?", ("Lima",), f"s{at}") for at in range(3)))


def choose(browser: Browser, menu: str, run: str) -> None:
    pick = f"[...byId('{menu}').options].find((each) => each.textContent === '{run}').value"
    browser.ask(f"byId('{menu}').value = {pick}; byId('{menu}').dispatchEvent(new Event('change'))")


def test_hostile_text_is_shown_and_does_not_run(browser: Browser, tmp_path: Path) -> None:
    bad = Task(HOSTILE, (HOSTILE,), HOSTILE, {"family": HOSTILE})
    made = attempt(bad, MISTAKEN)
    made.answer = made.error = HOSTILE
    made.segments[2].text = f"\n<observation>{HOSTILE}</observation>\n"
    run = evaluated(tmp_path / "run", TaskSet((bad,)), [made], model=HOSTILE)
    write_report([run], tmp_path / "bad.html", title=HOSTILE)
    browser.open(tmp_path / "bad.html")
    browser.wait(RUNS)
    browser.ask("document.querySelector('.case').open = true")
    browser.wait("document.querySelector('.chain')")
    assert browser.ask("document.querySelector('h1').textContent") == HOSTILE
    assert browser.ask("document.querySelector('.asked').textContent") == HOSTILE
    assert HOSTILE in browser.ask(TEXTS.format(".chain .seen .text"))
    assert browser.ask("document.querySelectorAll('img, iframe').length") == 0
    assert browser.troubles == []


def test_two_runs_of_a_task_stand_side_by_side(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.wait(RUNS)
    choose(browser, "run", "the trained")
    choose(browser, "beside", "other")
    assert browser.ask("byId('count').textContent") == "4 chains"
    browser.ask("document.querySelector('.case').open = true")
    browser.wait("document.querySelectorAll('.case .chain').length === 2")
    assert browser.ask(TEXTS.format(".pair h4 bdi")) == ["the trained", "other"]
    tops = "[...document.querySelectorAll('.pair > div')].map((n) => n.getBoundingClientRect().top)"
    left, right = browser.ask(tops)
    assert left == right
    browser.ask("document.querySelector('#outcomes [value=differs]').click()")
    browser.wait("byId('count').textContent === '1 of 4 chains'")


def test_outcomes_filter_and_search_reads_everything(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.wait(RUNS)
    choose(browser, "run", "the trained")
    assert browser.ask(TEXTS.format("#list h3"))[0].startswith("Right at once2 here, 2 in the run")
    browser.ask("document.querySelector('#outcomes [value=recovered]').click()")
    browser.wait("byId('count').textContent === '1 of 4 chains'")
    browser.ask("document.querySelector('#outcomes [value=recovered]').click()")
    browser.ask("byId('query').focus()")
    browser.type("tool effectiveness")  # only a reflection says that
    browser.wait("byId('count').textContent === '1 of 4 chains'")
    browser.type(" nowhere")
    browser.wait("document.querySelector('#list .notice')?.textContent === 'Nothing fits.'")


def test_observations_look_different_from_what_the_model_wrote(
    browser: Browser, page: Path
) -> None:
    browser.open(page)
    browser.wait(RUNS)
    browser.ask("document.querySelector('.case').open = true")
    browser.wait("document.querySelector('.chain')")
    assert set(browser.ask(TEXTS.format(".chain .seen .who b"))) == {"observation"}
    edge = "getComputedStyle(document.querySelector('.chain {} .body')).borderLeftStyle"
    assert browser.ask(edge.format(".seen")) == "dotted"
    assert browser.ask(edge.format("[data-colour]")) == "solid"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_enough_contrast(browser: Browser, page: Path, dark: bool) -> None:
    browser.open(page, dark=dark)
    browser.wait(RUNS)
    browser.ask("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    browser.wait("document.querySelector('.chain')")
    assert browser.ask(CONTRAST) == []


OVERLAPS = """[...document.querySelectorAll('svg.panel, svg.cost')].filter((plot) => {
  const boxes = [...plot.querySelectorAll('text')].map((node) => node.getBoundingClientRect());
  const meet = (a, b) => a.left < b.right && b.left < a.right
    && a.top + 3 < b.bottom && b.top + 3 < a.bottom;
  return boxes.some((a, i) => boxes.some((b, j) => j > i && meet(a, b)));
}).map((plot) => plot.querySelector('title').textContent)"""


@pytest.mark.parametrize("width", [1280, 400])
def test_it_fits_its_screen_and_no_text_of_a_plot_covers_another(
    browser: Browser, page: Path, width: int
) -> None:
    browser.open(page, width=width)
    browser.wait(RUNS)
    browser.ask("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.ask(OVERLAPS) == []
    assert browser.troubles == []


def test_everything_has_a_name_and_a_table_behind_it(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.wait(RUNS)
    nameless = "[...document.querySelectorAll('input, select, button')].filter((n) => "
    nameless += "!n.textContent.trim() && !n.labels?.length && !n.ariaLabel).length"
    assert browser.ask(nameless) == 0
    silent = "[...document.querySelectorAll('svg')].filter((n) => !n.ariaLabel && "
    silent += "!n.querySelector('title')?.textContent).length"
    assert browser.ask(silent) == 0
    alone = "[...document.querySelectorAll('section:has(svg)')].filter((n) => "
    alone += "!n.querySelector('table')).map((n) => n.id)"
    assert browser.ask(alone) == []
    linked = "[...document.querySelectorAll('nav a')].every((a) => document.querySelector(a.hash))"
    assert browser.ask(linked) is True


def test_it_prints_without_what_is_for_the_screen(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.wait(RUNS)
    browser.ask("document.querySelector('.case').open = true")
    browser.wait("document.querySelector('.chain')")
    browser.print_media()
    for gone in ("nav", "form", ".case:not([open])"):
        assert browser.ask(f"document.querySelector('{gone}').checkVisibility()") is False, gone
    for kept in (".runs", ".panel", ".chain"):
        assert browser.ask(f"document.querySelector('{kept}').checkVisibility()") is True, kept
