"""The Atlas as a corpus: its pages under one address, with an index over their passages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from coa.corpus.index import INDEX_VERSION, SearchIndex
from coa.corpus.page import Page
from coa.corpus.site import Corpus
from coa.environments.atlas.pages import SITE, atlas_passages, pages
from coa.environments.atlas.world import load_world
from coa.errors import UsageError


@cache
def atlas_index(seed: int = 0) -> SearchIndex:
    """The index of one world, built once for a process."""
    return SearchIndex.build(atlas_passages(seed), titles_are_names=True)


class _AtlasSite:
    """The pages of a world of the Atlas."""

    def __init__(self, seed: int) -> None:
        self._pages = {page.url.removeprefix(f"{SITE}/"): page for page in pages(load_world(seed))}

    def find(self, keys: Iterable[str]) -> Page | None:
        return next((self._pages[key] for key in keys if key in self._pages), None)

    def pages(self) -> Iterator[Page]:
        return iter(self._pages.values())

    def digest(self) -> str:
        """Of what can be read and how it is found: another release may say it otherwise."""
        made = hashlib.sha256(str(INDEX_VERSION).encode())
        for page in self._pages.values():
            made.update(repr(page).encode())
        return made.hexdigest()[:16]


@cache
def atlas_corpus(seed: int = 0) -> Corpus:
    """The Atlas of a world as a corpus; its index is the one that `atlas_index` keeps."""
    site = _AtlasSite(seed)
    return Corpus(atlas_index(seed), site, SITE, f"atlas:{seed}:{site.digest()}")


def any_corpus(name: str) -> Corpus:
    """The corpus that a command names: `atlas`, `atlas:K` for world K, or a corpus directory."""
    kind, _, world = name.partition(":")
    if kind == "atlas" and (not world or world.isdecimal()):
        return atlas_corpus(int(world or 0))
    if not Path(name).is_dir():
        raise UsageError(
            f"corpus {name!r}: expected atlas, atlas:K for world K, or the directory of a corpus "
            "made with: coa corpus build FOLDER"
        )
    return Corpus.open(Path(name))
