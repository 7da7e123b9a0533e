"""GrammarBook: the grammars that trajectories were written in, by fingerprint.

A trajectory carries the fingerprint of its grammar and the names of its tools. The grammar itself
is stored once beside the dataset, the adapter or the run (`grammars.json`), so that nobody has to
guess it from a name. Files from before there were fingerprints name a preset, which is looked up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coa.errors import GrammarError, RecordError
from coa.protocol.bound import bound_to
from coa.protocol.grammar import Grammar, Role
from coa.protocol.load import PRESETS, load_grammar
from coa.runs import Json, write_atomic

GRAMMARS = "grammars.json"


class GrammarBook:
    """Grammars by fingerprint, not bound to any tools."""

    def __init__(self, grammars: Iterable[Grammar] = ()) -> None:
        self._known = {grammar.unbound_id: grammar for grammar in grammars}
        self._bound: dict[tuple[str, tuple[str, ...]], Grammar] = {}

    @classmethod
    def beside(cls, path: Path) -> GrammarBook:
        """The grammars that are stored in a folder, or in the folder of a file."""
        book = cls()
        book.read(path)
        return book

    def read(self, path: Path) -> None:
        """Add what is stored in a folder, or in the folder of a file."""
        stored = (path if path.is_dir() else path.parent) / GRAMMARS
        if not stored.is_file():
            return
        try:
            held = json.loads(stored.read_text(encoding="utf-8"))
            self._known |= GrammarBook.from_json(held)._known
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as exc:
            raise RecordError(
                f"{stored}: not a file of grammars ({exc}). Expected what coa writes there."
            ) from None

    def save(self, folder: Path) -> None:
        """Store the grammars in a folder, with those that are there already."""
        held = GrammarBook.beside(folder)._known | self._known
        text = json.dumps(_plain(held), indent=1)
        write_atomic(folder / GRAMMARS, text + "\n")

    def to_json(self) -> Json:
        """The grammars by fingerprint."""
        return _plain(self._known)

    @classmethod
    def from_json(cls, record: Json) -> GrammarBook:
        book = cls()
        book._known = {name: grammar_from_json(value) for name, value in record.items()}
        return book

    def add(self, grammar: Grammar) -> str:
        """Keep a grammar; its fingerprint."""
        self._known.setdefault(grammar.unbound_id, grammar)
        return grammar.unbound_id

    def __iter__(self) -> Iterator[Grammar]:
        return iter(self._known.values())

    def __len__(self) -> int:
        return len(self._known)

    def fingerprint(self) -> str:
        """Of all of them, in their order."""
        return "+".join(self._known)

    @property
    def names(self) -> list[str]:
        return sorted({grammar.name for grammar in self})

    def check_names(self, where: str) -> None:
        """Refuse two grammars of one name: whoever reads the name would take one for the other."""
        seen: dict[str, str] = {}
        for fingerprint, grammar in self._known.items():
            if seen.setdefault(grammar.name, fingerprint) != fingerprint:
                raise RecordError(
                    f"{where}: holds two definitions of the grammar {grammar.name!r} "
                    f"({seen[grammar.name]} and {fingerprint}). Rename one and distil it again."
                )

    def bound(self, name: str, fingerprint: str, tools: Sequence[str]) -> Grammar:
        """A grammar with the tools that a trajectory names."""
        key = (fingerprint or name, tuple(tools))
        if key not in self._bound:
            self._bound[key] = bound_to(self.find(name, fingerprint), tools)
        return self._bound[key]

    def find(self, name: str, fingerprint: str = "") -> Grammar:
        """A grammar by its fingerprint; by its name in files that have no fingerprint."""
        if fingerprint in self._known:
            return self._known[fingerprint]
        named = [grammar for grammar in self if grammar.name == name]
        if len(named) == 1 and not fingerprint:
            return named[0]
        if name in PRESETS:
            preset = load_grammar(name)
            if fingerprint in ("", preset.fingerprint()):
                return preset
        raise GrammarError(
            f"the grammar {name!r}{f' ({fingerprint})' if fingerprint else ''} is not stored "
            f"beside the file ({GRAMMARS}), and is no preset of this version. Keep the file in the "
            "folder that it was written in."
        )


def _plain(known: Mapping[str, Grammar]) -> Json:
    return {name: json.loads(json.dumps(asdict(value))) for name, value in sorted(known.items())}


def grammar_from_json(value: Json) -> Grammar:
    """A grammar as `grammars.json` holds it."""
    fields: list[dict[str, Any]] = [
        {k: tuple(v) if isinstance(v, list) else v for k, v in role.items()}
        for role in value["roles"]
    ]
    roles = tuple(Role(**each) for each in fields)
    rest = {k: v for k, v in value.items() if k not in ("roles", "start")}
    return Grammar(roles=roles, start=tuple(value["start"]), **rest)
