"""The recording stage: a task file in, an episodes file out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coa.progress import counted
from coa.runs import claim
from coa.tasks.task import TaskSet
from coa.teachers import load_teacher, record_all
from coa.teachers.episode import Episode
from coa.tools.kits import KitSettings, open_kit


def run_recording(
    tasks: Path,
    out: Path,
    teacher: str = "experts",
    options: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    kit: KitSettings | None = None,
) -> list[Episode]:
    """Record a teacher at work on all tasks, or continue; `options` are the teacher's."""
    loaded, options = TaskSet.load(tasks), dict(options or {})
    agents = load_teacher(teacher, **options)
    public = TaskSet(tuple(task.public() for task in loaded)).fingerprint()
    tools = (kit or KitSettings()).identity()
    claim(out, {"teacher": teacher, **options, "seed": seed, "tasks": public, **tools})

    async def work() -> list[Episode]:
        async with open_kit(loaded, kit) as toolbox_of:
            with counted("record", len(loaded)) as on_done:
                return await record_all(loaded, agents, toolbox_of, out, seed=seed, on_done=on_done)

    return asyncio.run(work())
