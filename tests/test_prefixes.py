"""Rows that begin alike, laid out once: the tree says exactly what the rows say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coa.train.prefixes import PrefixTree, alphabetical, common

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8)


@given(ROWS, st.integers(1, 6))
def test_every_token_of_every_row_stands_in_the_tree_and_sees_its_own_row(
    rows: list[list[int]], least: int
) -> None:
    tree = PrefixTree.of(rows, least)
    assert [tree.ids[place] for place in tree.places] == [i for row in rows for i in row]
    assert [tree.positions[place] for place in tree.places] == [
        at for row in rows for at in range(len(row))
    ]
    covered = [place for span in tree.spans for place in range(span.own.start, span.own.stop)]
    assert covered == list(range(len(tree.ids)))
    begun = 0
    for row in rows:
        own = tree.places[begun : begun + len(row)]
        begun += len(row)
        for place in own:
            span = next(s for s in tree.spans if s.own.start <= place < s.own.stop)
            seen = [at for part in span.seen for at in range(part.start, part.stop)]
            assert seen[: seen.index(place) + 1] == own[: own.index(place) + 1]


@given(ROWS)
def test_with_a_least_of_one_no_beginning_stands_twice(rows: list[list[int]]) -> None:
    beginnings = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    assert len(PrefixTree.of(rows, least=1).ids) == len(beginnings)


def test_a_short_common_beginning_is_not_worth_a_span() -> None:
    rows = [[1, 2, 3, *[4] * 40], [1, 2, 3, *[5] * 40]]
    assert len(PrefixTree.of(rows, least=4).ids) == 86
    assert len(PrefixTree.of(rows, least=3).ids) == 83


def test_rows_that_are_the_same_stand_once_however_short() -> None:
    tree = PrefixTree.of([[7, 8], [7, 8], [7]], least=16)
    assert tree.ids == [7, 7, 8]
    assert tree.places == [1, 2, 1, 2, 0]


@given(ROWS)
def test_neighbours_share_most(rows: list[list[int]]) -> None:
    order = alphabetical(rows)
    assert sorted(order) == list(range(len(rows)))
    for at, one in enumerate(order):
        others = [common(rows[one], rows[other]) for other in order[:at]]
        assert not others or others[-1] == max(others)


@given(st.lists(st.integers(0, 1)), st.lists(st.integers(0, 1)))
def test_common_counts_tokens_from_the_start(one: list[int], other: list[int]) -> None:
    count = common(one, other)
    assert one[:count] == other[:count]
    assert one[count : count + 1] != other[count : count + 1] or count == len(one) == len(other)
