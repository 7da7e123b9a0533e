"""The inspection page: no text of a record can run, and what cannot be shown is refused."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.errors import CoaError, UsageError
from coa.io.runs import dumps
from coa.recording.episode import Message, ModelCall
from coa.trajectory import Author, Segment, save_trajectories
from coa.view.page import write_page
from made_pages import HOSTILE, ORDINARY, chain, episode, page_of, read

# -- nothing of it can run ------------------------------------------------------------------


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    plain = page_of(tmp_path, chain(), chain(sample=1))
    bad = chain(
        f"<think> {HOSTILE}</think>",
        **{"task_id": HOSTILE, "question": HOSTILE, "answer": HOSTILE},
        **{"meta": {HOSTILE: HOSTILE, "family": HOSTILE}, "error": HOSTILE, "weights": HOSTILE},
    )
    page = page_of(tmp_path, bad, chain(sample=1), title=HOSTILE)
    assert page.tags == plain.tags
    assert page.content["entries"][0]["question"] == HOSTILE
    assert HOSTILE in page.records[0]["segments"][1]["text"]
    assert "<img" not in page.html and "<script>alert" not in page.html


@settings(max_examples=60, deadline=None)
@given(st.text(), st.text(), st.text())
def test_no_text_changes_the_markup(
    tmp_path_factory: pytest.TempPathFactory, question: str, text: str, title: str
) -> None:
    tmp_path = tmp_path_factory.mktemp("page")
    plain = page_of(tmp_path, chain(), title="t")
    page = page_of(tmp_path, chain(text, question=question), title=title or "t")
    assert page.tags == plain.tags
    assert page.content["entries"][0]["question"] == question
    assert page.records[0]["segments"][1]["text"] == text


def test_half_a_surrogate_pair_and_numbers_that_json_has_not_do_not_break_the_page(
    tmp_path: Path,
) -> None:
    record = chain(meta={"family": "f", "loss": float("nan")}).to_json()
    line = json.dumps(record).replace("Who?", "half \\ud800 a pair")
    (tmp_path / "a.jsonl").write_text(line + "\n")
    write_page(tmp_path / "a.jsonl", tmp_path / "page.html")
    page = read(tmp_path / "page.html")
    assert page.content["entries"][0]["question"] == "half \ud800 a pair"
    assert ["loss", "NaN"] in page.records[0]["facts"]


def test_only_our_script_and_style_may_run(tmp_path: Path) -> None:
    page = page_of(tmp_path, chain())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page.html)
    assert policy and "default-src 'none'" in policy.group(1)
    for kind in ("script", "style"):
        (own,) = re.findall(rf"(?s)<{kind}>(.*?)</{kind}>", page.html)
        digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy.group(1)
    assert "unsafe" not in policy.group(1)
    assert page.html.index("Content-Security-Policy") < page.html.index("<style>")


def test_the_page_asks_for_nothing(tmp_path: Path) -> None:
    html = page_of(tmp_path, chain()).html
    shell = re.sub(r'(?s)<script type="application/json".*?</script>', "", html)
    assert not re.findall(r"\b(?:src|srcset|action|poster)\s*=", shell)
    assert not re.findall(r"url\(|@import|fetch\(|XMLHttpRequest|WebSocket|import\(", shell)
    assert set(re.findall(r"https?://[^\s\"]+", shell)) == {"http://www.w3.org/2000/svg"}


def test_the_script_makes_text_nodes_only(tmp_path: Path) -> None:
    html = page_of(tmp_path, chain()).html
    (script,) = re.findall(r"(?s)<script>(.*?)</script>", html)
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(|DOMParser"
    )
    assert not re.findall(forbidden, script)


# -- what cannot be shown -------------------------------------------------------------------


def refused(tmp_path: Path, text: str, name: str = "a.jsonl") -> str:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(CoaError) as caught:
        write_page(file, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(tmp_path), "DIR")


def test_what_is_no_trajectory_and_no_episode_is_refused_in_one_line(tmp_path: Path) -> None:
    good = dumps(chain().to_json())
    assert refused(tmp_path, "") == "DIR/a.jsonl: is empty, so there is nothing to show."
    assert refused(tmp_path, f"{good}\n{good[:50]}").startswith(
        "DIR/a.jsonl:2: the line is cut in the middle."
    )
    assert refused(tmp_path, '{"id":"t","question":"Who?"}\n') == (
        "DIR/a.jsonl:1: neither a trajectory nor an episode (its fields: id, question). "
        "Give what coa record, coa distill or coa eval wrote."
    )
    assert refused(tmp_path, "{}\n").startswith("DIR/a.jsonl:1: neither a trajectory nor")
    newer = good.replace('"schema":1', '"schema":9')
    assert refused(tmp_path, newer).startswith("DIR/a.jsonl:1: found trajectory schema 9")
    wrong = good.replace('"question":"Who?"', '"question":7')
    assert refused(tmp_path, f"{good}\n{wrong}\n") == (
        "DIR/a.jsonl:2: question is 7, expected text"
    )
    for call, wanted in (
        (ModelCall("m", "raw", cost=float("inf")), "a model call costs inf, expected an amount or"),
        (ModelCall("m", "raw", 1e999), "event 1: call: prompt_tokens: found inf, expected a wh"),  # type: ignore
    ):
        priced = dumps(episode(events=[Message("bob", "user", "b", call=call)]).to_json())
        assert refused(tmp_path, priced).startswith(f"DIR/a.jsonl:1: {wanted}")
    mixed = f"{good}\n{dumps(episode().to_json())}\n"
    assert refused(tmp_path, mixed).startswith("DIR/a.jsonl:2: ")


def test_files_beside_the_chains_are_checked_too(tmp_path: Path) -> None:
    good = dumps(chain().to_json())
    for name, text, wanted in (
        ("funnel.json", "{", "DIR/funnel.json: not JSON"),
        ("funnel.json", "[]", "DIR/funnel.json: found a list, expected an object."),
        ("funnel.json", '{"episodes": 1}', "DIR/funnel.json: not a funnel of coa distill"),
        ("summary.json", '{"accuracy": "x"}', "DIR/summary.json: not a summary of coa eval"),
        ("rejected.jsonl", '{"task_id": 1}\n', "DIR/rejected.jsonl:1: no field 'reason'"),
        (
            "scores.jsonl",
            '{"task_id":"t","sample":0,"score":NaN}\n',
            "DIR/scores.jsonl:1: found nan, expected a number",
        ),
    ):
        (tmp_path / name).write_text(text)
        assert refused(tmp_path, good, "trajectories.jsonl").startswith(wanted)
        (tmp_path / name).unlink()


def test_a_directory_without_chains_and_a_file_that_is_not_there_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(UsageError, match=r"holds neither trajectories.jsonl nor episodes.jsonl"):
        write_page(tmp_path, tmp_path / "page.html")
    with pytest.raises(UsageError, match=r"gone.jsonl: no such file"):
        write_page(tmp_path / "gone.jsonl", tmp_path / "page.html")


def test_a_page_never_replaces_records(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    save_trajectories(file, [chain()])
    before = file.read_bytes()
    with pytest.raises(UsageError, match=r"a.jsonl: a page is a file whose name ends in .html"):
        write_page(file, file)
    assert file.read_bytes() == before
    (tmp_path / "d.html").mkdir()
    with pytest.raises(UsageError, match=r"d.html: a page is a file"):
        write_page(file, tmp_path / "d.html")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)


def places_in(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside a record."""
    if not isinstance(value, (dict, list)):
        return [at]
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    return [at, *(way for key, item in inside for way in places_in(item, (*at, key)))]


@settings(max_examples=300, deadline=None)
@given(st.booleans(), st.integers(0, 10**6), JSON)
def test_a_damaged_record_is_shown_or_refused_and_never_a_crash(
    tmp_path_factory: pytest.TempPathFactory, team: bool, pick: int, put: Any
) -> None:
    called = Message("bob", "user", "b", call=ModelCall("m", "raw", 5, 0, 1, 0.5))
    marked = Segment(Author.MODEL, ORDINARY, errs=[(0, 4)])
    whole = episode(events=[*episode().events, called]) if team else chain(segments=[marked])
    record = json.loads(dumps(whole.to_json()))
    *way, last = [way for way in places_in(record) if way][pick % (len(places_in(record)) - 1)]
    inside: Any = record
    for key in way:
        inside = inside[key]
    inside[last] = put
    tmp_path = tmp_path_factory.mktemp("page")
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    try:
        write_page(tmp_path / "a.jsonl", tmp_path / "page.html")
    except CoaError as refusal:
        assert "\n" not in str(refusal)
    else:
        page = read(tmp_path / "page.html")
        assert len(page.records) == 1
        texts = [page.content["entries"][0][key] for key in ("id", "question", "set", "family")]
        assert all(isinstance(text, str) for text in texts)
