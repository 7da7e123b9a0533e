"""Options that several commands have, and how they print."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coa.errors import UsageError
from coa.io.progress import say

if TYPE_CHECKING:
    from coa.environment import ToolSettings


JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
SeedOption = Annotated[int, typer.Option(help="Seed of every random choice.")]
GrammarOption = Annotated[
    str, typer.Option(help="Preset name or a .toml file; auto is what the model was trained on.")
]
ConstrainFlag = Annotated[
    bool, typer.Option("--constrain", help="Sample only what the grammar allows.")
]
ModelOption = Annotated[str, typer.Option(help="Model reference; see `coa model list`.")]
UnsafeFlag = Annotated[bool, typer.Option("--unsafe-code", help="Run programs WITHOUT a sandbox.")]
EnvOption = Annotated[
    list[str] | None,
    typer.Option("--env", help="Environment: a folder, file, module:attribute, or a shipped name."),
]
SettingsArgument = Annotated[
    list[str] | None, typer.Argument(help="Settings of the environment: env.NAME=value ...")
]
CorpusOption = Annotated[
    str, typer.Option(help="A corpus directory, or a .toml for the web, instead of the Atlas.")
]
CacheOption = Annotated[str, typer.Option(help="File of recorded answers of tools.")]
ModeOption = Annotated[str, typer.Option(help="live, record or replay; the latter need the file.")]
ExpireOption = Annotated[
    float | None, typer.Option(help="Recording: ask again for answers older than so many days.")
]
SessionFlag = Annotated[
    bool, typer.Option("--code-session", help="Programs of a rollout share their variables.")
]


def tool_settings(
    corpus: str, cache: str, mode: str, expire: float | None, session: bool, unsafe: bool
) -> ToolSettings:
    from coa.environment import ToolSettings

    return ToolSettings(
        corpus=corpus,
        cache=cache,
        mode=mode,
        expire_days=expire,
        code_session=session,
        unsafe_code=unsafe,
    )


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
