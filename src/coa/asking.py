"""One question, answered live on the terminal."""

from __future__ import annotations

from pathlib import Path

from coa.display import LABEL, ChainPrinter, closing_line, console
from coa.engines import load_engine
from coa.engines.store import resolve_default
from coa.errors import UsageError
from coa.evaluate.stage import choose_grammar, choose_prompt
from coa.runs import Appender
from coa.runtime import Budget, Decoding, open_trajectory, rollout
from coa.tasks.task import Task
from coa.tools.base import Toolbox
from coa.tools.search import atlas_toolbox
from coa.trajectory import Trajectory


def corpus_toolbox(corpus: str) -> Toolbox:
    """The tools over a corpus: `atlas`, or `atlas:K` for the counterfactual world K."""
    name, _, world = corpus.partition(":")
    if name != "atlas" or (world and not world.isdigit()):
        raise UsageError(f"corpus {corpus!r}: expected atlas, or atlas:K for world K.")
    return atlas_toolbox(int(world or 0))


async def ask_once(
    question: str,
    *,
    model: str,
    grammar_name: str,
    corpus: str,
    prompt: str,
    temperature: float,
    constrain: bool = False,
    seed: int,
    out_path: Path | None,
    quiet: bool,
) -> Trajectory:
    """Roll out one question, printing the chain unless `quiet`; Ctrl-C keeps what there is."""
    toolbox = corpus_toolbox(corpus)
    model, task = resolve_default(model), Task(question)
    if out_path is not None:
        Appender(out_path).close()  # what cannot be written is found out before the work
    grammar = toolbox.bind(choose_grammar(grammar_name, model))
    decoding = Decoding(
        temperature=temperature,
        seed=seed,
        prompt=choose_prompt(prompt, model),
        constrain=constrain,
    )
    engine = load_engine(model, slots=1)
    trajectory = open_trajectory(task, grammar, engine, decoding)
    out = console()
    printer = None if quiet else ChainPrinter(out, grammar)
    if not quiet:
        out.print(f"{'model':>{LABEL}}  {model}", style="dim")
    steps = rollout(
        task,
        engine,
        grammar,
        toolbox,
        budget=Budget(turn_tokens=256),
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
            out.print(closing_line(trajectory))
        if out_path is not None:
            with Appender(out_path) as file:
                file.write(trajectory.to_json())
        await engine.close()
    return trajectory
