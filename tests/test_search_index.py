from __future__ import annotations

from pathlib import Path

import pytest

from coa.corpus.index import SearchIndex
from coa.corpus.page import Passage
from coa.environments.atlas.pages import atlas_index
from coa.environments.atlas.tasks import make_tasks
from coa.errors import UsageError

PASSAGES = [
    Passage("Apple", "https://x.example/apple", "The apple tree bears fruits in autumn."),
    Passage("Pear", "https://x.example/pear", "Pears ripen after picking."),
    Passage("Pear", "https://x.example/pear", "The pear is grown in many countries."),
    Passage("S\xe3o Tom\xe9", "https://x.example/sao-tome", "An island with cocoa."),
]


@pytest.mark.parametrize("world_seed", [0, 7])
def test_reference_queries_find_the_right_passage(world_seed: int) -> None:
    index, found = atlas_index(world_seed), []
    for split in ("train", "heldout_entity", "heldout_family"):
        for task in make_tasks(split, 800, seed=6, world_seed=world_seed):
            for hop in task.gold["hops"]:
                texts = [hit.text for hit in index.search(hop["query"], 3)]
                found.append((hop["passage"] == texts[0], hop["passage"] in texts))
    assert sum(first for first, _ in found) / len(found) >= 0.97
    assert sum(among for _, among in found) / len(found) >= 0.99


def test_hits_carry_title_address_text_and_score() -> None:
    hits = SearchIndex.build(PASSAGES).search("apple fruit", 2)
    assert (hits[0].title, hits[0].url, hits[0].text) == (
        PASSAGES[0].title,
        PASSAGES[0].url,
        PASSAGES[0].text,
    )
    assert hits[0].score > 0 and len(hits) == 1


def test_words_are_stemmed_and_accents_folded() -> None:
    index = SearchIndex.build(PASSAGES)
    assert index.search("picked", 1)[0].text == PASSAGES[1].text
    assert index.search("sao tome", 1)[0].title == "S\xe3o Tom\xe9"
    assert index.search("S\xc3O TOM\xc9", 1)[0].title == "S\xe3o Tom\xe9"


def test_a_title_takes_only_its_own_words_out_of_the_text() -> None:
    text = "The interest is 3 percent. Internal rules hold for accounting over the internet."
    page = Passage("International accounts", "https://x.example/accounts", text)
    index = SearchIndex.build([page])
    for query in ("interest", "internal", "internet", "accounting", "accounts", "international"):
        assert [hit.text for hit in index.search(query, 1)] == [text], query
    named = SearchIndex.build([Passage("Korea", "", "Korean.")], titles_are_names=True)
    assert named.search("korean", 1) == [] and len(named.search("korea", 1)) == 1


@pytest.mark.parametrize(
    "query",
    [
        "",
        "   ",
        "\N{SLIGHTLY SMILING FACE}" * 2,
        '"unbalanced',
        "title:x AND (",
        "a OR NOT b",
        "[1 TO 2]",
        "x^",
        "\\",
        "*",
        "name:*",
        "/re(/",
        "-",
        "+1 268",
        "\x00\x01",
        "the of and",
        "'; drop",
        "\xe9" * 500,
        "word " * 2000,
        "x" * 10_000,
    ],
)
def test_any_string_is_a_safe_query(query: str) -> None:
    assert len(SearchIndex.build(PASSAGES).search(query, 3)) <= 3
    assert len(atlas_index().search(query, 3)) <= 3


def test_a_query_is_never_syntax() -> None:
    index = SearchIndex.build(PASSAGES)
    assert index.search("apple AND NOT fruits", 3) == index.search("apple and not fruits", 3)
    assert [hit.title for hit in index.search("url:pear", 3)] == ["Pear", "Pear"]


def test_equal_scores_keep_the_given_order() -> None:
    same = [Passage(f"Page {n}", f"https://x.example/{n}", "alpha beta") for n in range(200)]
    first, second = (SearchIndex.build(same).search("alpha", 50) for _ in range(2))
    assert first == second
    assert [hit.url for hit in first] == [passage.url for passage in same[:50]]


def test_no_hits_are_asked_for_or_found() -> None:
    index = SearchIndex.build(PASSAGES)
    assert index.search("apple", 0) == [] and index.search("zebra", 3) == []
    assert SearchIndex.build([]).search("apple", 3) == []


def test_an_index_in_a_directory_can_be_opened_again(tmp_path: Path) -> None:
    built = SearchIndex.build(PASSAGES, tmp_path / "index")
    again = SearchIndex.build(PASSAGES, tmp_path / "index")
    opened = SearchIndex.open(tmp_path / "index")
    assert len(built) == len(again) == len(opened) == len(PASSAGES)
    assert opened.search("pear countries", 2) == again.search("pear countries", 2)
    with pytest.raises(UsageError, match="coa corpus build"):
        SearchIndex.open(tmp_path / "nothing")
