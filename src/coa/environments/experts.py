"""The rule-based multi-agent teacher: teams of experts with their own contexts and messages.

The experts enact the agents of `agents.py`. Each works only from what was said to it: the planner
from the question, the searcher from a step, the reader from passages and pages, the reflector from
passages and a report, the verifier from reports. No expert ever sees a gold answer.

Experts err at a set rate: a searcher writes a careless query, a reader opens the wrong page or
reports another fact, a coder mistypes a number, a verifier combines reports wrongly. Their critics
are not told; they judge by their own reading, which misses some mistakes and now and then objects
to sound work. Mistakes, alarms, misses and false alarms are counted in `episode.meta`, so the
teacher's quality can be reported.

Which team works on a task is decided by the set that the task belongs to.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar, Protocol

from coa.environments import ATLAS_CODE, ATLAS_WEB, BFCL, GYM, TOOLBOX
from coa.environments.atlas.catalogues import CATALOGUES, MHQA
from coa.environments.atlas.team import WikiTeam
from coa.recording.agents import agents_of
from coa.recording.episode import USER, AgentSpec, Episode
from coa.recording.recorder import EpisodeRecorder, Rates
from coa.tasks import Task
from coa.tools.base import Toolbox


class Team(Protocol):
    """Experts who work on the question of `recorder.episode` until it has an answer or an error."""

    async def work(self, recorder: EpisodeRecorder) -> None: ...


@dataclass(frozen=True)
class Experts:
    """The teacher `experts`; see the module's docstring. Its settings are how often experts err,
    critics miss it, and critics object to sound work."""

    error_rate: float = 0.1
    miss_rate: float = 0.2
    false_alarm_rate: float = 0.01
    name: ClassVar[str] = "experts"

    def __post_init__(self) -> None:
        self.rates()  # says what is wrong with them

    def rates(self) -> Rates:
        return Rates(self.error_rate, self.miss_rate, self.false_alarm_rate)

    async def record(self, task: Task, toolbox: Toolbox, seed: int = 0) -> Episode:
        """Work on one public task; what the team could not do is in `episode.error`."""
        agents, working = _team_for(task)
        episode = Episode(task.id, task.question, self.name, agents, seed=seed)
        episode.meta.update(task.meta)
        rng = random.Random(f"{seed}|{task.id}")
        recorder = EpisodeRecorder(episode, toolbox, rng, self.rates())
        recorder.say(USER, "planner", task.question)
        await working.work(recorder)
        return episode


def _team_for(task: Task) -> tuple[list[AgentSpec], Team]:
    """Those who know how to work on the tasks of a set; questions of one's own go to the first."""
    name = task.meta.get("set")
    if name == ATLAS_WEB:
        from coa.environments.atlas.web_team import WebTeam

        return agents_of("web"), WebTeam()
    if name == ATLAS_CODE:
        from coa.environments.atlas.code_team import CodeTeam

        return agents_of("calculation"), CodeTeam()
    if name == GYM:
        from coa.environments.gym.team import CodingTeam

        return agents_of("coding"), CodingTeam()
    if name in (TOOLBOX, BFCL):
        from coa.environments.toolbox.team import ToolTeam

        return agents_of("general"), ToolTeam()
    return agents_of("wiki"), WikiTeam(CATALOGUES.get(str(name), MHQA))
