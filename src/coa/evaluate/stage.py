"""The evaluation stage: settings in, a run directory out."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

from coa.config import to_json
from coa.engines import load_engine, rollouts_at_once, slots_for
from coa.engines.base import Engine
from coa.engines.store import identity, resolve_default, trained_on
from coa.errors import ConfigError, ModelError, UsageError
from coa.evaluate.run import attempt_all, save_summary, summarise
from coa.progress import Mode, counted
from coa.protocol import Grammar, PromptKind, load_grammar
from coa.rewards import SCORERS, load_scorer
from coa.runs import Json, Run
from coa.runtime import Budget, Decoding
from coa.tasks.task import TaskSet
from coa.tools.search import PASSAGES, toolbox_for
from coa.trajectory import Trajectory


@dataclass(frozen=True)
class EvalSettings:
    """What an evaluation depends on; the run directory refuses to mix two of them."""

    model: str = "auto"
    tasks: str = ""
    grammar: str = "auto"
    """auto: what the model's adapter was trained on, else mhqa."""
    k: int = 1
    observations: str = "real"
    """real; withheld and wrong are the controls."""
    prompt: str = "auto"
    """full, compact, or auto: compact for a model with an adapter, full for one without."""
    temperature: float = 0.0
    constrain: bool = False
    """Sample only what the grammar allows."""
    reward: str = "exact"
    passages: int = PASSAGES
    turns: int = 12
    turn_tokens: int = 256
    malformed: int = 2
    context: int = 2048
    concurrency: int = 96
    memory_gb: float | None = None
    """Most for keys and values of a model in this process; None: a quarter of the machine's."""
    deterministic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("k", "passages", "turns", "turn_tokens", "context", "concurrency"):
            if (found := getattr(self, name)) < 1:
                raise ConfigError(f"{name} is {found!r}, expected at least 1.")
        Decoding(temperature=self.temperature)  # refuses what cannot be sampled at
        if self.k > 1 and self.temperature == 0:
            raise ConfigError(
                f"k is {self.k} at temperature 0: all rollouts of a task would be the same. "
                "Set a temperature, 1.0 for instance."
            )

    def budget(self) -> Budget:
        """What one rollout may spend; the clock is left out, since it is the machine's."""
        return Budget(
            turns=self.turns,
            turn_tokens=self.turn_tokens,
            context=self.context,
            malformed=self.malformed,
            seconds=24 * 3600.0,
        )


def choose_grammar(grammar: str, model: str) -> Grammar:
    """The grammar that was asked for; `auto` is the one that the model's adapter was trained on."""
    return load_grammar(_fitting("grammar", grammar, model, "mhqa"))


def choose_prompt(prompt: str, model: str) -> PromptKind:
    """The prompt that was asked for; `auto` is the one that the model's adapter was trained on, and
    the full one for a model without an adapter, which was never trained on the protocol."""
    scripted = "compact" if model.startswith("scripted:") else "full"
    prompt = _fitting("prompt", prompt, model, scripted)
    if prompt not in ("full", "compact"):
        raise ConfigError(f"prompt {prompt!r}: expected full, compact or auto.")
    return "full" if prompt == "full" else "compact"


def _fitting(what: str, asked: str, model: str, otherwise: str) -> str:
    """What was asked for, or for `auto` what the adapter remembers of its training."""
    known = (trained_on(model) if "+" in model else {}).get(what)
    if asked != "auto":
        if known and asked not in ([known] if isinstance(known, str) else known):
            note = f"{model} was trained on {what} {known}, not {asked}: expect malformed turns"
            print(note, file=sys.stderr)
        return asked
    remembered = known or otherwise
    if not isinstance(remembered, str):
        choices = ", ".join(remembered)
        raise ConfigError(f"{model} was trained on several: {choices}. Choose one with --{what}.")
    return remembered


def run_eval(
    settings: EvalSettings, directory: Path, *, engine: Engine | None = None, quiet: bool = False
) -> Json:
    """Evaluate, or continue an evaluation; returns the summary that `summary.json` holds.

    An `engine` that is given is used and left open; otherwise the model is loaded and closed.
    """
    tasks = TaskSet.load(Path(settings.tasks))
    toolbox_of = toolbox_for(settings.observations, settings.passages)
    model = resolve_default(settings.model)
    grammar, scorer = choose_grammar(settings.grammar, model), load_scorer(settings.reward)
    prompt = choose_prompt(settings.prompt, model)
    _check_gold(tasks, settings)
    recipe = to_json(settings) | {"model": model, "grammar": grammar.name, "prompt": prompt}
    # The fingerprint stands for the tasks; the rest is speed.
    for name in ("tasks", "concurrency", "memory_gb"):
        del recipe[name]
    if not settings.constrain:  # as in the records of runs from before there was a choice
        del recipe["constrain"]
    inputs = {"tasks": tasks.fingerprint(), "grammar": grammar.fingerprint()}
    inputs |= _weights(model, engine)
    with Run.open(directory, "eval", recipe, inputs, settings.seed) as run:
        used = engine or load_engine(
            model,
            deterministic=settings.deterministic,
            slots=slots_for(settings.concurrency),
            context=settings.context,
            memory_gb=settings.memory_gb,
        )

        async def attempt() -> list[Trajectory]:
            mode: Mode = "silent" if quiet else "auto"
            try:
                with counted("evaluate", len(tasks) * settings.k, mode) as on_done:
                    return await attempt_all(
                        tasks,
                        used,
                        grammar,
                        toolbox_of,
                        directory,
                        k=settings.k,
                        budget=settings.budget(),
                        decoding=Decoding(
                            temperature=settings.temperature,
                            seed=settings.seed,
                            prompt=prompt,
                            constrain=settings.constrain,
                        ),
                        concurrency=rollouts_at_once(used, settings.concurrency),
                        on_done=on_done,
                    )
            finally:
                if engine is None:
                    await used.close()

        summary, records = summarise(tasks, asyncio.run(attempt()), scorer)
        summary = {
            "model": model,
            "tasks": settings.tasks,
            "reward": settings.reward,
            **summary,
        }
        save_summary(directory, summary, records)
        run.timing({"event": "finished"})
        return summary


def _check_gold(tasks: TaskSet, settings: EvalSettings) -> None:
    """Say that a task cannot be judged before hours of rollouts, not after."""
    blank = next((task for task in tasks if not task.answers), None)
    if blank is not None and settings.reward in SCORERS:
        raise UsageError(
            f"{settings.tasks}: task {blank.id} has no gold answer, so {settings.reward!r} cannot "
            "judge it. Evaluation needs gold answers for every task."
        )


def _weights(model: str, engine: Engine | None) -> dict[str, str]:
    """What identifies the weights: hashes, or the word of a caller's own engine."""
    try:
        return identity(model)
    except ModelError:
        if engine is None:
            raise
        return {"weights": engine.weights}
