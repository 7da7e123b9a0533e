"""The Atlas: questions over an encyclopedia of facts, real or of an invented world.

`atlas-mhqa`, `atlas-reworded` and `atlas-wide` are look-ups of passages, `atlas-web` reads pages,
`atlas-code` computes with what it looked up. The facts that a task is about are those of its world.
"""

from __future__ import annotations

from coa.environment import Environment, Terms
from coa.environments.search import check_any_corpus, named_by, reading_tools, world_of
from coa.tasks import Task, TaskSet
from coa.tools.sources import ToolSource

LICENCES = """\
Facts of the Atlas come from GeoNames (*contains information from GeoNames, geonames.org, licensed
under [CC BY 4.0](https://creativecommons.org/licenses/by/4.0/); numbers rounded, names spelled in
ASCII*), Unicode CLDR (Unicode License v3, copyright Unicode, Inc.,
<https://www.unicode.org/license.txt>), the CIA World Factbook (public domain), and the packages
countryinfo and mendeleev (MIT). All sentences of the Atlas are the project's own. Invented worlds
use invented names."""
PLACES = """\
- Statements about places are those of the sources; some are disputed, some will be out of date."""
TERMS = Terms(LICENCES, ("cc-by-4.0",), PLACES)
GROUPS = ("family", "hops", "phrasing_heldout", "world", "level")
FIRST = "atlas-mhqa"
"""Its tasks name no set, so their tools follow the grammar that they are answered in."""
SPLITS = {"train": "train", "test": "heldout_entity"}
_Kind = tuple[str, tuple[str, ...]]
_LOOKUPS: _Kind = ("mhqa", ("wiki_search",))
_KINDS: dict[str, _Kind] = {
    "atlas-web": ("web", ("web_search", "crawl_page")),
    "atlas-code": ("afm", ("wiki_search", "code")),
}
"""Set -> its grammar and its tools; the others are look-ups."""


def atlas(
    name: str,
    grammar: str = "",
    corpus: str = "",
    passages: int = 0,
    n: int = 200,
    seed: int = 0,
    world: int = 0,
    families: str = "",
) -> Environment:
    """A set of the Atlas. `n`, `seed`, `world` and `families` say which tasks it makes; `corpus`
    stands in for the Atlas."""
    usual, named = _KINDS.get(name, _LOOKUPS)
    if grammar and name == FIRST:
        named = named_by(grammar)
    if corpus:
        check_any_corpus(corpus)

    def tools(task: Task) -> list[ToolSource]:
        return reading_tools(named, corpus, passages, world_of(task, world))

    def tasks(split: str) -> TaskSet:
        from coa.environments import make_tasks

        chosen = [each.strip() for each in families.split(",") if each.strip()] or None
        return make_tasks(
            name, SPLITS.get(split, split), n, seed, world_seed=world, families=chosen
        )

    return Environment(
        name,
        tools=tools,
        grammar=grammar or usual,
        tasks=tasks,
        teacher="experts",
        groups=GROUPS,
        terms=TERMS,
        settings={"grammar": grammar},
    )
