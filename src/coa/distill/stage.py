"""The distillation stage: an episodes file in, a directory of trajectories out."""

from __future__ import annotations

import asyncio
from pathlib import Path

from coa.distill.pipeline import Distilled, distill, save_distilled
from coa.errors import UsageError
from coa.progress import counted
from coa.protocol import load_grammar
from coa.protocol.prompt import PromptKind
from coa.tasks.sets import grammar_for
from coa.tasks.task import Task, TaskSet
from coa.teachers.episode import load_episodes
from coa.tools.kits import KitSettings, open_kit


def run_distillation(
    episodes: Path,
    out: Path,
    tasks: Path | None = None,
    *,
    grammar: str = "auto",
    prompt: PromptKind = "compact",
    kit: KitSettings | None = None,
) -> Distilled:
    """Distil a file of episodes. Without the tasks' gold, answers are not judged."""
    loaded = load_episodes(episodes)
    public = [Task(each.question, id=each.task_id, meta=each.meta) for each in loaded]
    gold = {task.id: task for task in TaskSet.load(tasks)} if tasks else None
    chosen = load_grammar(grammar_for(public) if grammar == "auto" else grammar)

    async def work() -> Distilled:
        async with open_kit(public, kit, chosen) as toolbox_of:
            with counted("distil", len(loaded)) as on_done:
                return await distill(
                    loaded, chosen, toolbox_of, gold, prompt=prompt, on_done=on_done
                )

    distilled = asyncio.run(work())
    save_distilled(out, distilled)
    if not distilled.kept:
        reasons = ", ".join(distilled.funnel["rejected"])
        raise UsageError(f"no episode was kept: {reasons}. See {out}/rejected.jsonl.")
    return distilled
