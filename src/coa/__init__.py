"""coa: turn a multi-agent system into one model.

The public names, loaded when they are first used, so that `import coa` is quick and needs no torch:

    from coa import Environment, Task, distill, evaluate, record, rl, serve, sft, tool
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; a test holds it equal to _HOMES
    from coa.api import ask, compare, distill, evaluate, improve, record, rl, serve, sft
    from coa.engines import load_engine
    from coa.engines.scripted import ScriptedEngine
    from coa.environment import Environment, load_environment
    from coa.errors import CoaError
    from coa.grammar import Grammar, load_grammar
    from coa.loop import run
    from coa.recording.episode import AgentSpec, Episode, Message, ModelCall, ToolUse
    from coa.tasks import Task
    from coa.tools import Tool, ToolCall, ToolMistake, tool
    from coa.tools.functions import State
    from coa.tools.mcp import mcp
    from coa.tools.sources import corpus_tools, sandbox_tools
    from coa.trajectory import Trajectory, load_trajectories

__version__ = "0.2.0"

_HOMES = {
    "coa.api": "ask compare distill evaluate improve record rl serve sft",
    "coa.engines": "load_engine",
    "coa.engines.scripted": "ScriptedEngine",
    "coa.environment": "Environment load_environment",
    "coa.errors": "CoaError",
    "coa.grammar": "Grammar load_grammar",
    "coa.loop": "run",
    "coa.recording.episode": "AgentSpec Episode Message ModelCall ToolUse",
    "coa.tasks": "Task",
    "coa.tools": "Tool ToolCall ToolMistake tool",
    "coa.tools.functions": "State",
    "coa.tools.mcp": "mcp",
    "coa.tools.sources": "corpus_tools sandbox_tools",
    "coa.trajectory": "Trajectory load_trajectories",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "AgentSpec",
    "CoaError",
    "Environment",
    "Episode",
    "Grammar",
    "Message",
    "ModelCall",
    "ScriptedEngine",
    "State",
    "Task",
    "Tool",
    "ToolCall",
    "ToolMistake",
    "ToolUse",
    "Trajectory",
    "ask",
    "compare",
    "corpus_tools",
    "distill",
    "evaluate",
    "improve",
    "load_engine",
    "load_environment",
    "load_grammar",
    "load_trajectories",
    "mcp",
    "record",
    "rl",
    "run",
    "sandbox_tools",
    "serve",
    "sft",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'coa' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
