"""How a team ends its work: an answer is suggested, checked, and given or taken back.

The verifier suggests an answer and checks it as if somebody else had suggested it, which may be
done without attention, or with too much of it. A score of 2 or less sends the team back to the
planner.
"""

from __future__ import annotations

from typing import NamedTuple

from coa.tasks.atlas_inquiries import Conclusion
from coa.teachers.desk import Desk
from coa.teachers.episode import USER

RIGHT, DOUBTFUL = 4, 2


class Review(NamedTuple):
    """How an answer is checked, and who works on it once more when the check fails."""

    thought: str
    worker: str
    again: str


REPORTS = Review("I combine them again.", "verifier", "Combine the reports once more, one by one.")
PROGRAM = Review(
    "I look at the form of the number.",
    "coder",
    "Calculate once more, and round as the question says.",
)


def close(desk: Desk, right: Conclusion, slip: Conclusion | None = None) -> None:
    """Combine the reports, suggest and check, until an answer stands.

    `slip` is what a wrong combination would give; the verifier errs once at most.
    """
    for careful in (False, True):
        erring = slip is not None and not careful and desk.happens(desk.rates.error / 2)
        suggested = slip if erring and slip is not None else right
        desk.count("wrong_combinations", erring)
        answer, because = suggested.answer, suggested.because
        desk.say("verifier", "verifier", answer, because, erring, part="suggestion")
        objection = "The reports give another answer." if suggested != right else ""
        found = f"The reports give {answer}."
        if stands(desk, REPORTS, answer, found, objection, wary=not careful):
            return
    raise AssertionError("the second check of a careful suggestion always passes")


def stands(
    desk: Desk, review: Review, answer: str, found: str, objection: str, wary: bool = True
) -> bool:
    """Check a suggestion; the user gets an answer that passes, and the planner is told otherwise.

    `objection` is what an attentive verifier has against it, empty for a sound one. `wary`: the
    verifier may also doubt it without a reason.
    """
    noticed = not desk.happens(desk.rates.miss) and bool(objection)
    doubted = wary and not noticed and desk.happens(desk.rates.false_alarm)
    desk.count("missed_mistakes", bool(objection) and not (noticed or doubted))
    desk.count("false_alarms", doubted and not objection)
    if not noticed and not doubted:
        said, wrong = f"{found} Score: {RIGHT}", bool(objection)
        desk.say("verifier", "verifier", said, review.thought, wrong, part="check", score=RIGHT)
        desk.say("verifier", USER, answer, "The check passed.", part="verdict", score=RIGHT)
        desk.episode.answer = answer
        return True
    desk.count("alarms")
    reason, wrong = objection if noticed else "I am not sure of it.", not objection
    said = f"{reason} Score: {DOUBTFUL}"
    desk.say("verifier", "planner", said, review.thought, wrong, part="check", score=DOUBTFUL)
    desk.say("planner", review.worker, review.again, "The check failed.", part="plan")
    return False
