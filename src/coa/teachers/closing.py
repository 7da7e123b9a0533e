"""How a team ends its work: an answer is suggested, checked, and given or taken back.

The verifier combines the reports, which may go wrong; then it checks the suggestion by combining
them once more, which may be done without attention, or with too much of it. A score of 2 or less
sends the team back to the planner.
"""

from __future__ import annotations

from coa.tasks.atlas_inquiries import Conclusion
from coa.teachers.desk import Desk
from coa.teachers.episode import USER, Say

RIGHT, DOUBTFUL = 4, 2


def close(desk: Desk, right: Conclusion, slip: Conclusion | None = None) -> None:
    """Suggest and check until an answer stands; `slip` is what a wrong combination would give."""
    for careful in (False, True):
        erring = slip is not None and not careful and desk.happens(desk.rates.error / 2)
        suggested = slip if erring and slip is not None else right
        facts = {"part": "suggestion"}
        desk.add(
            Say("verifier", "verifier", suggested.answer, suggested.because, facts, erred=erring)
        )
        attentive = not desk.happens(desk.rates.miss)
        noticed = attentive and suggested != right
        doubted = not careful and not noticed and desk.happens(desk.rates.false_alarm)
        desk.count("wrong_combinations", erring)
        desk.count("missed_mistakes", erring and not (noticed or doubted))
        desk.count("false_alarms", doubted and not erring)
        if not noticed and not doubted:
            passed = f"The reports give {suggested.answer}. Score: {RIGHT}"
            desk.say("verifier", "verifier", passed, "I combine them again.", **_check(RIGHT))
            done = {"part": "verdict", "score": RIGHT}
            desk.add(Say("verifier", USER, suggested.answer, "The check passed.", done))
            desk.episode.answer = suggested.answer
            return
        desk.count("alarms")
        reason = "The reports give another answer." if noticed else "I am not sure of it."
        objection = f"{reason} Score: {DOUBTFUL}"
        desk.say("verifier", "planner", objection, "I combine them again.", **_check(DOUBTFUL))
        again = "Combine the reports once more, one by one."
        desk.say("planner", "verifier", again, "The check failed.", part="plan")
    raise AssertionError("the second check of a careful suggestion always passes")


def _check(score: int) -> dict[str, object]:
    return {"part": "check", "score": score}
