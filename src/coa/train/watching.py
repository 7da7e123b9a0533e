"""Who looks on while a run trains: the terminal, a tracker, and the alarms that end it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from coa.errors import TrainingError
from coa.progress import Mode
from coa.runs import Json
from coa.train.alarms import Alarm, Alarms
from coa.train.groups import Group
from coa.train.live_view import LiveView
from coa.train.rl_settings import RlRecipe
from coa.train.trackers import Tracker, open_tracker


class Watching:
    """Passes what happens on to the view, the tracker and the alarms."""

    def __init__(self, view: LiveView, alarms: Alarms, log: str, root: Path) -> None:
        self._view, self._alarms, self._log, self._root = view, alarms, log, root
        self._earlier: list[tuple[int, Json]] = []
        self._tracker: Tracker | None = None
        self.solved = ""
        """Why there is nothing left to learn, when that is so: the run ends well."""

    def phase(self, what: str, done: int = 0, total: int = 0) -> None:
        self._view.phase(what, done, total)

    def group(self, group: Group) -> None:
        """Show one rollout of a group."""
        trajectory, scored = group.trajectories[0], group.scored[0]
        self._view.rollout(group.task.question, trajectory.answer or "", scored.score)

    def recall(self, record: Json) -> None:
        """A line of metrics that an earlier part of the run has written."""
        self._view.recall(record)
        self._look(record)
        self._earlier.append((int(record["update"]), record))

    def evaluated(self, record: Json) -> None:
        self._view.evaluated(record)
        self._track(record)

    def update(self, record: Json, timing: Json) -> None:
        """Raises a TrainingError when the run has collapsed."""
        self._view.update(record, timing)
        self._track({**record, **timing})
        if alarm := self._look(record):
            good = self._root / "checkpoints" / f"update-{alarm.last_good:07d}" / "adapter"
            where = f" Go on from {good} in a new directory." if good.is_dir() else ""
            raise TrainingError(f"{alarm.line}{where}")

    def _look(self, record: Json) -> Alarm | None:
        """The sign of a collapse, if there is one; that all is solved is none."""
        alarm = self._alarms.look(record)
        if alarm is None or alarm.sign != "solved":
            return alarm
        self.solved = alarm.line
        return None

    def _track(self, record: Json) -> None:
        if self._tracker is None:  # only now is known what the earlier part of the run has logged
            self._tracker = open_tracker(self._log, self._root, self._root.name, self._earlier)
        self._tracker.log(int(record["update"]), record)

    def close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()

    def precious(self) -> Collection[int]:
        return self._alarms.precious


@contextmanager
def open_watch(recipe: RlRecipe, root: Path, quiet: bool) -> Iterator[Watching]:
    """`quiet` shows nothing and tracks nothing; the alarms are on."""
    mode: Mode = "silent" if quiet else "auto"
    log = "none" if quiet else recipe.rl.log
    with LiveView(recipe.rl.updates, mode=mode) as view:
        alarms = Alarms(recipe.alarms, recipe.rl.checkpoint_every, recipe.rl.compares)
        watch = Watching(view, alarms, log, root)
        try:
            yield watch
        finally:
            watch.close()
