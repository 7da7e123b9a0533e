"""The dataset card: README.md of a distilled dataset, in the form that the Hugging Face hub reads.

Everything in it is counted from the trajectories, the funnel and the settings that made them, so it
is the same whenever and wherever the same dataset is made: no date, and no path of a machine.
Figures are of distinct chains; what up-sampling repeated is counted once unless a line says so.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from coa.distillation.funnel import Stages, markdown
from coa.environment import Terms, shipped_home
from coa.io.files import portable
from coa.io.runs import Json
from coa.trajectory import Author, Chain, Trajectory

OTHER_TASKS = "other tasks"
EXPERTS = "experts"
"""The teacher whose sentences are ours to license."""
_OTHER_LICENCES = """\
Other questions, and what tools returned for them, keep the licences of their sources. **State them
here before publishing.**"""
_OTHER_TEACHERS = """\
What another teacher than the experts wrote is under its own terms, say those of the provider of a
language model. **State them here before publishing.**"""
_JUDGED = """\
- Chains with a wrong answer were dropped, so the share of right answers says nothing about the
  teacher."""
_UNJUDGED = """\
- Nobody could judge the answers of {} chains: some may be wrong."""
_REGULAR = """\
- Rule-based experts write few and regular sentences: a model trained on them learns the protocol
  and the work, not a way of writing."""
_BY_WORDS = """\
- Near-duplicates and contamination are found by words: the same question in other words throughout,
  or in another language, is not found."""


def set_of(trajectory: Trajectory) -> str:
    """The shipped environment that a chain's question is of, where it says its terms."""
    home = shipped_home(trajectory.meta)
    return home.name if home.terms else OTHER_TASKS


def _terms(distinct: Sequence[Trajectory]) -> list[Terms]:
    """The terms of all environments that chains are of, each once."""
    homes = (shipped_home(each.meta) for each in distinct)
    return list(dict.fromkeys(home.terms for home in homes if home.terms))


def licence_names(distinct: Sequence[Trajectory]) -> list[str]:
    """The names that the hub has for the licences of all chains together."""
    if OTHER_TASKS in set(map(set_of, distinct)) or _others_wrote(distinct):
        return ["unknown"]
    return list(dict.fromkeys(["apache-2.0", *(n for t in _terms(distinct) for n in t.names)]))


def licences(distinct: Sequence[Trajectory]) -> str:
    """The section of the card that says under which terms its texts are."""
    others_asked = OTHER_TASKS in set(map(set_of, distinct))
    others_wrote = _others_wrote(distinct)
    whose = " of the experts" * others_wrote + " of known sets" * others_asked
    paragraphs = [f"Chains{whose}: Apache-2.0.", *(terms.text for terms in _terms(distinct))]
    paragraphs += [_OTHER_LICENCES] * others_asked + [_OTHER_TEACHERS] * others_wrote
    return "\n\n".join(["## Licences", *paragraphs])


def limits(distinct: Sequence[Trajectory], unjudged: int) -> str:
    """The section of the card that says what not to conclude from it."""
    lines = {
        _JUDGED: len(distinct) > unjudged,
        _UNJUDGED.format(f"{unjudged:,}"): unjudged,
        _REGULAR: any(each.weights == EXPERTS for each in distinct),
        **{terms.limits: bool(terms.limits) for terms in _terms(distinct)},
        _BY_WORDS: True,
    }
    return "\n".join(["## Limits", "", *(text for text, holds in lines.items() if holds)])


def _others_wrote(distinct: Iterable[Trajectory]) -> bool:
    return any(each.weights != EXPERTS for each in distinct)


CountTokens = Callable[[str], int]
Cells = Sequence[object]

COPY = "copy"
"""In the meta of a chain that up-sampling repeated: the number of the copy."""
SLIPS = {
    "careless_queries": "careless queries",
    "wrong_pages": "wrong pages opened",
    "misreadings": "misreadings",
    "wrong_programs": "wrong programs",
    "wrong_combinations": "findings combined wrongly",
}
"""What experts count of their own mistakes, by its key in a chain's meta."""
_EXAMPLE = 1600
"""Longest example in characters."""
_LONGEST = 40
"""Most rows of a table of families."""


@dataclass(frozen=True)
class Making:
    """How a dataset was made, as far as its chains do not say."""

    name: str = "Chain-of-agents trajectories"
    command: str = ""
    seed: int = 0
    settings: Json = field(default_factory=dict)
    """The resolved recipe."""
    against: Sequence[str] = ()
    """Names of the evaluation files whose questions were kept out."""
    plot: str = ""
    """Name of the funnel's plot beside the card."""
    unjudged: int = 0
    """Chains whose answer nobody could judge."""
    tokenizer: str = ""
    """Whose tokens are counted."""
    count_tokens: CountTokens | None = None


def dataset_card(
    trajectories: Sequence[Trajectory],
    stages: Stages,
    making: Making | None = None,
) -> str:
    """The card as one Markdown text; tokens are counted where there is something to count with."""
    making = making or Making()
    distinct = [each for each in trajectories if COPY not in each.meta]
    chains = [Chain.read(each) for each in distinct]
    sections = (
        _head(making, trajectories, distinct),
        _counts(trajectories, chains, making.unjudged),
        _making(making),
        _funnel(stages, making.plot),
        _lengths(chains, making),
        _agents(chains),
        _mistakes(chains),
        _sources(distinct),
        _example(chains),
        _FORMAT,
        licences(distinct),
        limits(distinct, making.unjudged),
    )
    front = _front_matter(making.name, trajectories, distinct)
    return "\n".join([*front, "\n\n".join(filter(None, sections)), ""])


# -- front matter and head -------------------------------------------------------------------


def _front_matter(
    name: str, trajectories: Sequence[Trajectory], distinct: Sequence[Trajectory]
) -> Iterator[str]:
    yield "---"
    yield f"pretty_name: {json.dumps(name)}"
    yield "\n- ".join(["license:", *licence_names(distinct)])
    if all(set_of(each) != OTHER_TASKS for each in distinct):
        yield "language:\n- en"
    # Without this the hub would take every file in the directory for rows of one table.
    yield "configs:\n- config_name: default\n  data_files: trajectories.jsonl"
    yield f"size_categories:\n- {_size(len(trajectories))}"
    yield "task_categories:\n- question-answering\n- text-generation"
    yield "tags:"
    grammars = {f"grammar-{each.grammar}" for each in trajectories if each.grammar.isidentifier()}
    fixed = ("chain-of-agents", "agent", "tool-use", "distillation", "synthetic")
    yield from (f"- {tag}" for tag in (*fixed, *sorted(grammars)))
    yield "---\n"


def _size(count: int) -> str:
    """The hub's word for a number of rows."""
    names = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M")
    limits = (10**power for power in range(3, 8))
    fitting = (name for name, limit in zip(names, limits, strict=True) if count < limit)
    return next(fitting, "10M<n<100M")


def _head(making: Making, rows: Sequence[Trajectory], distinct: Sequence[Trajectory]) -> str:
    return (
        f"# {making.name}\n\n"
        f"{len(rows):,} chain-of-agents trajectories, {len(distinct):,} of them distinct: each is "
        "the work of a multi-agent system on one question, written as one text in which a single "
        "model plays all agents and the environment answers its tool calls. Made with "
        "`chain-of-agents` (`coa distill`)."
    )


def _counts(rows: Sequence[Trajectory], chains: Sequence[Chain], unjudged: int) -> str:
    distinct = [chain.trajectory for chain in chains]
    marked = sum(any(segment.errs for segment in each.segments) for each in distinct)
    reflected = sum(bool(chain.of_kind("reflection")) for chain in chains)
    figures: dict[str, object] = {
        "rows": len(rows),
        "distinct chains": len(distinct),
        "copies by up-sampling": len(rows) - len(distinct),
        "tasks": len({each.task_id for each in distinct}),
        "chains with a reflection": reflected,
        "chains with a marked mistake": marked,
        "chains whose answer nobody could judge": unjudged,
    }
    lines = _table(("", "count"), figures.items())
    ends = Counter(str(each.stop) for each in distinct)
    for title, counts in (
        ("grammar", Counter(each.grammar for each in distinct)),
        ("prompt", Counter(each.prompt for each in distinct)),
        ("ended", ends),
    ):
        lines += ["", *_table((title, "chains"), _most_common(counts))]
    return "\n".join(["## Counts", "", *lines])


def _making(making: Making) -> str:
    lines = ["## How it was made", ""]
    if making.command:
        lines += ["```", portable(making.command), "```", ""]
    lines.append(f"Seed of the filters: {making.seed}.")
    if making.against:
        lines.append(f"Kept out: questions of {', '.join(map(portable, making.against))}.")
    else:
        lines.append("No evaluation file was given, so no question was kept out.")
    if making.settings:
        settings = ((f"`{key}`", f"`{value}`") for key, value in _flat(making.settings))
        how = "With these settings, of a recipe or written as `name=value` behind the command:"
        lines += ["", how, "", *_table(("setting", "value"), settings)]
    return "\n".join(lines)


def _funnel(stages: Stages, picture: str) -> str:
    lines = ["## Funnel", ""]
    if picture:
        lines += [f"![What entered and left each stage]({picture})", ""]
    return "\n".join([*lines, *markdown(stages)])


# -- figures ---------------------------------------------------------------------------------


def _lengths(chains: Sequence[Chain], making: Making) -> str:
    count = making.count_tokens
    told = [chain.trajectory for chain in chains]
    written = ["".join(_texts(each, Author.MODEL)) for each in told]
    series: dict[str, Sequence[int]] = {
        "characters": [len(each.text) for each in told],
        "characters by the model": list(map(len, written)),
        "model turns": [len(each.steps) for each in told],
        "interactions": [len(chain.interactions) for chain in chains],
        "tool calls": [len(chain.of_kind("tool")) for chain in chains],
    }
    if count is not None:
        series["tokens with prompt"] = [sum(count(s.text) for s in each.segments) for each in told]
        series["tokens by the model"] = list(map(count, written))
    rows = [(name, *_spread(values), f"{sum(values):,}") for name, values in series.items()]
    about = "An interaction is a block of the model other than a thought."
    about += f" Tokens are those of {making.tokenizer}." if count else ""
    head = ("of a chain", "mean", "median", "95%", "longest", "together")
    return "\n".join(["## Lengths", "", *_table(head, rows), "", about])


def _spread(values: Sequence[int]) -> tuple[str, ...]:
    """Mean, median, 95th percentile and maximum."""
    if not values:
        return ("-",) * 4
    high = sorted(values)[min(len(values) - 1, round(0.95 * (len(values) - 1)))]
    return f"{fmean(values):,.1f}", f"{median(values):,g}", f"{high:,}", f"{max(values):,}"


def _agents(chains: Sequence[Chain]) -> str:
    blocks: Counter[str] = Counter()
    having: Counter[str] = Counter()
    kinds: dict[str, str] = {}
    for chain in chains:
        roles = [block.role for block in chain.blocks]
        blocks.update(roles)
        having.update(set(roles))
        kinds |= {block.role: chain.kind(block) for block in chain.blocks}
    rows = [(f"`{role}`", kinds[role], n, having[role]) for role, n in _most_common(blocks)]
    return "\n".join(
        [
            "## Agents and tools",
            "",
            "Blocks that the model writes; those of kind tool are tool calls.",
            "",
            *_table(("agent", "kind", "blocks", "chains with it"), rows),
        ]
    )


def _mistakes(chains: Sequence[Chain]) -> str:
    """What the teachers' own counts say about the chains that were kept."""
    metas = [chain.trajectory.meta for chain in chains]
    slips = [(name, _total(metas, key)) for key, name in SLIPS.items() if _total(metas, key)]
    alarms, misses, false = (
        _total(metas, key) for key in ("alarms", "missed_mistakes", "false_alarms")
    )
    if not slips and not alarms and not misses:
        return ""
    found = max(0, alarms - false)
    rows = [*slips, ("objections of critics", alarms), ("of these without cause", false)]
    rows.append(("mistakes that a critic let pass", misses))
    lines = ["## Mistakes and critics", "", *_table(("in the chains kept", "count"), rows), ""]
    if alarms:
        lines.append(f"Objections with cause: {found / alarms:.1%}.")
    if found + misses:
        lines.append(f"Mistakes that were objected to: {found / (found + misses):.1%}.")
    lines.append(
        "Chains whose answer was judged wrong were dropped, so critics look better here than they "
        "are. Marked mistakes have weight 0 in training, corrections weight 1."
    )
    return "\n".join(lines)


def _sources(distinct: Sequence[Trajectory]) -> str:
    lines = ["## Tasks and teachers"]
    groups: Mapping[str, Callable[[Trajectory], object]] = {
        "task set": set_of,
        "family": lambda each: each.meta.get("family") or each.meta.get("generator"),
        "world": lambda each: each.meta.get("world"),
        "split": lambda each: each.meta.get("split"),
        "teacher": lambda each: each.weights or "not stated",
    }
    for title, key in groups.items():
        named = (key(each) for each in distinct)
        counts = Counter(str(name) for name in named if name is not None)
        if counts:
            shown = _most_common(counts)
            rest = sum(count for _, count in shown[_LONGEST:])
            rows = [*shown[:_LONGEST], *([("all others", rest)] if rest else [])]
            lines += ["", *_table((title, "chains"), rows)]
    return "\n".join(lines)


def _example(chains: Sequence[Chain]) -> str:
    """The shortest chain that has a reflection, or the shortest."""
    short = [each for each in chains if len(each.trajectory.text) <= _EXAMPLE]
    if not short:
        return ""
    best = min(short, key=lambda each: (not each.of_kind("reflection"), len(each.trajectory.text)))
    chosen = best.trajectory
    text = portable(chosen.text.strip())
    question = " ".join(chosen.question.split())
    return f"## Example\n\n> {question}\n\n~~~~\n{text}\n~~~~"


# -- format ----------------------------------------------------------------------------------

_FORMAT = """\
## Format

`trajectories.jsonl`: one JSON object a line. `segments` is the whole text in order, each with its
`author` (`prompt`, `model` or `env`) and, where the teacher erred, `errs`: character spans that
must not be imitated. Only what the model wrote is to be trained on. `meta` has the task's family,
world and split; `meta.copy` numbers the copies of a repeated chain. `rejected.jsonl` has every
episode that was dropped or repeated, with stage and reason."""


# -- small things ----------------------------------------------------------------------------


def _texts(trajectory: Trajectory, author: Author) -> Iterator[str]:
    return (segment.text for segment in trajectory.segments if segment.author is author)


def _total(metas: Iterable[Mapping[str, Any]], key: str) -> int:
    return sum(value for meta in metas if isinstance(value := meta.get(key, 0), int))


def _most_common(counts: Counter[str]) -> list[tuple[str, int]]:
    """From common to rare, then by name: not by who came first."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _table(head: Cells, rows: Iterable[Cells]) -> list[str]:
    lines = [_row(head), "|" + "|".join(["---", *["---:"] * (len(head) - 1)]) + "|"]
    return lines + [_row(row) for row in rows]


def _row(cells: Cells) -> str:
    shown = (f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in cells)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in shown) + " |"


def _flat(settings: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{at}{name}.")
        else:
            yield f"{at}{name}", json.dumps(portable(value), ensure_ascii=False)
