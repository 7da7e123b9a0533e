"""Grammars from TOML: the presets that ship, and a user's own, through the same door."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from coa.errors import GrammarError, did_you_mean
from coa.protocol.grammar import Grammar, Role

PRESETS = ("mhqa", "web", "code", "afm", "react", "search_r1")
_TOP = {"name", "roles", "start", "interleave", "observation", "preamble", "brief"}
_ROLE = {"kind", "next", "about", "hint", "body", "tool", "ratings", "pass_score"}


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_NAMES: tuple[str, Callable[[Any], bool]] = ("a list of names", _is_names)
_WANTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "start": _NAMES,
    "next": _NAMES,
    "ratings": _NAMES,
    "pass_score": ("a score from 1 to 4", lambda value: value in (1, 2, 3, 4)),
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
    text = resources.files("coa.protocol").joinpath(f"presets/{name}.toml").read_text("utf-8")
    return grammar_from_toml(text, where=name)


def grammar_from_toml(text: str, where: str = "grammar") -> Grammar:
    """Build a grammar from TOML text; `docs/protocol.md` has the keys."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise GrammarError(f"{where}: not valid TOML: {exc}.") from None
    _known(where, "", table, _TOP)
    roles = table.get("roles")
    if not isinstance(roles, dict) or not roles:
        raise GrammarError(f"{where}: no roles; add a table [roles.NAME] for each block.")
    built = []
    for name, fields in roles.items():
        if not isinstance(fields, dict):
            raise GrammarError(f"{where}: roles.{name} must be a table, found {fields!r}.")
        _known(where, f"roles.{name}.", fields, _ROLE)
        if "kind" not in fields:
            raise GrammarError(
                f"{where}: roles.{name} has no kind (think, plan, tool, answer ...)."
            )
        built.append(Role(name=name, **{key: _frozen(value) for key, value in fields.items()}))
    rest = {key: _frozen(value) for key, value in table.items() if key != "roles"}
    rest.setdefault("name", Path(where).stem)
    rest.setdefault("start", ())
    try:
        return Grammar(roles=tuple(built), **rest)
    except TypeError as exc:
        raise GrammarError(f"{where}: {exc}.") from None


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _known(where: str, prefix: str, table: dict[str, Any], known: set[str]) -> None:
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
