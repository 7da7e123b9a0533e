"""`search`: questions of one's own, answered by searching the Atlas, a corpus or the web.

Its tools are those that its grammar names: passages for `mhqa`, pages for `web`, programs for
`code`. Tasks that bring declarations of tools along (a benchmark of function calls) get these.
"""

from __future__ import annotations

from collections.abc import Sequence

from coa.environment import Environment, ToolSettings
from coa.environments.atlas.pages import any_corpus
from coa.errors import RecordError
from coa.grammar import load_grammar
from coa.tasks import Task
from coa.tools.functions import declared_tools
from coa.tools.sources import (
    READING,
    CorpusTools,
    ToolSource,
    WebTools,
    corpus_tools,
    is_web,
    sandbox_tools,
    web_settings,
)
from coa.tools.web import PASSAGES

GROUPS = ("family", "hops", "level", "set")


def search(grammar: str = "", corpus: str = "", passages: int = 0, world: int = 0) -> Environment:
    """Questions over the Atlas of a world, unless `corpus` names a corpus or the web."""
    chosen = grammar or "mhqa"
    known = named_by(chosen)
    if corpus:
        check_any_corpus(corpus)

    def tools(task: Task) -> list[ToolSource]:
        if "tools" in task.meta:
            return declared_tools(task)  # type: ignore[return-value]
        return reading_tools(known, corpus, passages, world_of(task, world))

    def remark(tasks: Sequence[Task], how: ToolSettings) -> str:
        """A line on tasks of other sets, a benchmark's for instance, whose tools look into the
        Atlas because nobody named a corpus; empty where there are none."""
        if corpus or how.mode == "replay" or how.observations != "real" or known == ("code",):
            return ""
        named = (str(t.meta["set"]) for t in tasks if "set" in t.meta and "tools" not in t.meta)
        found = ", ".join(sorted(set(named)))
        return f"{found}: without --corpus the tools of these tasks search the Atlas" * bool(found)

    return Environment(
        "search",
        tools=tools,
        grammar=chosen,
        groups=GROUPS,
        remark=remark,
        settings={"grammar": grammar},
    )


def check_any_corpus(name: str) -> None:
    """Say what is wrong with the name of a corpus before any work."""
    if is_web(name):
        web_settings(name)
    else:
        any_corpus(name)


def named_by(grammar: str) -> tuple[str, ...]:
    """The tools that a grammar names, of those that there are; passages where it names none."""
    value = load_grammar(grammar)
    named = [value.by_name[role].tool or role for role in value.tool_roles]
    return tuple(name for name in named if name in (*READING, "code")) or ("wiki_search",)


def reading_tools(
    names: tuple[str, ...], corpus: str, passages: int, world: int
) -> list[ToolSource]:
    """Sources of the tools of these names, in their order."""
    reading = tuple(name for name in names if name in READING)
    made: list[ToolSource] = []
    if reading and is_web(corpus):
        # NOTE: where a grammar names wiki_search beside the tools of the web, the web has the rest.
        rest = tuple(name for name in reading if name != "wiki_search") or reading
        made.append(WebTools(corpus, rest))
    elif reading:
        made += _over_corpus(reading, corpus, passages or PASSAGES, world)
    if "code" in names:
        made.append(sandbox_tools())
    order = {name: at for at, name in enumerate(names)}
    return sorted(made, key=lambda each: min(order[n] for n in getattr(each, "tools", ("code",))))


def _over_corpus(
    names: tuple[str, ...], corpus: str, passages: int, world: int
) -> list[ToolSource]:
    if corpus and not corpus.startswith("atlas"):
        return [corpus_tools(corpus, *names, passages=passages)]
    held = any_corpus(corpus or f"atlas:{world}")
    return [CorpusTools(held, names, passages)]


def world_of(task: Task, usual: int = 0) -> int:
    """The world of the Atlas that a task is about."""
    world = str(task.meta.get("world", usual))
    if not world.isdecimal():
        raise RecordError(f"task {task.id}: world is {world!r}, expected the number of one.")
    return int(world)
