"""Progressive filtering: candidates in, the chains worth training on out, a reason for the others.

The paper's four stages in its order, and two of ours:

    contamination -> complexity -> quality -> duplicates -> reflection -> correction

Contamination comes first, so that what it finds depends on the questions alone. Duplicates come
after quality, so that of two near-duplicates a sound one stays, and before the stages that draw and
repeat: what up-sampling repeats on purpose is not taken out again.

An interaction is one block that the model wrote, thoughts aside: a plan, a tool call, a reflection,
a suggested answer, a check, the answer. The paper drops chains with fewer than 5 "agent-tool
interactions" and reports means of 3.43 and 4.57 hops for question answering. Both can be true only
if a hop is a tool call and an interaction is any agent at work, so that is how we count;
`min_tool_calls` is the other reading.

Random choices are keyed by seed, task and sample, never by order.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from coa.distillation.contamination import find_known_tools, find_leaks
from coa.distillation.funnel import stage_record
from coa.grammar import Block, alternatives, parse_code
from coa.grammar.grammar import Body
from coa.io.runs import Json
from coa.io.settings import check_ranges
from coa.loop import REPEATED
from coa.rewards import normalise
from coa.tasks import Task
from coa.trajectory import CHAT_MARKER, Author, Chain, StopReason, Trajectory

Shingle = tuple[str, ...]

_TAG = re.compile(r"</?[a-z]\w*>")
_SLACK = 1e-9
"""0.7 * 10 is a little more than 7 in floating point, and a prefix must not lose a place to it."""


class Twin(NamedTuple):
    """Which earlier text a near-duplicate repeats, and how much of it."""

    first: int
    similarity: float


def told_text(trajectory: Trajectory) -> str:
    """What makes a chain the chain it is: its question and what the model wrote, without tags."""
    written = [s.text for s in trajectory.segments if s.author is Author.MODEL]
    return _TAG.sub(" ", "\n".join([trajectory.question, *written]))


def near_duplicates(texts: Iterable[str], similarity: float, shingle: int = 3) -> dict[int, Twin]:
    """Index of each near-duplicate -> the earlier text that stays in its place.

    Two texts that are similar enough share one of their rarest shingles: only such are compared.
    """
    assert 0 < similarity <= 1 and shingle > 0, (similarity, shingle)
    holders: defaultdict[int, list[int]] = defaultdict(list)
    bags: dict[int, frozenset[int]] = {}
    twins: dict[int, Twin] = {}
    for index, ranks in enumerate(_ranked([shingles(text, shingle) for text in texts])):
        prefix = ranks[: len(ranks) - math.ceil(similarity * len(ranks) - _SLACK) + 1]
        own = frozenset(ranks)
        met = sorted({other for rank in prefix for other in holders.get(rank, ())})
        alike = (Twin(other, len(own & bags[other]) / len(own | bags[other])) for other in met)
        twin = next((twin for twin in alike if twin.similarity >= similarity), None)
        if twin is not None:
            twins[index] = twin
            continue
        bags[index] = own
        for rank in prefix:
            holders[rank].append(index)
    return twins


def shingles(text: str, size: int) -> list[Shingle]:
    """Runs of `size` words, a repeated one with the number of its repetition.

    A text of fewer words is one run, so that it can be compared, too.
    """
    words = text.lower().split()
    runs = Counter(zip(*(words[at:] for at in range(size)), strict=False)) or {tuple(words): 1}
    repeated = ((*run, str(k)) for run, times in runs.items() for k in range(1, times))
    return [*runs, *repeated]


def _ranked(bags: Sequence[list[Shingle]]) -> list[list[int]]:
    """Each bag as sorted numbers, where a smaller number is a rarer shingle."""
    counts = Counter(run for bag in bags for run in bag)
    rank = {run: number for number, run in enumerate(sorted(counts, key=counts.__getitem__))}
    return [sorted(map(rank.__getitem__, bag)) for bag in bags]


Reason = tuple[str, str]
"""Why a chain is dropped, in words that group well, and the particulars of this one."""

_SIGN = re.compile(r"[^\w\s.,;:?!'\"`()\[\]{}|-]")
"""What a query means something else without: 3 * 5 is not 3 + 5, and C is not C++."""


@dataclass(frozen=True)
class FilterSettings:
    """Every threshold of the filters; the recipe `distill` says what each is for."""

    seed: int = 0
    """Of the draws among chains without reflection."""
    contamination_ngram: int = 8
    """Contamination: words of an n-gram; questions of fewer than twice as many words that carry
    meaning are found by those words instead."""
    contamination_overlap: float = 0.5
    """Contamination: share of an evaluation question's own n-grams that is too much."""
    contamination_template: int = 3
    """Contamination: an n-gram that more other questions hold is a template's, not its own."""
    min_interactions: int = 2
    """Complexity: fewest blocks besides thoughts. The paper's value is 5."""
    min_tool_calls: int = 1
    """Complexity: fewest tool calls; an answer from memory teaches guessing."""
    keep_unjudged: bool = True
    """Quality: keep chains whose answer nobody could judge."""
    max_repeated_calls: int = 0
    """Quality: how often a tool may be called with an argument that it was called with before, and
    be answered as before. In other words only: our runtime tells a model that a call is the same,
    which no episode has."""
    max_query_similarity: float = 1.0
    """Quality: queries of one tool that share more of their words than this count as repeated."""
    max_answer_words: int = 0
    """Quality: longest answer in words; 0 is no limit."""
    min_final_check: int = 3
    """Quality: lowest score of the last check, where the grammar has checks."""
    duplicate_similarity: float = 0.95
    """Duplicates: share of the word runs of question and chain that is too much; 0 is off."""
    duplicate_shingle: int = 3
    """Duplicates: words of a run."""
    keep_without_reflection: float = 1.0
    """Reflection: probability that a chain without any is kept."""
    reflection_required: tuple[str, ...] = ()
    """Reflection: grammars whose chains without any are all dropped."""
    copies_of_corrected: int = 0
    """Correction: how often a chain that put a mistake right is repeated."""
    low_check: int = 2
    """Correction: a check with this score or less has found a mistake."""
    no_copies: tuple[str, ...] = ("code",)
    """Correction: grammars whose chains are not repeated; the paper repeats search only."""

    def __post_init__(self) -> None:
        ranges = {
            "0 or more": "min_interactions min_tool_calls max_repeated_calls max_answer_words "
            "copies_of_corrected contamination_template",
            "at least 1": "contamination_ngram duplicate_shingle",
            "between 1 and 4": "min_final_check low_check",
            "between 0 and 1": "max_query_similarity duplicate_similarity keep_without_reflection",
            "more than 0, at most 1": "contamination_overlap",
        }
        check_ranges(self, "filter", ranges)


@dataclass(frozen=True)
class Candidate:
    """A converted chain before the filters."""

    trajectory: Trajectory
    score: float | None
    """By the task's reward; None: nobody could judge."""
    replay: str = ""
    """Why it does not replay; empty: it does."""


@dataclass(frozen=True)
class Filtered:
    """What the filters left, and what they did."""

    kept: list[Trajectory]
    """In input order; copies stand behind their original, with their number in meta['copy']."""
    notes: list[Json]
    """One for each chain that was dropped or repeated: task_id, stage, reason, detail, and copies
    where it was repeated."""
    stages: list[Json]
    """Entered, left, dropped, repeated and reasons of each stage, in order."""
    unjudged: int = 0
    """Kept chains whose answer nobody could judge, copies aside."""


Held = list[tuple[Candidate, Chain]]
Drop = Mapping[int, Reason]
"""Place among those that entered a stage -> why it is dropped."""


def apply_filters(
    candidates: Sequence[Candidate],
    settings: FilterSettings,
    against: Mapping[str, Sequence[Task]] | None = None,
    *,
    judged: bool = True,
) -> Filtered:
    """All stages in order. `against` are the tasks to evaluate on, by the name of their file.

    Without `judged` there was no gold at all, and no chain is dropped for want of a score.
    """
    if not judged:
        settings = replace(settings, keep_unjudged=True)
    filters: dict[str, Callable[[Held], Drop]] = {
        "contamination": lambda held: _contaminated(held, settings, against or {}),
        "complexity": lambda held: _one_by_one(held, _too_simple, settings),
        "quality": lambda held: _one_by_one(held, _unsound, settings),
        "duplicates": lambda held: _duplicates(held, settings),
        "reflection": lambda held: _one_by_one(held, _unreflected, settings),
    }
    held: Held = [(each, Chain.read(each.trajectory)) for each in candidates]
    notes: list[Json] = []
    stages: list[Json] = []
    for stage, find in filters.items():
        dropped = find(held)
        own: list[Json] = []
        for place in sorted(dropped):
            task_id, (reason, detail) = held[place][0].trajectory.task_id, dropped[place]
            own.append({"task_id": task_id, "stage": stage, "reason": reason, "detail": detail})
        stages.append(stage_record(stage, len(held), own))
        notes += own
        held = [pair for place, pair in enumerate(held) if place not in dropped]
    kept, repeated = _repeat(held, settings)
    stages.append(stage_record("correction", len(held), repeated))
    unjudged = sum(candidate.score is None for candidate, _ in held)
    return Filtered(kept, notes + repeated, stages, unjudged)


Judge = Callable[[Candidate, Chain, FilterSettings], Reason | None]


def _one_by_one(held: Held, judge: Judge, settings: FilterSettings) -> Drop:
    reasons = (judge(candidate, chain, settings) for candidate, chain in held)
    return {place: reason for place, reason in enumerate(reasons) if reason is not None}


# -- complexity ------------------------------------------------------------------------------


def _too_simple(candidate: Candidate, chain: Chain, settings: FilterSettings) -> Reason | None:
    calls, all_blocks = len(chain.of_kind("tool")), len(chain.interactions)
    if calls < settings.min_tool_calls and chain.grammar.tool_roles:  # a team may have no tools
        return "too few tool calls", f"{calls} of {settings.min_tool_calls}"
    if all_blocks < settings.min_interactions:
        return "too few interactions", f"{all_blocks} of {settings.min_interactions}"
    return None


# -- quality ---------------------------------------------------------------------------------


def _unsound(candidate: Candidate, chain: Chain, settings: FilterSettings) -> Reason | None:
    """The first thing that is wrong with a chain: its answer, its form, its calls, its replay."""
    if candidate.score is None and not settings.keep_unjudged:
        return "answer cannot be judged", ""
    if candidate.score is not None and candidate.score < 1:
        return "wrong answer", f"score {candidate.score:g}"
    fault = fault_of(chain, settings)
    if fault is None and candidate.replay:
        return "does not replay", candidate.replay
    return fault


def fault_of(chain: Chain, settings: FilterSettings) -> Reason | None:
    """The first thing about how a chain works that is not to be imitated: its form, its calls."""
    return _violation(chain, settings) or _redundancy(chain, settings)


def _violation(chain: Chain, settings: FilterSettings) -> Reason | None:
    """What the protocol's instructions forbid, also where the answer is right."""
    trajectory, grammar = chain.trajectory, chain.grammar
    if chain.fault is not None:
        return f"breaks the protocol ({chain.fault.kind})", chain.fault.message
    if trajectory.stop is not StopReason.ANSWERED:
        return "did not end with an answer", str(trajectory.stop)
    for block in chain.blocks:
        if not block.body.strip():
            return "empty block", block.role
        if grammar.by_name[block.role].body == "text" and grammar.escape(block.body) != block.body:
            return "a block holds what reads as a tag", block.role
        if marker := CHAT_MARKER.search(block.body):
            return "a block holds a marker of a chat template", f"{marker[0]} in {block.role}"
    answer = trajectory.answer or ""
    suggested = [block.body for block in chain.of_kind("suggestion")]
    if suggested and normalise(suggested[-1]) != normalise(answer):
        return "answer is not the one suggested", f"{suggested[-1].strip()!r}, then {answer!r}"
    scores = chain.check_scores
    if scores and scores[-1] < settings.min_final_check:
        return "last check is too low", f"{scores[-1]} of 4"
    words = len(answer.split())
    if 0 < settings.max_answer_words < words:
        return "answer too long", f"{words} words"
    return None


def _redundancy(chain: Chain, settings: FilterSettings) -> Reason | None:
    """Calls of one tool with the same argument, or with nearly the same words, that brought
    nothing."""
    calls = chain.of_kind("tool")
    repeated = []
    for place, block in enumerate(calls):
        earlier = [each for each in calls[:place] if each.role == block.role]
        later = [each for each in calls[place + 1 :] if each.role == block.role]
        if _brought_nothing(chain, block, earlier, later, settings.max_query_similarity):
            repeated.append(block)
    if len(repeated) <= settings.max_repeated_calls:
        return None
    first = repeated[0]
    return "redundant tool call", f"{first.role}: {' '.join(first.body.split())[:80]}"


def _brought_nothing(
    chain: Chain, block: Block, earlier: list[Block], later: list[Block], most: float
) -> bool:
    """Whether an earlier call had asked the same, or nearly, and had been answered.

    The same call with another answer is a mistake put right (a tool may care for case), or a second
    look at what changes. Where the very same call is answered in another way later, what failed was
    the world, and each try before that was worth making.
    """
    same = [each for each in earlier if _is_same(chain, block, each)]
    if not same:
        return any(
            _is_near(chain, block, each, most) and not _was_mistaken(chain, each)
            for each in earlier
        )
    answer = _answer(chain, same[-1])
    again = [each for each in later if each.body.strip() == block.body.strip()]
    return _answer(chain, block) == answer and all(_answer(chain, e) == answer for e in again)


def _answer(chain: Chain, call: Block) -> str:
    """What came back, without what our runtime says before it of a call that was made before."""
    return chain.observed.get(call.start, "").strip().removeprefix(REPEATED).strip()


def _was_mistaken(chain: Chain, call: Block) -> bool:
    return chain.is_marked(call) or _answer(chain, call).startswith("Error")


def _is_same(chain: Chain, one: Block, other: Block) -> bool:
    body = _body(chain, one)
    if body == "code":
        return _program(one.body) == _program(other.body)
    if body == "json":
        return _canonical(one.body) == _canonical(other.body)
    return _query(one.body) == _query(other.body)


def _is_near(chain: Chain, one: Block, other: Block, most: float) -> bool:
    # A changed program is a correction, however small the change, and so is a changed object.
    if _body(chain, one) != "text":
        return False
    mine, theirs = set(_asked(one.body)), set(_asked(other.body))
    return len(mine & theirs) > most * len(mine | theirs)


def _body(chain: Chain, block: Block) -> Body:
    """What a call holds. A tool that the grammar does not know by itself has a role of plain text,
    also when it runs programs or takes JSON."""
    body = chain.grammar.by_name[block.role].body
    if body == "code" or "```" in block.body:
        return "code"
    return "json" if body == "json" or block.body.lstrip().startswith("{") else "text"


def _query(body: str) -> list[tuple[list[str], list[str]]]:
    """What is asked for, in any order: the words and the signs of each."""
    return sorted((_asked(part), _SIGN.findall(part)) for part in alternatives(body))


def _asked(query: str) -> list[str]:
    """Its words. Only at the beginning is `a` an article for sure: hepatitis A is another one."""
    words = normalise(query, keep_articles=True).split()
    told = words[1:] if words[:1] in (["a"], ["an"]) else words
    return [word for word in told if word != "the"] or words


def _program(body: str) -> tuple[list[str], str]:
    code = parse_code(body)
    return [line.rstrip() for line in code.source.splitlines() if line.strip()], code.stdin.strip()


def _canonical(body: str) -> str:
    try:
        return json.dumps(json.loads(body), sort_keys=True)
    except ValueError:
        return body.strip()


# -- against all others ----------------------------------------------------------------------


def _contaminated(
    held: Held, settings: FilterSettings, against: Mapping[str, Sequence[Task]]
) -> Drop:
    questions = [candidate.trajectory.question for candidate, _ in held]
    leaks = find_leaks(
        questions,
        against,
        settings.contamination_ngram,
        settings.contamination_overlap,
        settings.contamination_template,
    )
    offered = [candidate.trajectory.meta.get("tools") or () for candidate, _ in held]
    leaks = find_known_tools(offered, against) | leaks
    return {
        place: (leak.rule, f"{leak.evaluation} task {leak.task_id}")
        for place, leak in leaks.items()
    }


def _duplicates(held: Held, settings: FilterSettings) -> Drop:
    if not settings.duplicate_similarity:
        return {}
    texts = (told_text(candidate.trajectory) for candidate, _ in held)
    twins = near_duplicates(texts, settings.duplicate_similarity, settings.duplicate_shingle)
    first = {place: held[twin.first][0].trajectory.task_id for place, twin in twins.items()}
    return {
        place: ("near-duplicate", f"{twin.similarity:.3f} like task {first[place]}")
        for place, twin in twins.items()
    }


# -- reflection and correction ---------------------------------------------------------------


def _unreflected(candidate: Candidate, chain: Chain, settings: FilterSettings) -> Reason | None:
    if chain.of_kind("reflection") or not chain.grammar.of_kind("reflection"):
        return None  # a grammar without reflections cannot be asked for any
    trajectory = candidate.trajectory
    if trajectory.grammar in settings.reflection_required:
        return "no reflection where it is required", trajectory.grammar
    dice = random.Random(f"{settings.seed}|{trajectory.task_id}|{trajectory.sample}")
    if dice.random() < settings.keep_without_reflection:
        return None
    return "no reflection, not drawn", ""


def _repeat(held: Held, settings: FilterSettings) -> tuple[list[Trajectory], list[Json]]:
    """Every chain, and behind each that put a mistake right its copies."""
    kept: list[Trajectory] = []
    notes: list[Json] = []
    for candidate, chain in held:
        original = candidate.trajectory
        kept.append(original)
        if candidate.score != 1 or original.grammar in settings.no_copies:
            continue
        reason = chain.turning_point(settings.low_check)
        if reason and settings.copies_of_corrected:
            copies = settings.copies_of_corrected
            for number in range(1, copies + 1):
                kept.append(replace(original, meta={**original.meta, "copy": number}))
            note = {"task_id": original.task_id, "stage": "correction", "reason": reason}
            notes.append({**note, "detail": "", "copies": copies})
    return kept, notes
