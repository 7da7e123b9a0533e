"""The format reward: what is well formed, by the grammar, the fences and the turns."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.errors import GrammarError
from coa.grammar import PRESETS, load_grammar
from coa.grammar.load import GrammarBook
from coa.rewards import FormatSettings, Part, check_format, open_reward
from coa.tasks import Task
from coa.trajectory import Author, Segment, Trajectory, load_trajectories, save_trajectories
from made_chains import GOOD, LIMA, LOOK, PLAN, chain
from playing import ANSWER, SEARCH, play

GRADED = FormatSettings(graded=True)
FENCED = "\n```py\nprint(1)\n```\n"


def coded(*programs: str) -> Trajectory:
    """A chain of the code grammar that runs these programs."""
    said = [("plan", "1. compute"), *(("code", each) for each in programs)]
    blocks: list[tuple[str, str]] = []
    for role, body in said:
        blocks += [("think", "next")] if role == "code" else []
        blocks += [(role, body)] + ([("reflection", "fine")] if role == "code" else [])
    return chain([*blocks, ("think", "done"), ("answer", "1")], "code")


def test_a_legal_chain_is_well_formed() -> None:
    web = [PLAN, ("web_search", "a"), ("reflection", GOOD), ("suggested_answer", "Lima")]
    web += [("double_check", "Score: 4"), LIMA]
    for made in (chain([PLAN, LOOK, LIMA]), chain(web, "web"), coded(FENCED)):
        assert check_format(made) == check_format(made, GRADED) == Part(1.0), made.text


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ([LOOK, LIMA], "<wiki_search> may not come here; write <plan>."),
        ([PLAN, LOOK], "The text ends before an answer."),
        ([PLAN, ("answer", " ")], "<answer> is empty."),
        ([PLAN, ("answer", "<plan>")], "<plan> stands inside <answer>; close it first."),
    ],
)
def test_what_is_not_legal_scores_0_with_the_reason(said: list[tuple[str, str]], says: str) -> None:
    made = chain(said)  # type: ignore[arg-type]
    assert check_format(made) == Part(0.0, says)
    graded = check_format(made, GRADED)
    assert graded.score is not None and graded.score < 1 and graded.reason


@pytest.mark.parametrize(
    ("program", "score"),
    [
        (FENCED, 1.0),
        ("```python\nprint(1)\n```", 1.0),
        ("```py\nprint(input())\n```\n```sh\n5\n```", 1.0),
        ("print(1)", 0.0),
        ("Here:\n```py\nprint(1)\n```", 0.0),
        ("```py\nprint(1)\n```\nthat is it", 0.0),
        ("```py\na = 1\n```\n```py\nprint(a)\n```", 0.0),
        ("```sh\n5\n```", 0.0),
        ("```\nprint(1)\n```", 0.0),
    ],
)
def test_programs_stand_in_fences(program: str, score: float) -> None:
    made = coded(program)
    assert check_format(made).score == score
    assert check_format(made, FormatSettings(fences=False)).score == 1.0
    assert check_format(coded(FENCED, program), GRADED).score == pytest.approx(
        1.0 if score else 2 / 3
    )


async def test_a_malformed_turn_counts_even_when_it_was_put_right() -> None:
    first = SEARCH.format("Lima")
    good = await play([first, ANSWER])
    assert check_format(good) == check_format(good, GRADED) == Part(1.0)
    bad = await play([first, "no block at all", ANSWER])
    assert bad.answer == "Paris"
    assert check_format(bad) == Part(0.0, "'no block at all' stands outside any block.")
    assert check_format(bad, GRADED).score == pytest.approx(2 / 3)


async def test_what_a_budget_cut_has_no_answer() -> None:
    cut = await play([SEARCH.format("Lima"), ANSWER], turns=1)
    assert check_format(cut).score == 0.0
    assert check_format(cut, GRADED) == Part(0.5, "turn 2: the answer is missing")


async def test_a_chain_without_turns_cannot_be_judged() -> None:
    answered = Trajectory("t", "q?", "mhqa", answer="Lima")
    assert check_format(answered).score is None
    async with open_reward("exact*format") as reward:
        assert (await reward.score(Task("q?", ("Lima",)), answered)).score is None
        assert (await reward.score(Task("q?", ("Quito",)), answered)).score == 0.0


async def test_a_grammar_of_ones_own_is_found_beside_the_trajectories(tmp_path: Path) -> None:
    path = tmp_path / "short.toml"
    path.write_text('start = ["answer"]\n[roles.answer]\nkind = "answer"\n')
    short = load_grammar(str(path))
    made = Trajectory("t", "q?", "short", [Segment(Author.MODEL, "<answer>Lima</answer>")])
    made.grammar_id = short.fingerprint()
    save_trajectories(tmp_path / "trajectories.jsonl", [made])
    (alone,) = load_trajectories(tmp_path)
    with pytest.raises(GrammarError, match=r"'short' \(\w+\) is not stored beside the file"):
        check_format(alone)
    GrammarBook([short]).save(tmp_path)
    async with open_reward("format") as reward:
        assert (await reward.score(Task("q?"), load_trajectories(tmp_path)[0])).score == 1.0


PIECES = ["<think>", "</think>", "<plan>p</plan>", "<answer>", "Lima", "</answer>", "\n", "<code>"]
PIECES += ["```py\n1\n```", "</code>", "<wiki_search>", "q", "</wiki_search>", "<observation>"]


@settings(max_examples=200)
@given(
    st.sampled_from(PRESETS), st.lists(st.lists(st.sampled_from(PIECES), max_size=8), max_size=4)
)
def test_any_text_has_a_score_and_what_is_well_formed_is_so_in_every_turn(
    grammar: str, turns: list[list[str]]
) -> None:
    made = Trajectory("t", "q?", grammar)
    for turn in turns:
        made.segments.append(Segment(Author.MODEL, "".join(turn)))
        made.segments.append(Segment(Author.ENV, "\n<observation>seen</observation>\n"))
    whole, graded = check_format(made), check_format(made, GRADED)
    if not turns:
        assert whole.score is None and graded.score is None
        return
    assert whole.score in (0.0, 1.0)
    assert graded.score is not None and 0.0 <= graded.score <= 1.0
    if whole.score == 1.0:
        assert graded.score == 1.0
