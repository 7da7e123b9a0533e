"""The team for questions of one fact after another: planner, librarians, verifier.

Look-ups that need nothing of each other (two countries that are compared, each neighbour of one)
are made at the same time.
"""

from __future__ import annotations

from functools import partial

from coa.environments.atlas.catalogues import MHQA
from coa.environments.atlas.families import Catalogue
from coa.environments.atlas.team import Find, Librarians, Plan, conclude, plan_for
from coa.environments.atlas.wording import wanted
from coa.recording.episode import USER
from coa.recording.recorder import EpisodeRecorder


class WikiTeam:
    """Answers the questions of `atlas-mhqa`, or of a set like it, with `wiki_search`."""

    def __init__(self, catalogue: Catalogue = MHQA) -> None:
        self.catalogue = catalogue
        self.librarians = Librarians()

    async def work(self, desk: EpisodeRecorder) -> None:
        plan = plan_for(desk.episode.question, self.catalogue)
        if plan is None:
            text = "I do not know how to break this question into look-ups."
            desk.say("planner", USER, text, part="failure")
            desk.fail("the planner could not plan")
            return
        steps = [[find.relation, find.subject] for find in plan.steps]
        desk.say("planner", "searcher", plan.text, plan.thought, part="plan", steps=steps)
        findings: list[list[str]] = []
        first, *rest = plan.lanes
        if rest and rest[0][0].subject.endswith("*"):  # each result of the first is a lane
            found = await self._follow(desk, first)
            names = found[0] if found else []
            findings += found or []
            lanes = [[Find(rest[0][0].relation, name)] for name in names]
        else:
            lanes = [first, *rest]
        works = [partial(self._follow, steps=lane) for lane in lanes]
        for values in await desk.together(works) if works else []:
            findings += values or []
        if desk.episode.error is None:
            self._verify(desk, plan, findings)

    async def _follow(self, desk: EpisodeRecorder, steps: list[Find]) -> list[list[str]] | None:
        """Look-ups one after the other, each about what the one before found."""
        findings: list[list[str]] = []
        for find in steps:
            if find.subject.startswith("#"):
                find = Find(find.relation, findings[-1][0])
            values = await self.librarians.look_up(desk, find)
            if values is None:
                desk.fail("a look-up brought no report")
                desk.episode.meta["failed_look_up"] = wanted(*find)
                return None
            findings.append(values)
        return findings

    def _verify(self, desk: EpisodeRecorder, plan: Plan, findings: list[list[str]]) -> None:
        reports = "\n".join(", ".join(values) for values in findings)
        desk.tell("verifier", f"{desk.episode.question}\n{plan.text}\n{reports}")
        verdict = conclude(plan, findings)
        if verdict is None:
            desk.fail("the reports do not combine to an answer")
            return
        desk.say("verifier", USER, verdict.answer, verdict.thought, part="verdict", score=4)
        desk.episode.answer = verdict.answer
