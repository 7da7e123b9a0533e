"""`coa study react`: is a chain of agents better than reasoning and acting, at equal cost?

The same episodes are written down twice: with planner, searcher and critic as agents of their own
(`mhqa`), and as thoughts between calls (`react`). What is equal: the team whose work it is and its
words, the trained tokens, the base, the learning rate, and the budget of a rollout. ReAct's chains
are shorter, so more of them are trained on, and there are more updates.

A rollout is greedy, so what a smaller budget would have cut is known without running it again: the
accuracy under a budget of B tokens counts the tasks that were solved within B.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from coa.errors import ConfigError
from coa.io.runs import Json
from coa.lab.study_arms import (
    SPARE,
    Note,
    Scores,
    StudyPiece,
    Tables,
    TrainingStudy,
    counted,
    first,
    held_out,
    lines,
    make_chains,
    measured,
    pieces,
    put_usual,
    solved,
    to_record,
    train,
    trained_on,
    with_tokens,
)
from coa.lab.study_arms import TITLES as USUAL

QUESTION = "is a chain of agents better than ReAct with equal training tokens and equal budget?"
ARMS = {"chain of agents": "mhqa", "ReAct": "react"}
OURS, AGAINST = "chain of agents", "ReAct"
COUNTS = ("tokens", "tool calls")


@dataclass(frozen=True)
class ReactStudy(TrainingStudy):
    budgets: tuple[int, ...] = (256, 320, 384, 512, 768)
    """Tokens of a rollout under which accuracy is told, besides eval.context."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(budget < 1 for budget in self.budgets):
            raise ConfigError(f"budgets: found {list(self.budgets)}, expected numbers above 0.")


def plan(settings: ReactStudy) -> list[StudyPiece]:
    return pieces(settings, len(ARMS), _recorded(settings))


def _recorded(settings: ReactStudy) -> int:
    """More tasks than elsewhere, since more of the shorter chains are needed."""
    return to_record(round(settings.chains.rows * SPARE))


def run(settings: ReactStudy, root: Path, note: Note) -> Json:
    part, rows = settings.eval, settings.chains.rows
    files = held_out(root, part, settings.chains.families)
    tables, equal = Tables(), dict[str, list[Json]]()
    for seed in settings.seeds:
        made = make_chains(
            root / f"chains-{seed}",
            settings.chains,
            seed,
            files.values(),
            list(ARMS.values()),
            n=_recorded(settings),
        )
        ours = first(made.by_grammar[ARMS[OURS]], rows)
        tokens = trained_on(ours, settings.sft)["trained_tokens"]
        theirs = with_tokens(made.by_grammar[ARMS[AGAINST]], tokens, settings.sft, "trained_tokens")
        for arm, chains in {OURS: ours, AGAINST: theirs}.items():
            note(f"== seed {seed}: {arm}")
            folder = root / f"seed-{seed}" / ARMS[arm]
            model = train(chains, settings.sft, seed, folder / "sft", note)
            outs = measured(model, files, folder, part, ARMS[arm])
            equal.setdefault(arm, []).append(trained_on(chains, settings.sft))
            put_usual(tables, arm, seed, outs)
            out = outs["held out"]
            for budget in settings.budgets:
                tables.put(f"within {budget} tokens", arm, seed, within(out, budget))
            tables.put("tokens", arm, seed, counted(out, lambda t: len(t.ids)))
            tables.put("tool calls", arm, seed, counted(out, lambda t: t.usage.tool_calls))
    return {"equal": equal, "measures": tables.compared(AGAINST, counts=COUNTS)}


def within(folder: Path, budget: int) -> Scores:
    """Whether each task was solved with at most so many tokens, the prompt included."""
    length = counted(folder, lambda trajectory: len(trajectory.ids))
    return {task: score * (length[task] <= budget) for task, score in solved(folder).items()}


TITLES = USUAL | {
    "tokens": "tokens of a rollout, prompt and observations included",
    "tool calls": "tool calls of a rollout",
}


def show(result: Json) -> Iterable[str]:
    for arm, each in result["equal"].items():
        told = "; ".join(
            f"{one['rows']} chains, {one['trained_tokens']} tokens, {one['updates']} updates"
            for one in each
        )
        yield f"{arm}, trained on, by seed: {told}"
    for name, found in result["measures"].items():
        yield ""
        title = TITLES.get(name, f"solved {name}, held-out entities")
        yield from lines(title, found)
