"""Grammars from TOML: the presets that ship, and a user's own, through the same door."""

from __future__ import annotations

import json
import re
import tomllib
import unicodedata
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from coa.errors import GrammarError, RecordError, did_you_mean
from coa.grammar.grammar import Grammar, Role, is_block_name
from coa.io.runs import Json, write_atomic

PRESETS = (
    *("mhqa", "web", "code", "afm", "react", "search_r1"),
    *("retool", "webdancer", "reveal"),
)
_TOP = {each.name for each in fields(Grammar)} - {"origin"}
_ROLE = {each.name for each in fields(Role)} - {"name"}


_PLAIN_ROLE = Role("", "answer")
_EMPTY = Grammar("", (replace(_PLAIN_ROLE, name="answer"),), ("answer",))
"""What a file need not say."""


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_NAMES: tuple[str, Callable[[Any], bool]] = ("a list of names", _is_names)
_WANTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "start": _NAMES,
    "next": _NAMES,
    "ratings": _NAMES,
    "pass_score": ("a score from 1 to 4", lambda value: value in (1, 2, 3, 4)),
    "sparing": ("true or false", lambda value: isinstance(value, bool)),
}
"""Settings that are not a string: what is expected, and whether a value is that."""


def load_grammar(reference: str) -> Grammar:
    """A preset by name, or a grammar from a .toml file."""
    if reference in PRESETS:
        return _preset(reference)
    if not reference.endswith(".toml"):
        hint = did_you_mean(reference, PRESETS)
        raise GrammarError(
            f"{reference!r} is not a grammar.{hint} "
            "A grammar of your own is a path ending in .toml."
        )
    path = Path(reference)
    if not path.is_file():
        raise GrammarError(f"{reference}: no such grammar file.")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise GrammarError(f"{reference}: not a text file in UTF-8.") from None
    return grammar_from_toml(text, where=reference)


@cache  # a file is read every time: it may have been edited
def _preset(name: str) -> Grammar:
    text = resources.files("coa.grammar").joinpath(f"presets/{name}.toml").read_text("utf-8")
    return grammar_from_toml(text, where=name)


def grammar_from_toml(text: str, where: str = "grammar") -> Grammar:
    """Build a grammar from TOML text; `docs/protocol.md` has the keys."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise GrammarError(f"{where}: not valid TOML: {exc}.") from None
    _check_settings(where, "", table, _TOP)
    roles = table.get("roles")
    if not isinstance(roles, dict) or not roles:
        raise GrammarError(f"{where}: no roles; add a table [roles.NAME] for each block.")
    built = []
    for name, role in roles.items():
        if not isinstance(role, dict):
            raise GrammarError(f"{where}: roles.{name} must be a table, found {role!r}.")
        _check_settings(where, f"roles.{name}.", role, _ROLE)
        if "kind" not in role:
            raise GrammarError(
                f"{where}: roles.{name} has no kind (think, plan, tool, answer ...)."
            )
        built.append(role | {"name": name})
    return _grammar({"name": Path(where).stem, "start": [], **table, "roles": built})


def _grammar(table: dict[str, Any]) -> Grammar:
    """The grammar of a table whose roles are a list, as `grammars.json` holds it."""

    def frozen(table: dict[str, Any]) -> dict[str, Any]:
        return {key: tuple(v) if isinstance(v, list) else v for key, v in table.items()}

    roles = tuple(Role(**frozen(role)) for role in table["roles"])
    return Grammar(**frozen(table) | {"roles": roles})


def grammar_to_toml(grammar: Grammar, comments: Mapping[str, Sequence[str]] | None = None) -> str:
    """The grammar as a file that `grammar_from_toml` reads. `comments` are lines by what they are
    about: '' is the head; those of `roles.NAME` stand before it, those of a value behind it."""
    said = comments or {}
    table = grammar.record()
    lines = [f"# {line}" for line in said.get("", ())]
    for key, value in table.items():
        said_anyway = key not in ("name", "start") and value == getattr(_EMPTY, key)
        if key not in ("roles", "origin") and not said_anyway:
            lines.append(_line(key, value, said.get(key, ())))
    for role in table["roles"]:
        where = f"roles.{role['name']}"
        lines += ["", *(f"# {line}" for line in said.get(where, ())), f"[{where}]"]
        for key, value in role.items():
            if key != "name" and (key == "kind" or value != getattr(_PLAIN_ROLE, key)):
                lines.append(_line(key, value, said.get(f"{where}.{key}", ())))
    return "\n".join([*lines, ""])


def _line(key: str, value: Any, behind: Sequence[str]) -> str:
    shown = _in_toml(value)
    return f"{key} = {shown}" + "".join(f"  # {line}" for line in behind)


def _in_toml(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_in_toml, value))}]"
    if isinstance(value, str):  # JSON escapes as TOML does, but for one character
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def _check_settings(where: str, prefix: str, table: dict[str, Any], known: set[str]) -> None:
    for key, value in table.items():
        if key not in known:
            raise GrammarError(
                f"{where}: {prefix}{key} is not a setting of a grammar.{did_you_mean(key, known)}"
            )
        if key == "roles":
            continue
        wanted, fits = _WANTED.get(key, ("a string", lambda value: isinstance(value, str)))
        if not fits(value):
            raise GrammarError(f"{where}: {prefix}{key} is {value!r}; expected {wanted}.")


def bound_to(grammar: Grammar, tools: Sequence[str]) -> Grammar:
    """The grammar with these tools; where none is named, as it is.

    Tools that the grammar knows keep what it says of them. Of others a record has no more than the
    name, so their blocks are plain text.
    """
    return grammar.with_tools([Role(name, "tool") for name in tools]) if tools else grammar


def block_names(
    names: Iterable[str], taken: Container[str], prefix: str = "call"
) -> dict[str, str]:
    """The block of each tool whose own name cannot be one: `Math.Hypot` becomes `math_hypot`, and
    what has no letter that a block's name may have is numbered.

    No two are the same, and none is taken.
    """
    found: dict[str, str] = {}
    for name in names:
        letters = unicodedata.normalize("NFKD", name.lower())
        plain = "".join(each for each in letters if not unicodedata.combining(each))
        block = re.sub(r"[^a-z0-9_]+", "_", plain).strip("_")
        if block and (not is_block_name(block) or block in taken):
            block = f"{prefix}_{block}"
        free = block or f"{prefix}_{len(found) + 1}"
        while free in found.values() or free in taken:
            free += "_2"
        found[name] = free
    return found


GRAMMARS = "grammars.json"


class GrammarBook:
    """Grammars by fingerprint, not bound to any tools.

    A trajectory carries the fingerprint of its grammar and the names of its tools. The grammar
    itself is stored once beside the dataset, the adapter or the run (`grammars.json`), so that
    nobody has to guess it from a name. Files from before there were fingerprints name a preset,
    which is looked up.
    """

    def __init__(self, grammars: Iterable[Grammar] = ()) -> None:
        self._known = {grammar.unbound_id: grammar for grammar in grammars}
        self._bound: dict[tuple[str, tuple[str, ...]], Grammar] = {}

    @classmethod
    def beside(cls, path: Path) -> GrammarBook:
        """The grammars that are stored in a folder, or in the folder of a file."""
        stored = (path if path.is_dir() else path.parent) / GRAMMARS
        if not stored.is_file():
            return cls()
        try:
            return cls.from_json(json.loads(stored.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as exc:
            raise RecordError(
                f"{stored}: not a file of grammars ({exc}). Expected what coa writes there."
            ) from None

    def save(self, folder: Path) -> None:
        """Store the grammars in a folder, with those that are there already."""
        held = GrammarBook.beside(folder)
        held._known |= self._known
        write_atomic(folder / GRAMMARS, json.dumps(held.to_json(), indent=1) + "\n")

    def to_json(self) -> Json:
        """The grammars by fingerprint, as JSON has them: lists, no tuples."""
        known = {name: grammar.record() for name, grammar in sorted(self._known.items())}
        plain: Json = json.loads(json.dumps(known))
        return plain

    @classmethod
    def from_json(cls, record: Json) -> GrammarBook:
        book = cls()
        book._known = {name: _grammar(value) for name, value in record.items()}
        return book

    def add(self, grammar: Grammar) -> None:
        self._known.setdefault(grammar.unbound_id, grammar)

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
            "folder that it was written in; one from before 0.2 has to be made again."
        )
