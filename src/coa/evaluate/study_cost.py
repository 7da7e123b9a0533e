"""`coa study cost`: what a solved task costs a team of agents, and the chain made from its work.

Goes in: tasks with gold, the team's episodes and the chains that distillation made of them. Comes
out: tokens, money and tool calls of both, with and without a prompt cache, with paired bootstrap
intervals over tasks, and how the saving depends on the length of the agents' prompts.

The chain is the converted episode: this study assumes a student that does what the chain says. It
measures what linearising the team's work saves, not how good a student is.

- `per_solved` is the cost of all tasks, failed ones too, over the number of solved ones. Where a
  task has no chain (the team gave no answer, or its episode does not convert or not replay) the
  chain is charged what the team spent: no saving is claimed for work that was not converted.
- `paired` is the mean cost of the tasks that both solve.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path

from coa.engines.base import TextCodec
from coa.engines.codec import Codec
from coa.engines.store import BASE, model_folder, resolve
from coa.errors import UsageError
from coa.estimates import wilson
from coa.evaluate.cost_cases import MEASURES, Case, Files, read_cases
from coa.evaluate.cost_counts import (
    CACHINGS,
    EXAMPLE_PRICE,
    PROMPTS,
    Caching,
    Counter,
    LengthOf,
)
from coa.evaluate.resampling import RESAMPLES, Resamples
from coa.protocol.prompt import PromptKind
from coa.runs import Json, write_atomic
from coa.tasks import SETS, make_tasks
from coa.tasks.sets import GYM
from coa.teachers.episode import AgentSpec
from coa.teachers.llm_budget import Price

Note = Callable[[str], None]
CLAIM = 0.846
"""Fewer tokens than the team, says the paper of its own model: 24,047 against 156,400 for a
successful task, over ten tasks."""
COMPARED = ("atlas-mhqa", "atlas-web", "atlas-code", GYM)
"""The sets that there are to measure with; the others are more of the first, to train on."""
FACTORS = (0.0, 0.5, 1.0, 2.0, 4.0)
"""By how much the agents' system prompts are stretched."""
FEWEST = 20
"""Tasks of a group that is reported by itself."""
STRETCHED: tuple[Caching, ...] = ("none", "task")
"""Where their length matters: in a warm cache they are free, whatever they are."""
PEER, PEER_PROMPTS = "smolagents", "peer_prompts.json"
PEER_CALLS = {
    "planner": "leader_plan",
    "searcher": "searcher_act",
    "reader": "searcher_act",
    "coder": "leader_act",
    "reflector": "leader_act",
    "critic": "leader_act",
    "verifier": "leader_act",
}
"""Which call of smolagents does the work of a part: it has two agents, one leads and judges."""


def study_cost(
    out: Path,
    *,
    n: int = 600,
    sets: Sequence[str] = COMPARED,
    seed: int = 5,
    model: str = BASE,
    price: Price = EXAMPLE_PRICE,
    note: Note = lambda line: None,
    codec: TextCodec | None = None,
    resamples: int = RESAMPLES,
) -> Json:
    """Record and distil `n` fresh tasks of every set below `out`, and compare; it continues."""
    if unknown := [name for name in sets if name not in SETS]:
        raise UsageError(f"{unknown[0]!r} is not a task set; expected {', '.join(SETS)}.")
    made = {}
    for name in sets:
        note(f"== {name}")
        made[name] = make_files(out / name, name, n, seed)
    result = study_files(
        made, model=model, price=price, note=note, codec=codec, resamples=resamples
    )
    write_atomic(out / "cost.json", json.dumps(result, indent=2) + "\n")
    return result


def make_files(folder: Path, name: str, n: int, seed: int) -> Files:
    """Tasks, the experts' episodes at their usual rate of mistakes, and their chains."""
    from coa.distill.stage import run_distillation
    from coa.teachers.stage import Recording, run_recording

    files = Files(folder / "tasks.jsonl", folder / "episodes.jsonl", folder / "distilled")
    make_tasks(name, "train", n, seed).save(files.tasks)
    run_recording(Recording(tasks=files.tasks), files.episodes)
    run_distillation(episodes=files.episodes, out=files.distilled, tasks=files.tasks)
    return files


def study_files(
    files: Mapping[str, Files],
    *,
    model: str = BASE,
    price: Price = EXAMPLE_PRICE,
    note: Note = lambda line: None,
    codec: TextCodec | None = None,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Json:
    """Compare what is in files, by name of the comparison."""
    counter = Counter(codec or Codec.from_folder(model_folder(resolve(model))))
    found: dict[str, Json] = {}
    for name, each in files.items():
        cases, missing = read_cases(each, counter)
        compared = compare(cases, counter, price, seed=seed, resamples=resamples)
        found[name] = {"without_chain": missing, **compared}
        note(f"   {name}: {len(cases)} tasks compared")
    return {
        "claim": CLAIM,
        "tokenizer": model if codec is None else type(codec).__name__,
        "seed": seed,
        "resamples": resamples,
        "price": asdict(price),
        "example_price": price == EXAMPLE_PRICE,
        "peer": peer_prompts(),
        "sets": found,
    }


def peer_prompts() -> Json:
    """The lengths of smolagents' prompts, as benchmarks/smolagents_prompts.py measured them."""
    text = resources.files("coa.evaluate").joinpath(PEER_PROMPTS).read_text(encoding="utf-8")
    found: Json = json.loads(text)
    return found


# -- one comparison --------------------------------------------------------------------------


def compare(
    cases: Sequence[Case],
    counter: Counter,
    price: Price = EXAMPLE_PRICE,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Json:
    """Both sides of all cases, with intervals."""
    both = [case for case in cases if case.paired]
    if not both:
        raise UsageError("no task was solved by the team and has a chain: nothing to compare.")
    variants = _variants(both, counter)
    stretched = {
        f"{name} {caching}": [_recount(case, counter, length_of, caching) for case in both]
        for name, length_of in variants.items()
        for caching in STRETCHED
    }
    everything = Resamples(_columns(cases, price), seed, resamples)
    pairs = Resamples(_columns(both, price) | stretched, seed, resamples)
    n, solved = len(cases), sum(case.team.solved for case in cases)
    converted = sum(case.team.solved and bool(case.chains) for case in cases)
    return {
        "n": n,
        "solved": {"team": solved, "chain": sum(case.chain("compact").solved for case in cases)},
        "team_accuracy": wilson(solved, n).figures(),
        "solved_and_converted": wilson(converted, solved).figures(),
        "paired_tasks": len(both),
        "tool_calls_changed": sum(c.team.tool_calls != c.chain("full").tool_calls for c in both),
        "per_solved": {kind: _versus(everything, kind) for kind in PROMPTS},
        "paired": {kind: _versus(pairs, kind) for kind in PROMPTS},
        "by_tool_calls": list(_by_tool_calls(both, price, seed, resamples)),
        "makeup": _makeup(both),
        "prompts": _prompts(both, variants),
        "sensitivity": [_sensitive(pairs, both, name, variants[name]) for name in variants],
        "prompt_tokens_for_claim": _needed(both, counter),
    }


def _columns(
    cases: Sequence[Case], price: Price, kinds: Sequence[PromptKind] = PROMPTS
) -> dict[str, list[float]]:
    """Every measure of both sides, a number for each case."""
    columns: dict[str, list[float]] = {}
    for case in cases:
        sides = [("team", case.team), *((kind, case.chain(kind)) for kind in kinds)]
        for name, side in sides:
            for measure, value in side.measures(price).items():
                columns.setdefault(f"{name} {measure}", []).append(value)
    return columns


def _versus(table: Resamples, kind: PromptKind) -> Json:
    """Each measure for a solved task, of the team and of the chain with this prompt."""
    found: Json = {}
    for measure in MEASURES:
        team, chain = (f"team {measure}", "team solved"), (f"{kind} {measure}", f"{kind} solved")
        found[measure] = {
            "team": table.ratio(*team).figures(),
            "chain": table.ratio(*chain).figures(),
            "reduction": table.reduction(team, chain).figures(),
        }
    return found


def _by_tool_calls(
    cases: Sequence[Case], price: Price, seed: int, resamples: int
) -> Iterator[Json]:
    """The saving by the length of the work: a chain reads all of it again, an agent its part."""
    groups: dict[int, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.team.tool_calls, []).append(case)
    for calls, group in sorted(groups.items()):
        if len(group) < FEWEST:
            continue
        table = Resamples(_columns(group, price, ("compact",)), seed, resamples)
        saved = {
            caching: table.reduction(
                (f"team tokens.{caching}", "team solved"),
                (f"compact tokens.{caching}", "compact solved"),
            ).figures()
            for caching in CACHINGS
        }
        yield {"tool_calls": calls, "n": len(group), "reduction": saved}


# -- how the prompts matter ------------------------------------------------------------------


def _variants(cases: Sequence[Case], counter: Counter) -> dict[str, LengthOf]:
    """Lengths of system prompts to recount with: ours stretched, and those of smolagents."""
    made: dict[str, LengthOf] = {f"{factor:g}x": _stretched(counter, factor) for factor in FACTORS}
    calls = peer_prompts()["tokens"]
    theirs = {part: sum(calls[call].values()) for part, call in PEER_CALLS.items()}
    if all(agent.part in theirs for case in cases for agent in case.episode.agents):
        made[PEER] = lambda agent: theirs[agent.part]
    return made


def _stretched(counter: Counter, factor: float) -> LengthOf:
    return lambda agent: round(factor * counter.prompt_of(agent))


def _recount(case: Case, counter: Counter, length_of: LengthOf, caching: Caching) -> float:
    tokens = counter.team(case.episode, length_of)
    return tokens.total if caching == "none" else tokens.total_cached


def _sensitive(table: Resamples, cases: Sequence[Case], name: str, length_of: LengthOf) -> Json:
    """The saving if the agents' system prompts had these lengths."""
    calls = [length_of(agent) for case in cases for agent in case.callers]
    saved = {
        kind: {
            caching: table.reduction(
                (f"{name} {caching}", "team solved"),
                (f"{kind} tokens.{caching}", f"{kind} solved"),
            ).figures()
            for caching in STRETCHED
        }
        for kind in PROMPTS
    }
    return {"prompts": name, "tokens_a_call": round(sum(calls) / len(calls), 1), "reduction": saved}


def _needed(cases: Sequence[Case], counter: Counter) -> Json:
    """How long every agent's system prompt would have to be for the claimed saving.

    The team's tokens grow with that length by one for each call, or with a cache for each agent.
    """
    bare = [counter.bare(case.episode) for case in cases]
    calls = [[agent.name for agent in case.callers] for case in cases]
    grows: dict[Caching, tuple[int, int]] = {
        "none": (sum(each.total for each in bare), sum(map(len, calls))),
        "task": (sum(each.total_cached for each in bare), sum(len(set(each)) for each in calls)),
    }
    found: Json = {}
    for kind in PROMPTS:
        found[kind] = {}
        for caching in STRETCHED:
            spent = sum(case.chain(kind).cached(caching).total_cached for case in cases)
            base, slope = grows[caching]
            found[kind][caching] = round((spent / (1 - CLAIM) - base) / slope)
    return found


def _makeup(cases: Sequence[Case]) -> Json:
    """What the tokens of a task are when nothing is cached, and how many calls they are in."""
    sides = {"team": [case.team for case in cases]}
    sides |= {kind: [case.chain(kind) for case in cases] for kind in PROMPTS}
    return {
        name: {
            "system": _mean(side.system for side in found),
            "context": _mean(side.tokens.prompt - side.system for side in found),
            "written": _mean(side.tokens.sampled for side in found),
            "model_calls": _mean(side.model_calls for side in found),
        }
        for name, found in sides.items()
    }


def _prompts(cases: Sequence[Case], variants: Mapping[str, LengthOf]) -> Json:
    """Tokens of the prompts of both sides, beside those of smolagents for the same part."""
    parts: dict[str, list[AgentSpec]] = {}
    for case in cases:
        for agent in case.callers:
            parts.setdefault(agent.part, []).append(agent)
    return {
        "team": {
            part: {
                "tokens": _mean(map(variants["1x"], agents)),
                PEER: _mean(map(variants[PEER], agents)) if PEER in variants else None,
                "calls": round(len(agents) / len(cases), 2),
            }
            for part, agents in parts.items()
        },
        "chain": {kind: _mean(case.chain(kind).opening for case in cases) for kind in PROMPTS},
    }


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return round(sum(listed) / len(listed), 2)
