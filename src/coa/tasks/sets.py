"""What belongs to a task set: the grammar its tasks are made for, their tools and their reward.

Tasks without a set (a CSV of one's own) are treated like questions over an encyclopedia.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coa.errors import ConfigError
from coa.tasks.task import Task


@dataclass(frozen=True, slots=True)
class SetKind:
    grammar: str
    tools: tuple[str, ...]
    reward: str = "exact"


DEFAULT_SET = "atlas-mhqa"
ATLAS_REWORDED, ATLAS_WIDE = "atlas-reworded", "atlas-wide"
ATLAS_WEB, ATLAS_CODE, GYM = "atlas-web", "atlas-code", "gym-code"
KINDS = {
    DEFAULT_SET: SetKind("mhqa", ("wiki_search",)),
    ATLAS_REWORDED: SetKind("mhqa", ("wiki_search",)),
    ATLAS_WIDE: SetKind("mhqa", ("wiki_search",)),
    ATLAS_WEB: SetKind("web", ("web_search", "crawl_page")),
    ATLAS_CODE: SetKind("afm", ("wiki_search", "code")),
    GYM: SetKind("code", ("code",), "gym"),
}


def kind_of(task: Task) -> SetKind:
    """The kind of a task's set."""
    return KINDS.get(str(task.meta.get("set", DEFAULT_SET)), KINDS[DEFAULT_SET])


def grammar_of(task: Task) -> str:
    """The grammar that a task is made for: what it names itself, or its set's."""
    return str(task.meta.get("grammar") or kind_of(task).grammar)


def grammar_for(tasks: Iterable[Task]) -> str:
    """The grammar that all these tasks are made for."""
    found = sorted({grammar_of(task) for task in tasks}) or [KINDS[DEFAULT_SET].grammar]
    if len(found) > 1:
        listed = ", ".join(found)
        raise ConfigError(f"the tasks suit several grammars: {listed}. Choose one with --grammar.")
    return found[0]
