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
from coa.io.tables import markdown_table
from coa.trajectory import Author, Chain, Trajectory

NAME = "Chain-of-agents trajectories"
PLOT = "funnel.svg"
"""The file of the funnel's plot, beside the card."""
COPY = "copy"
"""In the meta of a chain that up-sampling repeated: the number of the copy."""
OTHER_TASKS = "other tasks"
EXPERTS = "experts"
"""The teacher whose sentences are ours to license."""
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
_SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M")
"""The hub's words for a number of rows, each for ten times as many as the one before."""
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
- Nobody could judge the answers of {:,} chains: some may be wrong."""
_REGULAR = """\
- Rule-based experts write few and regular sentences: a model trained on them learns the protocol
  and the work, not a way of writing."""
_BY_WORDS = """\
- Near-duplicates and contamination are found by words: the same question in other words throughout,
  or in another language, is not found."""
_FRONT_MATTER = """\
---
pretty_name: "{name}"
license:
{licences}
{language}configs:
- config_name: default
  data_files: trajectories.jsonl
size_categories:
- {size}
task_categories:
- question-answering
- text-generation
tags:
- chain-of-agents
- agent
- tool-use
- distillation
- synthetic
{grammars}---
"""
# Without `configs` the hub would take every file in the directory for rows of one table.
_HEAD = """\
# {name}

{rows:,} chain-of-agents trajectories, {distinct:,} of them distinct: each is the work of a \
multi-agent system on one question, written as one text in which a single model plays all agents \
and the environment answers its tool calls. Made with `chain-of-agents` (`coa distill`)."""
_FORMAT = """\
## Format

`trajectories.jsonl`: one JSON object a line. `segments` is the whole text in order, each with its
`author` (`prompt`, `model` or `env`) and, where the teacher erred, `errs`: character spans that
must not be imitated. Only what the model wrote is to be trained on. `meta` has the task's family,
world and split; `meta.copy` numbers the copies of a repeated chain. `rejected.jsonl` has every
episode that was dropped or repeated, with stage and reason."""


@dataclass(frozen=True)
class Making:
    """How a dataset was made, as far as its chains do not say."""

    command: str = ""
    seed: int = 0
    settings: Json = field(default_factory=dict)
    """The resolved recipe."""
    against: Sequence[str] = ()
    """Names of the evaluation files whose questions were kept out."""
    unjudged: int = 0
    """Chains whose answer nobody could judge."""
    tokenizer: str = ""
    """Whose tokens are counted."""
    count_tokens: Callable[[str], int] | None = None


def dataset_card(
    trajectories: Sequence[Trajectory], stages: Stages, making: Making | None = None
) -> str:
    """The card as one Markdown text; tokens are counted where there is something to count with."""
    making = making or Making()
    distinct = [each for each in trajectories if COPY not in each.meta]
    chains = [Chain.read(each) for each in distinct]
    grammars = {each.grammar for each in trajectories if each.grammar.isidentifier()}
    others_asked = any(set_of(each) == OTHER_TASKS for each in distinct)
    others_wrote = any(each.weights != EXPERTS for each in distinct)
    homes = (shipped_home(each.meta) for each in distinct)
    terms = list(dict.fromkeys(home.terms for home in homes if home.terms))
    licences = dict.fromkeys(["apache-2.0", *(name for each in terms for name in each.names)])
    front = _FRONT_MATTER.format(
        name=NAME,
        licences="\n".join(
            f"- {each}" for each in (["unknown"] if others_asked or others_wrote else licences)
        ),
        language="" if others_asked else "language:\n- en\n",
        size=_SIZES[max(0, min(len(str(len(trajectories))) - 3, 5))],
        grammars="".join(f"- grammar-{name}\n" for name in sorted(grammars)),
    )
    sections = (
        _HEAD.format(name=NAME, rows=len(trajectories), distinct=len(distinct)),
        _counts(trajectories, chains, making.unjudged),
        _how(making),
        _section("Funnel", f"![What entered and left each stage]({PLOT})", markdown(stages)),
        _lengths(chains, making),
        _agents(chains),
        _mistakes(chains),
        _sources(distinct),
        _example(chains),
        _FORMAT,
        _licences(terms, others_asked, others_wrote),
        _limits(distinct, terms, making.unjudged),
    )
    return "\n".join([front, "\n\n".join(filter(None, sections)), ""])


def set_of(trajectory: Trajectory) -> str:
    """The shipped environment that a chain's question is of, where it says its terms."""
    home = shipped_home(trajectory.meta)
    return home.name if home.terms else OTHER_TASKS


def _section(title: str, *parts: str | Sequence[str]) -> str:
    """A section of paragraphs, each a text or the lines of a table."""
    texts = (part if isinstance(part, str) else "\n".join(part) for part in parts)
    return "\n\n".join([f"## {title}", *filter(None, texts)])


def _counts(rows: Sequence[Trajectory], chains: Sequence[Chain], unjudged: int) -> str:
    distinct = [chain.trajectory for chain in chains]
    figures = {
        "rows": len(rows),
        "distinct chains": len(distinct),
        "copies by up-sampling": len(rows) - len(distinct),
        "tasks": len({each.task_id for each in distinct}),
        "chains with a reflection": sum(bool(chain.of_kind("reflection")) for chain in chains),
        "chains with a marked mistake": sum(any(s.errs for s in t.segments) for t in distinct),
        "chains whose answer nobody could judge": unjudged,
    }
    tables = [markdown_table(("", "count"), figures.items())]
    for title, values in (
        ("grammar", [each.grammar for each in distinct]),
        ("prompt", [each.prompt for each in distinct]),
        ("ended", [str(each.stop) for each in distinct]),
    ):
        tables.append(markdown_table((title, "chains"), _most_common(values)))
    return _section("Counts", *tables)


def _how(making: Making) -> str:
    kept_out = f"Kept out: questions of {', '.join(map(portable, making.against))}."
    if not making.against:
        kept_out = "No evaluation file was given, so no question was kept out."
    settings = [(f"`{key}`", f"`{value}`") for key, value in _flat(making.settings)]
    how = "With these settings, of a recipe or written as `name=value` behind the command:"
    return _section(
        "How it was made",
        f"```\n{portable(making.command)}\n```" if making.command else "",
        f"Seed of the filters: {making.seed}.\n{kept_out}",
        *([how, markdown_table(("setting", "value"), settings)] if settings else []),
    )


def _lengths(chains: Sequence[Chain], making: Making) -> str:
    count = making.count_tokens
    told = [chain.trajectory for chain in chains]
    written = ["".join(s.text for s in t.segments if s.author is Author.MODEL) for t in told]
    series: dict[str, Sequence[int]] = {
        "characters": [len(each.text) for each in told],
        "characters by the model": list(map(len, written)),
        "model turns": [len(each.steps) for each in told],
        "interactions": [len(chain.interactions) for chain in chains],
        "tool calls": [len(chain.of_kind("tool")) for chain in chains],
    }
    about = "An interaction is a block of the model other than a thought."
    if count is not None:
        series["tokens with prompt"] = [sum(count(s.text) for s in each.segments) for each in told]
        series["tokens by the model"] = list(map(count, written))
        about += f" Tokens are those of {making.tokenizer}."
    rows = [(name, *_spread(values), f"{sum(values):,}") for name, values in series.items()]
    head = ("of a chain", "mean", "median", "95%", "longest", "together")
    return _section("Lengths", markdown_table(head, rows), about)


def _spread(values: Sequence[int]) -> tuple[str, ...]:
    """Mean, median, 95th percentile and maximum."""
    if not values:
        return ("-",) * 4
    high = sorted(values)[round(0.95 * (len(values) - 1))]
    return f"{fmean(values):,.1f}", f"{median(values):,g}", f"{high:,}", f"{max(values):,}"


def _agents(chains: Sequence[Chain]) -> str:
    having = Counter(role for chain in chains for role in {block.role for block in chain.blocks})
    kinds = {block.role: chain.kind(block) for chain in chains for block in chain.blocks}
    blocks = _most_common(block.role for chain in chains for block in chain.blocks)
    rows = [(f"`{role}`", kinds[role], count, having[role]) for role, count in blocks]
    return _section(
        "Agents and tools",
        "Blocks that the model writes; those of kind tool are tool calls.",
        markdown_table(("agent", "kind", "blocks", "chains with it"), rows),
    )


def _mistakes(chains: Sequence[Chain]) -> str:
    """What the teachers' own counts say about the chains that were kept."""

    def total(key: str) -> int:
        counts = (chain.trajectory.meta.get(key, 0) for chain in chains)
        return sum(count for count in counts if isinstance(count, int))

    slips = [(name, total(key)) for key, name in SLIPS.items() if total(key)]
    alarms, misses, false = map(total, ("alarms", "missed_mistakes", "false_alarms"))
    if not slips and not alarms and not misses:
        return ""
    found = max(0, alarms - false)
    rows = [*slips, ("objections of critics", alarms), ("of these without cause", false)]
    rows.append(("mistakes that a critic let pass", misses))
    lines = [f"Objections with cause: {found / alarms:.1%}."] if alarms else []
    if found + misses:
        lines.append(f"Mistakes that were objected to: {found / (found + misses):.1%}.")
    lines.append(
        "Chains whose answer was judged wrong were dropped, so critics look better here than they "
        "are. Marked mistakes have weight 0 in training, corrections weight 1."
    )
    return _section(
        "Mistakes and critics", markdown_table(("in the chains kept", "count"), rows), lines
    )


def _sources(distinct: Sequence[Trajectory]) -> str:
    groups: Mapping[str, Callable[[Trajectory], object]] = {
        "task set": set_of,
        "family": lambda each: each.meta.get("family") or each.meta.get("generator"),
        "world": lambda each: each.meta.get("world"),
        "split": lambda each: each.meta.get("split"),
        "teacher": lambda each: each.weights or "not stated",
    }
    tables = []
    for title, key in groups.items():
        shown = _most_common(str(name) for each in distinct if (name := key(each)) is not None)
        rest = sum(count for _, count in shown[_LONGEST:])
        rows = [*shown[:_LONGEST], *([("all others", rest)] if rest else [])]
        tables.append(markdown_table((title, "chains"), rows) if rows else "")
    return _section("Tasks and teachers", *tables)


def _example(chains: Sequence[Chain]) -> str:
    """The shortest chain that has a reflection, or the shortest."""
    short = [each for each in chains if len(each.trajectory.text) <= _EXAMPLE]
    if not short:
        return ""
    best = min(short, key=lambda each: (not each.of_kind("reflection"), len(each.trajectory.text)))
    question = " ".join(best.trajectory.question.split())
    text = portable(best.trajectory.text.strip())
    return _section("Example", f"> {question}", f"~~~~\n{text}\n~~~~")


def _licences(terms: Sequence[Terms], others_asked: bool, others_wrote: bool) -> str:
    """Under which terms the texts are."""
    whose = " of the experts" * others_wrote + " of known sets" * others_asked
    others = [_OTHER_LICENCES] * others_asked + [_OTHER_TEACHERS] * others_wrote
    own = f"Chains{whose}: Apache-2.0."
    return _section("Licences", own, *(each.text for each in terms), *others)


def _limits(distinct: Sequence[Trajectory], terms: Sequence[Terms], unjudged: int) -> str:
    """What not to conclude from it."""
    lines = [_JUDGED] if len(distinct) > unjudged else []
    lines += [_UNJUDGED.format(unjudged)] if unjudged else []
    lines += [_REGULAR] if any(each.weights == EXPERTS for each in distinct) else []
    lines += [each.limits for each in terms if each.limits]
    return _section("Limits", [*lines, _BY_WORDS])


def _most_common(names: Iterable[str]) -> list[tuple[str, int]]:
    """How often each is there, from common to rare, then by name: not by who came first."""
    return sorted(Counter(names).items(), key=lambda item: (-item[1], item[0]))


def _flat(settings: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{at}{name}.")
        else:
            yield f"{at}{name}", json.dumps(portable(value), ensure_ascii=False)
