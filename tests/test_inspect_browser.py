"""The inspection page in a real browser: Chromium, spoken to through a pair of pipes.

Needs Debian's `chromium` (or CHROMIUM=/path/to/it); skipped where there is none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from chromium_tab import CHROMIUM, CONTRAST, Browser
from coa.io.runs import dumps
from coa.recording.episode import AgentSpec, Episode, Message, ModelCall, ToolUse
from coa.trajectory import Author, Segment, StopReason, Trajectory, save_trajectories
from coa.view.page import write_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no chromium: apt-get install chromium"),
]
HOSTILE = (
    "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 2'>"
    "<svg onload='window.ran = 3'>{{page}} \u2028 \u202e javascript:window.ran=4"
)
EMOJI = "<think> \U0001f600 first \U0001f680 then</think>\n<answer> me</answer>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def chain(number: int) -> Trajectory:
    wrong = f"<think> step {number}</think>\n<wiki_search> nowhere {number}</wiki_search>"
    segments = [
        Segment(Author.PROMPT, "Answer."),
        Segment(Author.MODEL, wrong, errs=[(len(f"<think> step {number}</think>\n"), len(wrong))]),
        Segment(Author.ENV, f"\n<observation>{'A long page. ' * 40}</observation>\n"),
        Segment(Author.MODEL, "<reflection> No.</reflection>stray" + EMOJI, errs=[(48, 53)]),
    ]
    return Trajectory(
        task_id=f"t{number}",
        question=f"Question {number}?",
        grammar="mhqa",
        answer="me",
        stop=StopReason.ANSWERED,
        segments=segments,
        meta={"set": "s", "family": f"family_{number % 3}"},
    )


def episode() -> Episode:
    agents = [AgentSpec("planner", "planner", "You plan."), AgentSpec("bob", "searcher", "Seek.")]
    call = ModelCall("big-1", "raw text", 1200, 200, 30, 0.0125)
    return Episode(
        task_id="e1",
        question=HOSTILE,
        teacher="t",
        agents=agents,
        answer="me",
        events=[
            Message("user", "planner", HOSTILE),
            Message(
                "planner", "bob", "1. look", HOSTILE, {"part": "plan", "steps": [1]}, call=call
            ),
            Message("bob", "system", "who", "I look.", {"part": "query"}, branch="1"),
            ToolUse("bob", "wiki_search", "who", HOSTILE * 9, branch="1"),
            ToolUse("bob", "wiki_search", "whom", "", "timeout", erred=True, branch="2"),
            Message("bob", "bob", "a note", erred=True),
            Message("bob", "user", "me"),
        ],
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a page of chains and one of episodes."""
    place = tmp_path_factory.mktemp("pages")
    save_trajectories(place / "trajectories.jsonl", [chain(number) for number in range(400)])
    notes = [{"task_id": "x", "stage": "quality", "reason": HOSTILE, "detail": "12"}]
    (place / "rejected.jsonl").write_text("".join(dumps(note) + "\n" for note in notes))
    stages = [{"stage": "quality", "left": 400, "reasons": {"wrong answer": 1}}]
    (place / "funnel.json").write_text(json.dumps({"episodes": 401, "kept": 400, "stages": stages}))
    write_page(place, place / "chains.html")
    (place / "e.jsonl").write_text(dumps(episode().to_json()) + "\n")
    write_page(place / "e.jsonl", place / "episodes.html", title=HOSTILE)
    return place


TEXTS = "[...document.querySelectorAll('{}')].map((node) => node.textContent)"


def test_hostile_text_is_shown_and_does_not_run(browser: Browser, tmp_path: Path) -> None:
    bad = chain(1)
    bad.task_id = bad.question = bad.answer = HOSTILE
    bad.meta = {"family": HOSTILE, HOSTILE: HOSTILE}
    bad.segments[1].text = f"<think> {HOSTILE}</think>"
    save_trajectories(tmp_path / "bad.jsonl", [bad])
    write_page(tmp_path / "bad.jsonl", tmp_path / "bad.html", title=HOSTILE)
    browser.open(tmp_path / "bad.html")
    browser.press("j")
    browser.wait("document.querySelector('.chain')")
    assert browser.ask("document.querySelector('h2').textContent") == HOSTILE
    assert browser.ask("document.title") == HOSTILE
    assert HOSTILE in browser.ask(TEXTS.format(".chain .text"))
    browser.press("m")
    browser.wait("document.querySelector('.mask')")
    assert f"<think> {HOSTILE}</think>" in browser.ask(TEXTS.format(".mask .text"))
    assert browser.ask("window.ran") is None
    assert browser.ask("document.querySelectorAll('img, iframe, body script ~ img').length") == 0
    assert browser.troubles == []


def test_the_policy_refuses_markup_and_scripts_of_others(browser: Browser, place: Path) -> None:
    browser.open(place / "chains.html")
    refused = """(() => { try { document.body.innerHTML = '<b>x</b>'; return 'made'; }
                 catch (error) { return error.name; } })()"""
    assert browser.ask(refused) == "TypeError"
    browser.ask(
        "{const s = document.createElementNS('http://www.w3.org/1999/xhtml', 'img');"
        " s.src = 'https://example.invalid/x.png'; document.body.append(s);}"
    )
    browser.wait("document.querySelector('img').complete")
    assert any("Content Security Policy" in trouble for trouble in browser.troubles)
    failed = [event for event in browser.events if event.get("method") == "Network.loadingFailed"]
    assert [event["params"]["blockedReason"] for event in failed] == ["csp"]


def test_what_is_trained_is_shown_letter_by_letter(browser: Browser, place: Path) -> None:
    source = chain(7)
    browser.open(place / "chains.html", "#t7")
    browser.press("m")
    browser.wait("document.querySelector('.mask')")
    raw = [segment.text for segment in source.segments]
    assert browser.ask(TEXTS.format(".mask .text")) == [raw[0], source.question, *raw[1:]]
    wrong = [segment.text[start:end] for segment in source.segments for start, end in segment.errs]
    assert "".join(browser.ask(TEXTS.format(".mask mark"))) == "".join(wrong)
    assert "\U0001f680" in wrong[1]
    labels = browser.ask(TEXTS.format(".mask .who .flag"))
    assert labels == [*["not trained"] * 2, "trained", "not trained", "trained"]
    assert len(browser.ask(TEXTS.format(".mask .begins"))) == 2


def test_a_chain_reads_as_a_conversation_of_its_agents(browser: Browser, place: Path) -> None:
    browser.open(place / "chains.html", "#t7")
    who = ["prompt", "think", "wiki_search", "observation", "reflection", "no block", "think"]
    wanted = [*who, "answer", "fault"]
    assert browser.ask(TEXTS.format(".chain .who b")) == wanted
    assert browser.ask(TEXTS.format(".chain .flag")) == ["mistake", "malformed", "mistake"]
    assert browser.ask("document.querySelector('.chain .long').open") is False
    browser.press("o")
    browser.wait("document.querySelector('.chain .long').open")


def test_keys_links_search_and_filters_lead_to_a_chain(browser: Browser, place: Path) -> None:
    current = "document.querySelector('#list [aria-current]').getAttribute('href')"
    browser.open(place / "chains.html", "#t399")
    browser.wait(f"document.querySelector('#list [aria-current]') && {current} === '#t399'")
    browser.press("k")
    browser.wait(f"{current} === '#t398'")
    browser.press("Escape")
    browser.wait("document.querySelector('.figures')")
    browser.press("/")
    browser.type("question 39")
    browser.wait("byId('count').textContent === '11 of 400 chains'")
    browser.ask("byId('whole').click()")
    browser.ask(
        "byId('query').value = 'NOWHERE 123'; byId('query').dispatchEvent(new Event('input'))"
    )
    browser.wait("byId('count').textContent === '1 of 400 chains'")
    browser.ask("byId('query').value = ''; byId('query').dispatchEvent(new Event('input'))")
    browser.wait("byId('count').textContent === '400 chains'")
    browser.ask(
        "[...document.querySelectorAll('.link')].find((b) => b.textContent === 'family_1').click()"
    )
    browser.wait("byId('count').textContent === '133 of 400 chains'")
    browser.ask("document.activeElement.blur()")
    browser.press("j")
    browser.wait("location.hash === '#t1'")
    browser.press("j")
    browser.wait("location.hash === '#t4'")
    browser.open(place / "chains.html", "#nobody")
    assert browser.ask("document.querySelector('.notice').textContent") == (
        "There is no chain nobody on this page."
    )
    assert browser.troubles == []


def test_the_list_grows_as_it_is_scrolled(browser: Browser, place: Path) -> None:
    browser.open(place / "chains.html")
    browser.wait("list.children.length >= 150")
    assert browser.ask("list.children.length") < 400
    grow = "document.querySelector('.rows').scrollTop = 1e9"
    browser.wait(f"({grow}, list.children.length === 400)")


def test_an_episode_shows_who_spoke_to_whom(browser: Browser, place: Path) -> None:
    browser.open(place / "episodes.html", "#e1")
    titles = [
        *("user to planner", "planner to bobplan", "bob uses wiki_searchquery"),
        *("bob uses wiki_searchmistake", "bob notesmistake", "bob to user"),
    ]
    assert browser.ask(TEXTS.format(".event .who")) == titles
    assert browser.ask(TEXTS.format("h4, h5")) == [
        *("At the same time, in 2 branches", "Branch 1", "Branch 2")
    ]
    assert browser.ask(TEXTS.format(".spent tbody td"))[:3] == ["planner", "big-1", "1"]
    assert "failed: timeout" in browser.ask(TEXTS.format(".event .text"))
    assert browser.ask("window.ran") is None and browser.troubles == []


def test_a_team_of_another_system_fits_on_a_narrow_screen(browser: Browser, tmp_path: Path) -> None:
    names = [f"research_assistant_number_{number}" for number in range(12)]
    agents = [AgentSpec(name, "worker", "Work.") for name in [*names, "idle"]]
    tool, argument = "a_search_of_the_whole_archive_of_newspapers", '{"query": "who", "k": 5}'
    events = [
        *(Message(names[0], name, "Do your part.") for name in names[1:]),
        *(ToolUse(name, tool, argument, "nothing", branch=name) for name in names[1:3]),
    ]
    made = [
        Episode("many", "Who? " * 200, "t", agents, events, "me"),
        Episode(
            "one", "Who?", "t", agents, [ToolUse(names[0], tool, argument, "", branch="1")], "me"
        ),
        Episode("none", "Who?", "t", agents, error="the budget is spent"),
    ]
    lines = [dumps(each.to_json()) + "\n" for each in made]
    (tmp_path / "e.jsonl").write_text("".join(lines))
    write_page(tmp_path / "e.jsonl", tmp_path / "e.html")
    for width, shown in ((390, "none"), (1400, "flex")):
        browser.open(tmp_path / "e.html", "#many", width=width)
        assert browser.ask("document.documentElement.scrollWidth") <= width
        assert browser.ask("main.scrollWidth <= main.clientWidth") is True
        assert (
            browser.ask("getComputedStyle(document.querySelector('.names')).display") == shown
        )  # the names of the lines go where the lines go
    assert browser.ask(TEXTS.format(".names span")) == names
    browser.open(tmp_path / "e.html", "#one")
    assert browser.ask(TEXTS.format("h4")) == ["In a branch"]
    browser.open(tmp_path / "e.html", "#none")
    assert browser.ask("document.querySelector('main').innerText").endswith("Nothing was recorded.")


def test_nothing_is_offered_that_would_not_filter(browser: Browser, tmp_path: Path) -> None:
    agents = [AgentSpec("bob", "searcher", "Seek.")]
    asked = Message("bob", "system", "who", "I look.", {"part": "query"})
    plain = Episode("e", "Who?", "t", agents, [asked, ToolUse("bob", "find", "who", "me")], "me")
    (tmp_path / "e.jsonl").write_text(dumps(plain.to_json()) + "\n")
    write_page(tmp_path / "e.jsonl", tmp_path / "e.html")
    browser.open(tmp_path / "e.html", "#e")
    assert browser.ask("byId('flags').checkVisibility()") is False
    assert browser.ask(TEXTS.format(".names span")) == ["bob"]


VIEWS = (
    *(("chains.html", link) for link in ("", "#:list", "#:dropped", "#t7")),
    *(("episodes.html", link) for link in ("", "#e1")),
)


@pytest.mark.parametrize("page, link", VIEWS)
def test_a_narrow_screen_needs_no_scrolling_sideways(
    browser: Browser, place: Path, page: str, link: str
) -> None:
    browser.open(place / page, link, width=390)
    for key in ("", "m", "o"):
        browser.press(key) if key else None
        assert browser.ask("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("page, link", VIEWS)
def test_text_has_enough_contrast(
    browser: Browser, place: Path, page: str, link: str, dark: bool
) -> None:
    browser.open(place / page, link, dark=dark)
    assert browser.ask(CONTRAST) == []
    browser.press("m")
    browser.press("j")
    browser.wait("document.querySelector('.chain, .events')")
    assert browser.ask(CONTRAST) == []


def test_everything_has_a_name_and_a_place_for_the_keyboard(browser: Browser, place: Path) -> None:
    for page, link in VIEWS:
        browser.open(place / page, link)
        nameless = "[...document.querySelectorAll('input, select, button')].filter((n) => "
        nameless += "!n.textContent.trim() && !n.labels?.length && !n.ariaLabel).length"
        assert browser.ask(nameless) == 0
        assert browser.ask("document.querySelectorAll('h1').length") == 1
        assert browser.ask("document.querySelectorAll('main, aside, header, nav').length") == 4
        assert (
            browser.ask("document.querySelectorAll('[tabindex]:not([tabindex=\"-1\"])').length")
            == 0
        )


def test_a_chain_is_printed_without_the_list(browser: Browser, place: Path) -> None:
    browser.open(place / "chains.html", "#t7")
    browser.ask("window.dispatchEvent(new Event('beforeprint'))")
    browser.print_media()
    assert browser.ask("getComputedStyle(document.querySelector('aside')).display") == "none"
    assert browser.ask("document.querySelector('.chain').checkVisibility()") is True
    assert browser.ask("document.querySelector('.chain .long').open") is True
