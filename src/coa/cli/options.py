"""Options that several commands have, settings as options, and how commands print."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import typing
from collections.abc import Callable, Collection, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from coa.errors import UsageError
from coa.io.progress import say
from coa.io.settings import Option

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
SeedOption = Annotated[int, typer.Option(help="Seed of every random choice.")]
SettingsArgument = Annotated[
    list[str] | None, typer.Argument(help="Settings of the environment: env.NAME=value ...")
]
Command = Callable[..., None]
_EMPTY, _MISSING = inspect.Parameter.empty, dataclasses.MISSING


class Late(TyperCommand):
    """A command that gets its options when it is called or asked for help. Settings stand beside
    the work they are for, so whoever lists commands or calls another one imports none of it."""

    def make_context(self, *given: Any, **more: Any) -> Any:
        return self._whole(self.callback).make_context(*given, **more)

    def _whole(self, function: Any) -> Any:
        """The command with all its options."""
        whole = typer.Typer(add_completion=False, rich_markup_mode=None)
        whole.command(self.name)(function.with_options())
        return typer.main.get_command(whole)


def or_with_words(function: Command, usage: str, *flags: str) -> type[Late]:
    """A command in two spellings. With two dashes, or with one of the flags, `function` is called
    instead; what stands behind the dashes is no option of ours, and is the `obj` of its context.
    `--help` shows both spellings."""

    class Either(Late):
        def make_context(self, *given: Any, **more: Any) -> Any:
            name, args = given
            place = args.index("--") if "--" in args else len(args)
            own, words = args[:place], args[place + 1 :]
            if "--help" in own:
                print("\n\n".join([self._help(name, usage, **more), self._help(name, **more)]))
                raise typer.Exit
            if place == len(args) and not any(flag in own for flag in flags):
                return super().make_context(name, own, **more)
            context = self._whole(function).make_context(name, own, **more)
            context.obj = words
            return context

        def _help(self, name: Any, words: str = "", parent: Any = None, **more: Any) -> str:
            whole = self._whole(function if words else self.callback)
            context = whole.context_class(whole, info_name=name, parent=parent)
            first, rest = str(whole.get_help(context)).split("\n", 1)
            return f"{first} {words}".rstrip() + f"\n{rest}"

    return Either


def with_settings(*left_out: str, **settings: str) -> Callable[[Command], Command]:
    """Lets a command take settings: `how="module:Class"` names the dataclass of the parameter
    `how`. Each of its fields that has an `Option` becomes an option, its own settings included, and
    the command gets the value. Fields that are left out keep their defaults. What this returns is
    for `app.command(cls=Late)`."""

    def changed(command: Command) -> Command:
        @functools.wraps(command)
        def late() -> None:
            raise AssertionError(f"{command.__name__} is registered without cls=Late")

        del late.__wrapped__
        late.__annotations__ = {}
        late.with_options = lambda: _with_options(command, settings, left_out)  # type: ignore[attr-defined]
        return late

    return changed


def _with_options(command: Command, settings: dict[str, str], left_out: Collection[str]) -> Command:
    """The command with the fields of its settings as parameters."""
    kinds: dict[str, Any] = {}
    for name, where in settings.items():
        module, _, found = where.partition(":")
        kinds[name] = getattr(import_module(module), found)
    own = {n: a for n, a in command.__annotations__.items() if n not in (*kinds, "return")}
    hints = typing.get_type_hints(
        SimpleNamespace(__annotations__=own), command.__globals__, include_extras=True
    )
    shown: dict[str, inspect.Parameter] = {}
    for each in inspect.signature(command).parameters.values():
        if each.name in kinds:
            shown |= {p.name: p for p in _options(kinds[each.name], left_out)}
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            shown[each.name] = each.replace(annotation=hints[each.name], kind=kind)

    def called(**given: Any) -> None:
        made = {name: _made(kind, given, left_out) for name, kind in kinds.items()}
        command(**{name: given[name] for name in own}, **made)

    called.__doc__ = command.__doc__
    called.__signature__ = inspect.Signature(list(shown.values()))  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in shown.values()}
    return called


def _fields(settings: Any, left_out: Collection[str]) -> Iterator[tuple[Any, Any, Option | None]]:
    """The fields of settings that are options, or settings themselves, with their types."""
    hints = typing.get_type_hints(settings, include_extras=True)
    for field in dataclasses.fields(settings):
        kind, *notes = typing.get_args(hints[field.name]) or (hints[field.name],)
        option = next((note for note in notes if isinstance(note, Option)), None)
        if field.name not in left_out and (option or dataclasses.is_dataclass(hints[field.name])):
            yield field, kind if option else hints[field.name], option


def _options(settings: Any, left_out: Collection[str]) -> Iterator[inspect.Parameter]:
    for field, kind, option in _fields(settings, left_out):
        if option is None:
            yield from _options(kind, left_out)
            continue
        if field.name == "settings":
            shown: Any = typer.Argument(help=option.help)
        else:
            name = option.name or f"--{field.name.replace('_', '-')}"
            shown = typer.Option(name, help=option.help, min=option.least)
        many = option.many or field.name == "settings"
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if many else _EMPTY if field.default is _MISSING else field.default,
            annotation=Annotated[_words(kind) if many else _word(kind), shown],
        )


def _words(kind: Any) -> Any:
    """The type of several words for a field of this type."""
    return list[Path] | None if typing.get_args(kind)[:1] == (Path,) else list[str] | None


def _word(kind: Any) -> Any:
    """The type of one word on the command line for a field of this type."""
    members = set(typing.get_args(kind) or (kind,))
    return kind if members <= {str, int, float, bool, Path, type(None)} else str


def _made(settings: Any, given: dict[str, Any], left_out: Collection[str]) -> Any:
    values: dict[str, Any] = {}
    for field, kind, option in _fields(settings, left_out):
        found = given.get(field.name)
        if option is None:
            values[field.name] = _made(kind, given, left_out)
        elif field.name == "settings":
            values[field.name] = only_env_settings(found)
        else:
            values[field.name] = tuple(found or ()) if option.many else found
    return settings(**values)


def env_settings(given: list[str] | None) -> tuple[dict[str, Any], list[str]]:
    """The settings `env.NAME=value` among arguments, and the other arguments."""
    from coa.io.settings import read_pairs

    own = [each.removeprefix("env.") for each in given or () if each.startswith("env.")]
    return read_pairs(own), [each for each in given or () if not each.startswith("env.")]


def only_env_settings(given: list[str] | None) -> dict[str, Any]:
    """Settings of environments where a command takes no other arguments."""
    settings, others = env_settings(given)
    if others:
        raise UsageError(f"{others[0]!r} is not a setting; expected env.NAME=value.")
    return settings


def emit(record: Any) -> None:
    """Print one JSON object."""
    print(json.dumps(record, ensure_ascii=False))


note = say
"""Says something that is not a result."""
