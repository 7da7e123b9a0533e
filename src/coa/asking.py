"""Questions, answered live on the terminal."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

from coa.engines import Engine, load_engine
from coa.environment import OpenEnvironment, open_environments
from coa.io.progress import say
from coa.io.runs import Appender
from coa.loop import Budget, Decoding
from coa.models.references import pull_missing, resolve_default
from coa.rollouts import AgentSettings, default_environments
from coa.tasks import Task
from coa.trajectory import Trajectory
from coa.view.terminal import LABEL, ChainPrinter, closing_line, console

if TYPE_CHECKING:
    from rich.console import Console


async def ask_once(
    question: str, how: AgentSettings, out_path: Path | None, quiet: bool
) -> Trajectory:
    """Roll out one question, printing the chain unless `quiet`; Ctrl-C keeps what there is."""
    model, task = resolve_default(how.model), Task(question)
    environments = default_environments(
        how.env,
        tools=how.tools,
        settings=how.settings,
        grammar=how.grammar,
        model=model,
        note=say,
    )
    environments = how.spoken_by(environments)
    if out_path is not None:
        Appender(out_path).close()  # what cannot be written is found out before the work
    decoding = how.decoding(model)
    pull_missing(model, say)
    async with open_environments(environments, [task], how.tools) as opened:
        engine = load_engine(
            model, dialect=how.spoken, slots=1, weights=how.weights, threads=how.threads
        )
        out = console(quiet=quiet)
        out.print(f"{'model':>{LABEL}}  {engine.name}", style="dim")
        try:
            return await answer(task, engine, opened, decoding, Budget(), out, out_path)
        finally:
            await engine.close()


async def answer(
    task: Task,
    engine: Engine,
    opened: OpenEnvironment,
    decoding: Decoding,
    budget: Budget,
    out: Console,
    out_path: Path | None = None,
) -> Trajectory:
    """Answer one task: the chain is printed on `out` as it is written, and kept in a file."""
    printer: ChainPrinter
    async with opened.rollout(
        task,
        engine,
        budget=budget,
        decoding=decoding,
        on_text=lambda text: printer.model_text(text),
    ) as rollout:
        printer = ChainPrinter(out, rollout.grammar)
        try:
            async with aclosing(rollout.steps()) as steps:
                async for step in steps:
                    printer.end_turn(step.observation)
        finally:
            printer.end_turn(None)
            out.print(closing_line(rollout.trajectory))
            if out_path is not None:
                opened.grammars.save(out_path.parent)
                with Appender(out_path) as file:
                    file.write(rollout.trajectory.to_json())
        return rollout.trajectory
