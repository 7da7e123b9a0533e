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

import collections
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Literal, get_args

from coa.distillation.dataset import CONVERTED
from coa.engines.base import TextCodec
from coa.environments import GYM, SETS, make_tasks
from coa.errors import RecordError, UsageError
from coa.evaluation.compare import PAIRED_RESAMPLES, Resamples
from coa.evaluation.spending import parse_price
from coa.grammar import system_prompt
from coa.grammar.load import bound_to, load_grammar
from coa.grammar.prompt import PromptKind
from coa.io.runs import Json, read_records, write_atomic
from coa.lab.study_student import StudentPart
from coa.models.bases import BASE
from coa.models.codec import Codec
from coa.models.references import model_folder, resolve
from coa.recording.budget import Price
from coa.recording.episode import AgentSpec, Episode, Message, Tokens, ToolUse, load_episodes
from coa.rewards import auto
from coa.statistics import interval, wilson
from coa.tasks import Task, TaskSet
from coa.trajectory import Author, Segment, Trajectory

Caching = Literal["none", "task", "warm"]
CACHINGS: tuple[Caching, ...] = get_args(Caching)
PROMPTS: tuple[PromptKind, ...] = ("compact", "full")
LengthOf = Callable[[AgentSpec], int]
"""How many tokens the system prompt of an agent has."""


EXAMPLE_PRICE = Price(input=1.0, cached=0.1, output=5.0)
"""An example and nobody's offer: a cached token at a tenth, a written one at five times."""


def with_caching(tokens: Tokens, caching: Caching, opening: int) -> Tokens:
    """The same calls under another cache; `opening` are the tokens of system prompts, each once."""
    if caching == "none":
        return tokens._replace(cached=0)
    return tokens if caching == "task" else tokens._replace(cached=tokens.cached + opening)


class TokenCounter:
    """Counts texts with one codec; a text that comes again is not encoded again."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._known: dict[str, int] = {}

    def count(self, text: str) -> int:
        found = self._known.get(text)
        if found is None:
            found = self._known[text] = len(self._codec.encode(text))
        return found

    def team(self, episode: Episode, length_of: LengthOf | None = None) -> Tokens:
        """All model calls of an episode; `length_of` gives system prompts another length.

        What a server counted is not used: it has another tokenizer than the chain.
        """
        systems = {agent.system: length_of(agent) for agent in episode.agents} if length_of else {}
        events = [
            replace(event, call=replace(event.call, sampled_tokens=0))
            if isinstance(event, Message) and event.call
            else event
            for event in episode.events
        ]

        def length(text: str) -> int:
            return systems[text] if text in systems else self.count(text)

        return replace(episode, events=events).count_tokens(length)

    def bare(self, episode: Episode) -> Tokens:
        """The same as if the agents had no system prompts."""
        return self.team(episode, lambda agent: 0)

    def chain(self, trajectory: Trajectory, system: str) -> Tokens:
        """All turns of a chain that opens with this system prompt."""
        length = len(self._codec.encode_prompt(system, trajectory.question))
        prompt = cached = sampled = seen = 0
        for step in trajectory.steps:
            written = self._length(step.model)
            prompt += length
            cached += seen
            sampled += written
            seen = length = length + written
            if step.observation is not None:
                length += self._length(step.observation)
        return Tokens(prompt, cached, sampled)

    def _length(self, segment: Segment) -> int:
        return len(segment.ids) if segment.ids is not None else self.count(segment.text)


def opening_prompts(trajectory: Trajectory, grammar: str = "") -> dict[PromptKind, str]:
    """The prompts that a chain may open with; its own must be among them."""
    prompts = _prompts_of(grammar or trajectory.grammar, tuple(trajectory.tools))
    first = trajectory.segments[0] if trajectory.segments else None
    found = first.text if first and first.author is Author.PROMPT else None
    if found not in prompts.values():
        raise RecordError(
            f"task {trajectory.task_id!r}: its chain does not open with a prompt of the grammar "
            f"{grammar or trajectory.grammar!r}. Distil the episodes again with this version."
        )
    return prompts


@cache
def _prompts_of(grammar: str, tools: tuple[str, ...]) -> dict[PromptKind, str]:
    bound = bound_to(load_grammar(grammar), tools)
    return {kind: system_prompt(bound, kind) for kind in PROMPTS}


# -- both sides of a task --------------------------------------------------------------------

MEASURES = (
    *(f"tokens.{caching}" for caching in CACHINGS),
    *(f"money.{caching}" for caching in CACHINGS),
    "tool_calls",
)


@dataclass(frozen=True, slots=True)
class Files:
    """Where one comparison comes from."""

    tasks: Path
    episodes: Path
    distilled: Path


@dataclass(frozen=True, slots=True)
class CostSide:
    """What one side needed for one task."""

    tokens: Tokens
    system: int
    """Those of its prompt tokens that are system prompts."""
    opening: int
    """Tokens of its system prompts, each once."""
    model_calls: int
    tool_calls: int
    solved: bool

    def measures(self, price: Price) -> dict[str, float]:
        """MEASURES, and whether it is solved."""
        made: dict[str, float] = {"tool_calls": self.tool_calls, "solved": self.solved}
        for caching in CACHINGS:
            tokens = self.cached(caching)
            made[f"tokens.{caching}"] = tokens.total_cached
            made[f"money.{caching}"] = price.of(*tokens)
        return made

    def cached(self, caching: Caching) -> Tokens:
        return with_caching(self.tokens, caching, self.opening)


@dataclass(frozen=True, slots=True)
class Case:
    """One task: the team, and the chain with either prompt where there is one."""

    episode: Episode
    team: CostSide
    chains: Mapping[PromptKind, CostSide]

    @property
    def paired(self) -> bool:
        """Both sides solve it."""
        return self.team.solved and self.chain("compact").solved

    @property
    def callers(self) -> list[AgentSpec]:
        """The agent of every model call of the team."""
        by_name = {agent.name: agent for agent in self.episode.agents}
        return [by_name[self.episode.events[place].agent] for place in self.episode.calls]

    def chain(self, kind: PromptKind) -> CostSide:
        """The chain with this prompt; without one, what the team spent, and no solution."""
        return self.chains[kind] if self.chains else replace(self.team, solved=False)


def read_cases(files: Files, counter: TokenCounter) -> tuple[list[Case], Json]:
    """Every task of the file with both sides, and why some have no chain.

    Chains are taken before the filters of distillation, which choose what to train on: a short or
    an ordinary one has its cost, too.
    """
    episodes = {episode.task_id: episode for episode in load_episodes(files.episodes)}
    made: dict[str, tuple[Trajectory | None, str]] = {}
    for name, found, why in read_records(files.distilled / CONVERTED, _converted):
        made.setdefault(name, (found, why))
    cases, missing = list[Case](), collections.Counter[str]()
    for task in TaskSet.load(files.tasks):
        if task.id not in episodes:
            raise RecordError(
                f"{files.episodes}: has no episode of task {task.id!r}. "
                "Every task counts: record all of them, or give the tasks that were recorded."
            )
        chain, reason = made.get(task.id, (None, "was not distilled"))
        if chain is None:
            missing[reason] += 1
        cases.append(_case(task, episodes[task.id], chain, counter))
    return cases, dict(missing.most_common())


def _converted(record: Json) -> tuple[str, Trajectory | None, str]:
    """What distillation made of the episode of a task, or why there is no chain."""
    name, chain, reason = record["task_id"], record["trajectory"], record["reason"]
    if chain is None or record["replay"]:
        return name, None, reason or "does not replay"
    return name, Trajectory.from_json(chain), ""


def _case(task: Task, episode: Episode, chain: Trajectory | None, counter: TokenCounter) -> Case:
    tokens, bare = counter.team(episode), counter.bare(episode)
    team = CostSide(
        tokens,
        system=tokens.prompt - bare.prompt,
        opening=(tokens.prompt - tokens.cached) - (bare.prompt - bare.cached),
        model_calls=len(episode.calls),
        tool_calls=sum(isinstance(event, ToolUse) for event in episode.events),
        solved=_solves(task, Trajectory(task.id, task.question, "", answer=episode.answer)),
    )
    if chain is None:
        return Case(episode, team, {})
    turns = len(chain.steps)
    called = sum(step.observation is not None for step in chain.steps)
    solved = _solves(task, chain)
    sides: dict[PromptKind, CostSide] = {}
    for kind, prompt in opening_prompts(chain).items():
        length = counter.count(prompt)
        counted = counter.chain(chain, prompt)
        sides[kind] = CostSide(counted, turns * length, length, turns, called, solved)
    return Case(episode, team, sides)


def _solves(task: Task, trajectory: Trajectory) -> bool:
    score = auto(task, trajectory)
    if score is None:
        raise RecordError(f"task {task.id}: has no gold, so nobody knows whether it was solved.")
    return score == 1.0


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


@dataclass(frozen=True)
class CostStudy:
    """What a team costs, and its chain; with a student, what that costs, too."""

    n: int = 600
    sets: tuple[str, ...] = COMPARED
    seed: int = 5
    prices: str = "1,0.1,5"
    tokenizer: str = BASE
    student: StudentPart = field(default_factory=StudentPart)


def study_cost(
    settings: CostStudy,
    out: Path,
    note: Note = lambda line: None,
    *,
    codec: TextCodec | None = None,
    resamples: int = PAIRED_RESAMPLES,
) -> Json:
    """Record and distil fresh tasks of every set below `out`, and compare; it continues."""
    if unknown := [name for name in settings.sets if name not in SETS]:
        raise UsageError(f"{unknown[0]!r} is not a task set; expected {', '.join(SETS)}.")
    made = {}
    for name in settings.sets:
        note(f"== {name}")
        made[name] = make_files(out / name, name, settings.n, settings.seed)
    price = parse_price(settings.prices)
    result = study_files(
        made, model=settings.tokenizer, price=price, note=note, codec=codec, resamples=resamples
    )
    write_atomic(out / "cost.json", json.dumps(result, indent=2) + "\n")
    return result


def make_files(folder: Path, name: str, n: int, seed: int) -> Files:
    """Tasks, the experts' episodes at their usual rate of mistakes, and their chains."""
    from coa.distillation.dataset import Distilling, run_distillation
    from coa.recording.record import Recording, run_recording

    files = Files(folder / "tasks.jsonl", folder / "episodes.jsonl", folder / "distilled")
    make_tasks(name, "train", n, seed).save(files.tasks)
    run_recording(Recording(tasks=files.tasks), files.episodes)
    run_distillation(Distilling(files.episodes, tasks=files.tasks), files.distilled)
    return files


def study_files(
    files: Mapping[str, Files],
    *,
    model: str = BASE,
    price: Price = EXAMPLE_PRICE,
    note: Note = lambda line: None,
    codec: TextCodec | None = None,
    seed: int = 0,
    resamples: int = PAIRED_RESAMPLES,
) -> Json:
    """Compare what is in files, by name of the comparison."""
    counter = TokenCounter(codec or Codec.from_folder(model_folder(resolve(model))))
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
    text = resources.files("coa.lab").joinpath(PEER_PROMPTS).read_text(encoding="utf-8")
    found: Json = json.loads(text)
    return found


# -- one comparison --------------------------------------------------------------------------


def compare(
    cases: Sequence[Case],
    counter: TokenCounter,
    price: Price = EXAMPLE_PRICE,
    *,
    seed: int = 0,
    resamples: int = PAIRED_RESAMPLES,
) -> Json:
    """Both sides of all cases, with intervals."""
    both = [case for case in cases if case.paired]
    if not both:
        raise UsageError("no task was solved by the team and has a chain: nothing to compare.")
    variants = _variants(both, counter)
    stretched: dict[str, list[float]] = {}
    for name, length_of in variants.items():
        counted = [counter.team(case.episode, length_of) for case in both]
        stretched[f"{name} tokens.none"] = [tokens.total for tokens in counted]
        stretched[f"{name} tokens.task"] = [tokens.total_cached for tokens in counted]
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
        saved = _saved(table, "team", "compact", CACHINGS)
        yield {"tool_calls": calls, "n": len(group), "reduction": saved}


def _saved(table: Resamples, team: str, kind: PromptKind, cachings: Sequence[Caching]) -> Json:
    """By what part a chain needs fewer tokens than the team, as counted in columns of this name."""
    return {
        caching: table.reduction(
            (f"{team} tokens.{caching}", "team solved"),
            (f"{kind} tokens.{caching}", f"{kind} solved"),
        ).figures()
        for caching in cachings
    }


# -- how the prompts matter ------------------------------------------------------------------


def _variants(cases: Sequence[Case], counter: TokenCounter) -> dict[str, LengthOf]:
    """Lengths of system prompts to recount with: ours stretched, and those of smolagents."""
    made: dict[str, LengthOf] = {
        f"{factor:g}x": partial(_stretched, counter, factor) for factor in FACTORS
    }
    calls = peer_prompts()["tokens"]
    theirs = {part: sum(calls[call].values()) for part, call in PEER_CALLS.items()}
    if all(agent.part in theirs for case in cases for agent in case.episode.agents):
        made[PEER] = lambda agent: theirs[agent.part]
    return made


def _stretched(counter: TokenCounter, factor: float, agent: AgentSpec) -> int:
    return round(factor * counter.count(agent.system))


def _sensitive(table: Resamples, cases: Sequence[Case], name: str, length_of: LengthOf) -> Json:
    """The saving if the agents' system prompts had these lengths."""
    calls = [length_of(agent) for case in cases for agent in case.callers]
    saved = {kind: _saved(table, name, kind, STRETCHED) for kind in PROMPTS}
    return {"prompts": name, "tokens_a_call": round(sum(calls) / len(calls), 1), "reduction": saved}


def _needed(cases: Sequence[Case], counter: TokenCounter) -> Json:
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


# ------------------------------------------------------------------------------------------------
# The result of `coa study cost` as small tables for people.
# ------------------------------------------------------------------------------------------------


_TITLES = {
    "tokens.none": "tokens, no cache",
    "tokens.task": "tokens, cache of a task",
    "tokens.warm": "tokens, warm cache",
    "money.none": "money, no cache",
    "money.task": "money, cache of a task",
    "money.warm": "money, warm cache",
    "tool_calls": "tool calls",
}


def cost_lines(result: Json) -> Iterator[str]:
    """The result as small tables, one set after the other."""
    yield (
        f"tokens of {result['tokenizer']}; 95% intervals: paired bootstrap over tasks, "
        f"{result['resamples']:,} resamples, seed {result['seed']}"
    )
    yield "the chain is the converted episode: a student that does what the chain says"
    for name, found in result["sets"].items():
        yield ""
        yield from _set_lines(name, found)
    yield ""
    price = result["price"]
    again = price["input"] if price["cached"] is None else price["cached"]
    label = "example prices, nobody's offer" if result["example_price"] else "prices"
    yield (
        f"{label}, for a million tokens: {price['input']:g} read, {again:g} from a "
        f"cache, {price['output']:g} written"
    )
    yield (
        f"the paper claims {result['claim']:.1%} fewer tokens (10 tasks); prompts compared with "
        f"{PEER} {result['peer'][PEER]}"
    )


def _set_lines(name: str, found: Json) -> Iterator[str]:
    solved, pairs = found["solved"], found["paired_tasks"]
    yield (
        f"{name}: {found['n']} tasks, {solved['team']} solved by the team, {solved['chain']} by "
        f"chains, {found['tool_calls_changed']} with another number of tool calls"
    )
    for reason, count in found["without_chain"].items():
        yield f"  no chain: {count} x {reason}"
    yield from _versus_lines("a solved task, failed ones paid", "compact", found["per_solved"])
    yield from _versus_lines("a solved task, failed ones paid", "full", found["per_solved"])
    yield from _versus_lines(f"a task that both solve, n={pairs}", "compact", found["paired"])
    yield f"  {'agents have the prompts of':<28}{'tokens':>8}   fewer without a cache"
    for row in found["sensitivity"]:
        prompts = f"ours, {row['prompts']}" if row["prompts"] != PEER else PEER
        yield _saved_line(prompts, round(row["tokens_a_call"]), row["reduction"]["compact"])
    yield f"  {'tool calls of a task':<28}{'n':>8}   fewer without a cache"
    for row in found["by_tool_calls"]:
        yield _saved_line(row["tool_calls"], row["n"], row["reduction"])
    needed = found["prompt_tokens_for_claim"]["compact"]
    yield (
        f"  the claimed saving needs prompts of {needed['none']:,} tokens in every agent without "
        f"a cache, of {needed['task']:,} with one"
    )


def _saved_line(name: str | int, count: int, saved: Json) -> str:
    both = f"{_percent(saved['none'])}   with one {_percent(saved['task'])}"
    return f"  {name:<28}{count:>8}   {both}"


def _versus_lines(title: str, kind: PromptKind, found: Json) -> Iterator[str]:
    yield f"  {title + ', ' + kind + ' prompt':<46}{'team':>10}{'chain':>10}   fewer"
    for measure, row in found[kind].items():
        means = f"{row['team']['value']:>10.4g}{row['chain']['value']:>10.4g}"
        yield f"    {_TITLES[measure]:<44}{means}   {_percent(row['reduction'])}"


def _percent(found: Json) -> str:
    return f"{found['value']:6.1%} {interval(found['ci95'], '.1%')}"
