"""Engines: the protocol, and one module per kind of model behind it."""

from __future__ import annotations

from typing import Any, Literal, get_args

from coa.engines.base import Completion, Engine, Sampling
from coa.errors import ConfigError, MissingExtra

Dialect = Literal["blocks", "tools"]
DIALECTS: tuple[Dialect, ...] = get_args(Dialect)

__all__ = [
    "DIALECTS",
    "Completion",
    "Dialect",
    "Engine",
    "Sampling",
    "load_engine",
    "rollouts_at_once",
    "slots_for",
]


def slots_for(rollouts: int) -> int:
    """Slots for so many rollouts at once: a few more, so that one whose tool runs keeps its own."""
    return rollouts + rollouts // 4


def rollouts_at_once(engine: Engine, wanted: int) -> int:
    """At most as many as keep their keys and values: more would only push out each other's."""
    return min(wanted, getattr(engine, "slots", wanted))


def load_engine(ref: str, *, dialect: Dialect = "blocks", **options: Any) -> Engine:
    """The engine for a model reference; what it needs is imported only now.

    `dialect` is how the model is spoken to: in blocks of the grammar, or, of a chat model on a
    server, in its native tool-calling format ('tools').

    Options of a local model: dtype ('auto', 'bfloat16', 'float32'), deterministic, slots (at most
    16 are used when deterministic), context, threads, memory_gb (most for keys and values; a
    quarter of the machine's by default), guess (see `batch.py`), weights ('full'; 'int8' rounds
    them where few rows are computed; 'auto' does so where it can), note (gets a line when a slower
    path is taken). Of one on a server: tokenizer, slots, context, timeout_s, retries, note.
    """
    from coa.models.references import resolve

    source = resolve(ref)
    _check_threads(ref, source.kind, options.get("threads"))
    if dialect == "tools":
        from coa.engines.tool_calls import ToolCallEngine

        if source.kind != "openai":
            raise ConfigError(
                f"--dialect tools: {ref} is asked in this process and has no messages; expected a "
                "chat model on a server, openai:NAME@URL."
            )
        return ToolCallEngine(ref, **options)
    if source.kind == "scripted":
        from coa.engines.scripted import ScriptedEngine

        assert source.path is not None
        return ScriptedEngine.from_file(source.path)
    if source.kind == "openai":
        from coa.engines.openai import OpenAIEngine

        return OpenAIEngine(ref, **options)
    try:
        import torch  # noqa: F401
    except ImportError as exc:
        raise MissingExtra(f"Model {ref!r}", "train") from exc
    from coa.engines.local import LocalEngine

    return LocalEngine(ref, **options)


def _check_threads(ref: str, kind: str, threads: int | None) -> None:
    if threads is not None and threads < 1:
        raise ConfigError(f"threads is {threads}, expected at least 1.")
    if threads is not None and kind != "local":
        raise ConfigError(f"threads is {threads}, and {ref} does not compute here: leave it out.")
