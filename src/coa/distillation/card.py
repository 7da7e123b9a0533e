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
from pathlib import Path
from statistics import fmean, median
from typing import Any

from coa.distillation.funnel import Stages, markdown
from coa.environment import Terms, shipped_home
from coa.io.files import portable
from coa.io.runs import Json
from coa.io.settings import read_toml
from coa.io.tables import markdown_table
from coa.recording.recorder import COUNTED
from coa.trajectory import Author, Chain, Trajectory

NAME = "Chain-of-agents trajectories"
PLOT = "funnel.svg"
"""The file of the funnel's plot, beside the card."""
COPY = "copy"
"""In the meta of a chain that up-sampling repeated: the number of the copy."""
OTHER_TASKS = "other tasks"
EXPERTS = "experts"
"""The teacher whose sentences are ours to license."""
_EXAMPLE = 1600
"""Longest example in characters."""
_LONGEST = 40
"""Most rows of a table of families."""
_SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M")
"""The hub's words for a number of rows, each for ten times as many as the one before."""
_TEXTS = read_toml(Path(__file__).with_name("card.toml"))


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
    front = _TEXTS["front_matter"].format(
        name=NAME,
        licences="\n".join(
            f"- {each}" for each in (["unknown"] if others_asked or others_wrote else licences)
        ),
        language="" if others_asked else "language:\n- en\n",
        size=_SIZES[max(0, min(len(str(len(trajectories))) - 3, 5))],
        grammars="".join(f"- grammar-{name}\n" for name in sorted(grammars)),
    )
    sections = (
        _TEXTS["head"].format(name=NAME, rows=len(trajectories), distinct=len(distinct)),
        _counts(trajectories, chains, making.unjudged),
        _how(making),
        _section("Funnel", f"![What entered and left each stage]({PLOT})", markdown(stages)),
        _lengths(chains, making),
        _agents(chains),
        _mistakes(chains),
        _sources(distinct),
        _example(chains),
        _TEXTS["format"],
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
    metas = [chain.trajectory.meta for chain in chains]
    totals = {
        name: sum(count for meta in metas if isinstance(count := meta.get(name, 0), int))
        for name in COUNTED
    }
    rows = [(name.replace("_", " "), count) for name, count in totals.items() if count]
    table = markdown_table(("in the chains kept", "count"), rows)
    return _section("Mistakes and critics", table, _TEXTS["mistakes"]) if rows else ""


def _sources(distinct: Sequence[Trajectory]) -> str:
    """How many chains there are of each set, of what environments group by, and of each teacher."""
    groups: dict[str, list[object]] = {"task set": [set_of(each) for each in distinct]}
    for key in dict.fromkeys(k for each in distinct for k in shipped_home(each.meta).groups):
        groups[key] = [each.meta.get(key) for each in distinct]
    groups["split"] = [each.meta.get("split") for each in distinct]
    groups["teacher"] = [each.weights or "not stated" for each in distinct]
    tables = []
    for title, names in groups.items():
        shown = _most_common(str(name) for name in names if name is not None)
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
    others = [_TEXTS["licences"]["questions"]] * others_asked
    others += [_TEXTS["licences"]["teachers"]] * others_wrote
    own = f"Chains{whose}: Apache-2.0."
    return _section("Licences", own, *(each.text for each in terms), *others)


def _limits(distinct: Sequence[Trajectory], terms: Sequence[Terms], unjudged: int) -> str:
    """What not to conclude from it."""
    texts = _TEXTS["limits"]
    lines = [texts["judged"]] if len(distinct) > unjudged else []
    lines += [texts["unjudged"].format(unjudged)] if unjudged else []
    lines += [texts["experts"]] if any(each.weights == EXPERTS for each in distinct) else []
    lines += [each.limits for each in terms if each.limits]
    return _section("Limits", [*lines, texts["words"]])


def _most_common(names: Iterable[str]) -> list[tuple[str, int]]:
    """How often each is there, from common to rare, then by name: not by who came first."""
    return sorted(Counter(names).items(), key=lambda item: (-item[1], item[0]))


def _flat(settings: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{at}{name}.")
        else:
            yield f"{at}{name}", json.dumps(portable(value), ensure_ascii=False)
