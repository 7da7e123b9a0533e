"""Scores and ratings in the words that models use; what cannot be told is None."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.grammar import load_grammar, parse_ratings, parse_score

CRITERIA = load_grammar("web").by_name["reflection"].ratings

SCORES = {
    "Score: 3": 3,
    "score=2": 2,
    "SCORE - 1": 1,
    "**Score:** 3": 3,
    "Score: **4**": 4,
    "Score:\n3": 3,
    "Score (1-4): 3": 3,
    "Score (from 1 to 4): 2": 2,
    "Score from 1 to 4: 2": 2,
    "Score on the 1\u20134 scale: 4": 4,
    "Score: 3/4": 3,
    "Score: 3 / 4.": 3,
    "Score: 3.0": 3,
    "The score is 1.": 1,
    "score: two": 2,
    "Rating: four": 4,
    "I would give it 3/4": 3,
    "I give it a 3": 3,
    "This deserves a 4 because both pages say so": 4,
    "rated three out of four": 3,
    "3 out of four": 3,
    "2 (out of 4)": 2,
    "On a scale of 1 to 4, I rate this 3": 3,
    "I rate this one 3": 3,
    "Verdict: 2 - partly supported": 2,
    "Grade 1": 1,
    "All 3 sources agree. Score: 4": 4,
    "2/4 of the claims were checked. Score: 3": 3,
    "I score it 3, not 4": 3,
    "At first a score of 2; after the second page, score 4": 4,
    "3": 3,
    "4.": 4,
    "(2)": 2,
    "4 - fully supported": 4,
    "Both pages agree. 4": 4,
    "The date is wrong.\n\n2\n": 2,
    "Score: 4. He scored 2 goals.": 4,
    "Score 4: the team scored 2 goals in the final.": 4,
    "He scored two goals and then 3 more. Score: 4": 4,
    "He scored only 2 goals. 4": 4,
    "Score: 4. A score of 1 would mean wrong.": 4,
    "Score: 4. The page gives it as May 2.": 4,
    "Score from 1 (wrong) to 4 (right): 4": 4,
    "Score, one (wrong or irrelevant) to four (completely right): two": 2,
    "Score 1-4 (3 out of 4)": 3,
    "Score: 2. Now the score is 4.": 4,
    "Score 3 of 4": 3,
    "Score 3 for this answer": 3,
    "Score 3 because 2 pages agree": 3,
    "I give this one a 3": 3,
    "I would give it 3 points": 3,
    "scored 3 because both pages say so": 3,
    "": None,
    "The page says that he scored 2 goals.": None,
    "He scored 4 goals, but in another year.": None,
    "A score of 2 goals was enough.": None,
    "They score two points a game.": None,
    "The final score was 2-1.": None,
    "A score of 4 would mean right.": None,
    "The page gives 3 dates.": None,
    "It looks right.": None,
    "score": None,
    "Score: 0": None,
    "Score: 5": None,
    "Score: 10": None,
    "Score: 34": None,
    "Score: 3.5": None,
    "Score: 3/5": None,
    "Score: 2-3": None,
    "Score: 3 or 4": None,
    "Score: three or four": None,
    "Score: 7, though 2 pages agree": None,
    "2 sources agree": None,
    "Not a 4.": None,
    "It was founded on May 2": None,
    "The one answer is right": None,
    "1 to 4": None,
    "1989-04-03": None,
    "3 and 4": None,
    "Either. 3. Or. 4.": None,
}


@pytest.mark.parametrize(("text", "score"), SCORES.items())
def test_a_score_is_read_or_none(text: str, score: int | None) -> None:
    assert parse_score(text) == score


RATINGS = {
    "Information Conflict: good. Tool Effectiveness: average. Trajectory Monitoring: poor": "gap",
    "information conflict = GOOD, tool_effectiveness = Fair, trajectory-monitoring = Good": "gag",
    "**Information Conflict**: Poor\n- Tool Effectiveness (two calls): good\n"
    "- Trajectory Monitoring: on course, good": "pgg",
    "### Information Conflict\nPoor\n### Tool Effectiveness\nGood\n"
    "### Trajectory Monitoring\nAverage": "pga",
    "Information Conflict: the tool results agree, good\nTool Effectiveness: good\n"
    "Trajectory Monitoring: good": "ggg",
    "Information Conflict: poor. Tool Effectiveness: good. Trajectory Monitoring: good. "
    "On second thought, Information Conflict: good.": "ggg",
    "": None,
    "All good.": None,
    "Information Conflict: good. Tool Effectiveness: good.": None,
    "Information Conflict, Tool Effectiveness, Trajectory Monitoring: good": None,
    "Information Conflict: good/average/poor. Tool Effectiveness: good. "
    "Trajectory Monitoring: good": None,
    "Information Conflict: goodish. Tool Effectiveness: good. Trajectory Monitoring: good": None,
}


@pytest.mark.parametrize(("text", "initials"), RATINGS.items())
def test_ratings_are_read_or_none(text: str, initials: str | None) -> None:
    ratings = parse_ratings(text, CRITERIA)
    found = ratings and "".join(ratings[criterion][0] for criterion in CRITERIA)
    assert found == initials


@settings(deadline=None)
@given(st.text(alphabet="score 1234/.-:;\nofutrating"))
def test_a_score_is_in_range_whatever_the_text(text: str) -> None:
    assert parse_score(text) in (None, 1, 2, 3, 4)
