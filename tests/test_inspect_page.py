"""The inspection page: what is on it is what is in the file.

That nothing of it can run is for `test_inspect_safety.py`, how it looks in a real browser for
`test_inspect_browser.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa.distillation.convert import NotConvertible, convert
from coa.environments import make_tasks
from coa.environments.experts import Experts
from coa.errors import RecordError
from coa.grammar import load_grammar
from coa.grammar.load import GrammarBook
from coa.io.runs import dumps
from coa.recording.episode import Episode, Message, ModelCall, ToolUse
from coa.tasks import Task
from coa.trajectory import Author, Segment, StopReason, Trajectory, save_trajectories
from coa.view.browse import BINS, histogram
from coa.view.page import Written, write_page
from made_pages import Page, chain, episode, page_of, read
from scripts import TOOLBOX_OF, episodes_of


@pytest.fixture(scope="module")
def recorded() -> list[Episode]:
    tasks = make_tasks("atlas-mhqa", "train", 60, seed=2)
    return episodes_of(tasks, Experts(error_rate=0.4, miss_rate=0.2))


@pytest.fixture(scope="module")
def chains(recorded: list[Episode]) -> list[Trajectory]:
    bound = TOOLBOX_OF(Task("any")).bind(load_grammar("mhqa"))
    made = []
    for each in recorded:
        try:
            made.append(convert(each, bound))
        except NotConvertible:
            continue
    assert any(segment.errs for each in made for segment in each.segments)
    return made


def pieces(text: str, spans: list[list[int]]) -> list[str]:
    """Parts of a text by places that count UTF-16 units, as a browser cuts them."""
    units = text.encode("utf-16-le", "surrogatepass")
    return [units[2 * a : 2 * b].decode("utf-16-le", "surrogatepass") for a, b in spans]


def test_every_chain_is_on_the_page_whole(tmp_path: Path, chains: list[Trajectory]) -> None:
    page = page_of(tmp_path, *chains)
    assert page.content["kind"] == "chains"
    assert [entry["question"] for entry in page.content["entries"]] == [c.question for c in chains]
    assert [entry["id"] for entry in page.content["entries"]] == [c.task_id for c in chains]
    for record, source in zip(page.records, chains, strict=True):
        assert [s["text"] for s in record["segments"]] == [s.text for s in source.segments]
        assert [s["author"] for s in record["segments"]] == [s.author for s in source.segments]


def test_a_block_has_its_role_and_its_tags(tmp_path: Path, chains: list[Trajectory]) -> None:
    count = 0
    for record in page_of(tmp_path, *chains).records:
        for segment in record["segments"]:
            for role, start, end in segment.get("blocks", ()):
                (cut,) = pieces(segment["text"], [[start, end]])
                assert cut.startswith(f"<{role}>") and cut.endswith(f"</{role}>")
                count += 1
    assert count > len(chains)


def test_what_is_called_trained_is_what_training_weighs(
    tmp_path: Path, chains: list[Trajectory]
) -> None:
    rows = pytest.importorskip("coa.train.rows")

    class Letters:
        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

        def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
            return self.encode(text), [(at, at + 1) for at in range(len(text))]

        def encode_prompt(self, system: str, user: str) -> list[int]:
            return self.encode(system)

        def decode(self, ids: list[int]) -> str:
            return "".join(map(chr, ids))

    for record, source in zip(page_of(tmp_path, *chains).records, chains, strict=True):
        row = rows.build_row(source, Letters())
        marks = record["marks"]
        assert marks["trained"] == sum(row.weights)
        assert sum(marks.values()) == len(row.weights)
        wrong = [
            cut
            for segment in record["segments"]
            for cut in pieces(segment["text"], segment.get("errs", []))
        ]
        weighed = zip(row.ids, row.weights, strict=True)
        silent = [chr(letter) for letter, weight in weighed if weight == 0]
        assert sum(map(len, wrong)) == marks.get("mistake", 0)
        assert len(silent) == marks["not trained"] + marks.get("mistake", 0)


@given(
    text=st.text(alphabet=st.sampled_from("ab \n<>/\U0001f600\u00e9\u2028")),
    spans=st.lists(st.tuples(st.integers(-3, 40), st.integers(-3, 40)), max_size=4),
)
def test_places_of_mistakes_survive_letters_of_two_units(
    tmp_path_factory: pytest.TempPathFactory, text: str, spans: list[tuple[int, int]]
) -> None:
    source = chain()
    places = [sorted(min(max(at, 0), len(text)) for at in span) for span in spans]
    spans = [(start, end) for start, end in places]
    source.segments[1] = Segment(Author.MODEL, text, errs=spans)
    (record,) = page_of(tmp_path_factory.mktemp("page"), source).records
    segment = record["segments"][1]
    inside = {at for a, b in spans for at in range(a, b)}
    assert "".join(pieces(text, segment["errs"])) == "".join(text[at] for at in sorted(inside))
    assert record["marks"].get("mistake", 0) == len(inside)


def test_the_list_says_what_is_particular_about_a_chain(tmp_path: Path) -> None:
    plans = (
        "<plan> a</plan><wiki_search> x</wiki_search><reflection> no</reflection><plan> b</plan>"
    )
    odd = chain(f"{plans} stray", task_id="t2", stop=StopReason.TURNS, answer=None)
    odd.segments[1].errs = [(0, 5)]
    page = page_of(tmp_path, chain(), odd, odd)
    first, second = page.content["entries"]
    assert first["flags"] == []
    wanted = {"reflection", "mistake", "re-planned", "malformed", "unanswered", "copies"}
    assert set(second["flags"]) == wanted
    assert second["numbers"] == {
        **{"turns": 1, "calls": 1, "length": len(odd.text), "mistaken": 5, "copies": 2}
    }
    assert page.records[1]["segments"][1]["faults"] == ["'stray' stands outside any block."]
    assert ["with copies", "3"] in page.content["figures"]
    assert set(second["flags"]) <= set(page.content["flags"])


def test_samples_of_one_task_are_not_copies_and_have_links_of_their_own(tmp_path: Path) -> None:
    page = page_of(tmp_path, chain(), chain(sample=1), chain(sample=2), chain(task_id="t1~2"))
    entries = page.content["entries"]
    assert [entry["id"] for entry in entries] == ["t1", "t1~2", "t1~3", "t1~2~2"]
    assert all(entry["numbers"]["copies"] == 1 for entry in entries)


def test_an_own_grammar_finds_the_blocks(tmp_path: Path) -> None:
    own = replace(load_grammar("mhqa"), name="own")
    made = chain(grammar="own", grammar_id=own.fingerprint())
    with pytest.raises(RecordError, match=r"made.jsonl:1: the grammar 'own' \(\w+\) is not stored"):
        page_of(tmp_path, made)
    GrammarBook([replace(own, start=("plan", "answer"))]).save(tmp_path)
    with pytest.raises(RecordError, match=r"made.jsonl:1: the grammar 'own' \(\w+\) is not stored"):
        page_of(tmp_path, made)
    GrammarBook([own]).save(tmp_path)
    page = page_of(tmp_path, made)
    assert [block[0] for block in page.records[0]["segments"][1]["blocks"]] == ["think", "plan"]


def distilled(tmp_path: Path, funnel: Any, rejected: list[dict[str, Any]]) -> Page:
    save_trajectories(tmp_path / "trajectories.jsonl", [chain()])
    (tmp_path / "funnel.json").write_text(json.dumps(funnel))
    (tmp_path / "rejected.jsonl").write_text("".join(dumps(each) + "\n" for each in rejected))
    write_page(tmp_path, tmp_path / "page.html")
    return read(tmp_path / "page.html")


def test_what_was_dropped_and_repeated_has_its_reason(tmp_path: Path) -> None:
    notes = [
        {"task_id": "x", "stage": "quality", "reason": "wrong answer", "detail": "12"},
        {"task_id": "t1", "stage": "correction", "reason": "corrected", "copies": 3},
    ]
    stages = [{"stage": "quality", "entered": 2, "left": 1, "reasons": {"wrong answer": 1}}]
    page = distilled(tmp_path, {"episodes": 2, "kept": 1, "rejected": {}, "stages": stages}, notes)
    assert page.content["dropped"] == [
        ["x", "dropped", "quality", "wrong answer", "12"],
        ["t1", "repeated, +3", "correction", "corrected", ""],
    ]
    assert ["dropped", "1"] in page.content["figures"]
    assert ">Dropped and repeated<" in page.html
    funnel = page.content["charts"][0]
    assert funnel["rows"] == [
        ["episodes", 2, ""],
        ["quality", 1, "wrong answer (1)"],
        ["kept", 1, ""],
    ]


def test_a_funnel_without_stages_shows_its_reasons(tmp_path: Path) -> None:
    page = distilled(tmp_path, {"episodes": 3, "kept": 1, "rejected": {"wrong answer": 2}}, [])
    rows = page.content["charts"][0]["rows"]
    assert rows == [["episodes", 3, ""], ["kept", 1, "wrong answer (2)"]]


def test_where_nothing_was_kept_the_reasons_are_the_page(tmp_path: Path) -> None:
    (tmp_path / "trajectories.jsonl").write_text("")
    (tmp_path / "rejected.jsonl").write_text('{"task_id":"x","reason":"wrong answer"}\n')
    written = write_page(tmp_path, tmp_path / "page.html")
    assert (written.shown, written.total, written.dropped) == (0, 0, 1)
    assert read(tmp_path / "page.html").content["dropped"][0][3] == "wrong answer"


def test_an_evaluation_shows_its_scores_and_its_interval(tmp_path: Path) -> None:
    save_trajectories(tmp_path / "trajectories.jsonl", [chain(), chain(sample=1)])
    scores = [
        {"task_id": "t1", "sample": 0, "score": 1.0},
        {"task_id": "t1", "sample": 1, "score": 0},
    ]
    (tmp_path / "scores.jsonl").write_text("".join(dumps(each) + "\n" for each in scores))
    (tmp_path / "summary.json").write_text('{"accuracy": 0.5, "ci95": [0.1, 0.9]}')
    write_page(tmp_path, tmp_path / "page.html")
    page = read(tmp_path / "page.html")
    assert [entry["numbers"]["score"] for entry in page.content["entries"]] == [1, 0]
    assert [entry["flags"] for entry in page.content["entries"]] == [[], ["wrong"]]
    assert page.content["figures"][1:5] == [
        ["accuracy, 95% interval", "50.0% [10.0, 90.0]"],
        *(["right", "1"], ["wrong", "1"], ["no answer", "0"]),
    ]


def test_what_is_no_episode_is_on_the_page_as_left_out(
    tmp_path: Path, recorded: list[Episode]
) -> None:
    lines = [dumps(each.to_json()) for each in recorded[:2]]
    lines.insert(1, dumps(recorded[2].to_json() | {"answer": 3600}))
    (tmp_path / "episodes.jsonl").write_text("".join(f"{line}\n" for line in lines))
    written = write_page(tmp_path / "episodes.jsonl", tmp_path / "page.html")
    assert (written.shown, written.dropped) == (2, 1)
    page = read(tmp_path / "page.html")
    said = "the episode: answer: found 3600, expected a text."
    assert page.content["dropped"] == [["line 2", "dropped", "", "not an episode", said]]


def test_every_event_of_a_team_is_on_the_page(tmp_path: Path, recorded: list[Episode]) -> None:
    page = page_of(tmp_path, *recorded)
    assert page.content["kind"] == "episodes"
    for record, source in zip(page.records, recorded, strict=True):
        assert [agent[0] for agent in record["agents"]] == [agent.name for agent in source.agents]
        assert [agent[2] for agent in record["agents"]] == [agent.system for agent in source.agents]
        for shown, event in zip(record["events"], source.events, strict=True):
            same = (shown["agent"], shown["erred"], shown["branch"])
            assert same == (event.agent, event.erred, event.branch)
            if isinstance(event, ToolUse):
                assert (shown["tool"], shown["text"]) == (event.tool, event.argument)
                assert shown["result"] == event.result
            else:
                said = (shown["to"], shown["text"], shown["thought"])
                assert said == (event.to, event.text, event.thought)
    agents = {agent.name for each in recorded for agent in each.agents}
    colours = {name: page.content["looks"][name]["colour"] for name in agents}
    assert len(set(colours.values())) == len(agents)


def test_the_list_says_what_is_particular_about_an_episode(tmp_path: Path) -> None:
    (entry,) = page_of(tmp_path, episode()).content["entries"]
    assert entry["flags"] == ["mistake", "alarm", "branches", "tool failed"]
    wanted = {"messages": 2, "calls": 2, "agents": 2, "length": 14, "mistakes": 1}
    assert entry["numbers"] == wanted


def test_model_calls_are_shown_with_their_cost(tmp_path: Path) -> None:
    priced = ModelCall("big-1", "raw", 1200, 200, 30, 0.0125)
    said = [Message("planner", "bob", "a", call=priced), Message("bob", "user", "b", call=priced)]
    page = page_of(tmp_path, episode(events=said))
    assert page.content["entries"][0]["numbers"]["cost"] == 0.025
    assert page.content["entries"][0]["numbers"]["tokens"] == 2460
    (record,) = page.records
    row = ["planner", "big-1", "1", "1,200", "200", "30", "0.0125"]
    assert record["spent"][0] == row
    line = "big-1: 1,200 tokens in (200 cached), 30 out, cost 0.0125"
    assert record["events"][0]["call"] == {"line": line, "text": "raw", "given": ""}
    free = ModelCall("big-1", "raw", 5, 0, 1)
    record = page_of(tmp_path, episode(events=[Message("bob", "user", "b", call=free)])).records[0]
    assert record["spent"][0][-1] == "not known"


def test_a_small_cost_is_a_plain_number(tmp_path: Path) -> None:
    call = ModelCall("small-1", "raw", 300, 0, 14, cost=5.355e-05)
    page = page_of(tmp_path, episode(events=[Message("planner", "user", "me", call=call)]))
    assert page.records[0]["events"][0]["call"]["line"].endswith(", cost 0.00005355")
    assert page.records[0]["spent"][0][-1] == "0.00005355"
    assert ["cost", "0.00005355"] in page.content["figures"]


def test_a_limit_is_told_and_figures_are_of_all(tmp_path: Path, chains: list[Trajectory]) -> None:
    page = page_of(tmp_path, *chains, n=5)
    assert len(page.content["entries"]) == len(page.records) == 5
    note = f"The list has the first 5 of {len(chains)} chains; the figures are of all."
    assert page.content["notes"] == [note]
    assert ["chains", str(len(chains))] in page.content["figures"]
    assert page_of(tmp_path, *chains, n=len(chains)).content["notes"] == []


def test_records_of_several_chunks_keep_their_order(tmp_path: Path) -> None:
    page = page_of(tmp_path, *(chain(task_id=f"t{at}", question=f"Q{at}") for at in range(130)))
    facts = [dict(record["facts"])["task"] for record in page.records]
    assert facts == [entry["id"] for entry in page.content["entries"]]


def test_write_page_says_what_it_wrote(tmp_path: Path) -> None:
    save_trajectories(tmp_path / "a.jsonl", [chain(), chain(sample=1)])
    written = write_page(tmp_path / "a.jsonl", tmp_path / "deep" / "p.html", n=1)
    size = (tmp_path / "deep" / "p.html").stat().st_size
    assert written == Written("chains", 1, 2, 0, size)


def test_the_same_input_gives_the_same_bytes(tmp_path: Path, chains: list[Trajectory]) -> None:
    pages = []
    for name in ("one", "two"):
        save_trajectories(tmp_path / name / "made.jsonl", chains)
        write_page(tmp_path / name / "made.jsonl", tmp_path / name / "page.html")
        pages.append((tmp_path / name / "page.html").read_bytes())
    assert pages[0] == pages[1]


def test_the_title_is_the_name_of_what_is_shown(tmp_path: Path) -> None:
    place = tmp_path / "run <7> {{page}}"
    save_trajectories(place / "trajectories.jsonl", [chain()])
    for file, wanted in (
        (place, "run &lt;7&gt; {{page}}"),
        (place / "trajectories.jsonl", "run &lt;7&gt; {{page}}/trajectories.jsonl"),
    ):
        write_page(file, tmp_path / "page.html")
        assert f"<title>{wanted}</title>" in (tmp_path / "page.html").read_text()
    write_page(place, tmp_path / "page.html", title="\u00c4 & B")
    assert "<title>&#196; &amp; B</title>" in (tmp_path / "page.html").read_text()


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=50))
def test_a_histogram_counts_everything_once_in_few_steps(values: list[int]) -> None:
    rows = histogram(values)
    assert sum(count for _, count in rows) == len(values)
    assert len(rows) <= BINS
    assert rows[0][1] and rows[-1][1]
