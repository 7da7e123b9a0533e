"""Questions, answered live on the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from coa.attempts import choose_grammar, choose_prompt
from coa.display import LABEL, ChainPrinter, closing_line, console
from coa.engines import Engine, load_engine
from coa.engines.store import pull_missing, resolve_default
from coa.protocol import Grammar
from coa.runs import Appender
from coa.runtime import Budget, Decoding, open_trajectory, rollout
from coa.tasks.task import Task
from coa.tools.base import Toolbox
from coa.tools.kits import KitSettings, check_corpus, open_kit
from coa.trajectory import Trajectory

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Asking:
    """How a question is answered."""

    model: str = "auto"
    grammar: str = "auto"
    corpus: str = "atlas"
    """atlas, atlas:K for the counterfactual world K, a corpus directory, or a .toml for the web."""
    prompt: str = "auto"
    temperature: float = 0.0
    constrain: bool = False
    seed: int = 0
    unsafe_code: bool = False


async def ask_once(question: str, how: Asking, out_path: Path | None, quiet: bool) -> Trajectory:
    """Roll out one question, printing the chain unless `quiet`; Ctrl-C keeps what there is."""
    check_corpus(how.corpus)  # what is not there is found out before the work
    model, task = resolve_default(how.model), Task(question)
    if out_path is not None:
        Appender(out_path).close()  # as is what cannot be written
    pull_missing(model, lambda line: print(line, file=sys.stderr))
    grammar = choose_grammar(how.grammar, model)
    decoding = Decoding(
        temperature=how.temperature,
        seed=how.seed,
        prompt=choose_prompt(how.prompt, model),
        constrain=how.constrain,
    )
    kit = KitSettings(corpus=how.corpus, unsafe_code=how.unsafe_code)
    async with open_kit([task], kit, grammar) as toolbox_of:
        engine = load_engine(model, slots=1)
        out = None if quiet else console()
        if out is not None:
            out.print(f"{'model':>{LABEL}}  {engine.name}", style="dim")
        try:
            return await answer(
                task, engine, grammar, toolbox_of(task), decoding, Budget(), out, out_path
            )
        finally:
            await engine.close()


async def answer(
    task: Task,
    engine: Engine,
    grammar: Grammar,
    toolbox: Toolbox,
    decoding: Decoding,
    budget: Budget,
    out: Console | None,
    out_path: Path | None = None,
) -> Trajectory:
    """Answer one task: the chain is printed on `out` as it is written, and kept in a file."""
    grammar = toolbox.bind(grammar)
    trajectory = open_trajectory(task, grammar, engine, decoding)
    printer = None if out is None else ChainPrinter(out, grammar)
    steps = rollout(
        task,
        engine,
        grammar,
        toolbox,
        budget=budget,
        decoding=decoding,
        into=trajectory,
        on_text=printer.model_text if printer else None,
    )
    try:
        async for step in steps:
            if printer:
                printer.end_turn(step.observation)
    finally:
        if printer:
            printer.end_turn(None)
            printer.out.print(closing_line(trajectory))
        if out_path is not None:
            with Appender(out_path) as file:
                file.write(trajectory.to_json())
    return trajectory
