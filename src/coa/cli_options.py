"""Options that several commands have, and how they print."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from coa.tools.kits import KitSettings

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


def kit_of(
    corpus: str, cache: str, mode: str, expire: float | None, session: bool, unsafe: bool
) -> KitSettings:
    from coa.tools.kits import KitSettings

    return KitSettings(
        corpus=corpus,
        cache=cache,
        mode=mode,
        expire_days=expire,
        code_session=session,
        unsafe_code=unsafe,
    )


def emit(record: Any) -> None:
    """Print one JSON object."""
    print(json.dumps(record, ensure_ascii=False))


def note(line: str) -> None:
    """Say something that is not a result."""
    print(line, file=sys.stderr)
