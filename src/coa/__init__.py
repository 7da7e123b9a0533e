"""coa: turn a multi-agent system into one model.

The public names, loaded when they are first used, so that `import coa` is quick and needs no torch:

    from coa import Task, Toolbox, load_engine, load_grammar, run, tool
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors; a test holds it equal to _HOMES
    from coa.distill.convert import NotConvertible, convert
    from coa.distill.filters import FilterSettings
    from coa.distill.stage import DistillSettings, run_distillation
    from coa.engines import Completion, Engine, Sampling, load_engine
    from coa.engines.scripted import ScriptedEngine
    from coa.environment import Environment, load_environment, open_environments
    from coa.errors import CoaError
    from coa.evaluate.stage import EvalSettings, run_eval
    from coa.protocol import (
        Block,
        Fault,
        Grammar,
        Role,
        Splitter,
        grammar_from_toml,
        load_grammar,
        parse,
        system_prompt,
    )
    from coa.rewards import exact, f1
    from coa.runtime import Budget, Decoding, Rollout, run
    from coa.tasks import Task, TaskSet, make_tasks
    from coa.teachers import Teacher, load_teacher
    from coa.teachers.episode import AgentSpec, Episode, ModelCall, Say, Use, load_episodes
    from coa.teachers.stage import Recording, run_recording
    from coa.tools import Observation, Tool, Toolbox, ToolCall, ToolMistake, tool
    from coa.tools.functions import State
    from coa.tools.sources import corpus_tools, sandbox
    from coa.trajectory import Author, Segment, Step, StopReason, Trajectory, load_trajectories

__version__ = "0.1.0"

_HOMES = {
    "coa.errors": "CoaError",
    "coa.trajectory": "Author Segment Step StopReason Trajectory load_trajectories",
    "coa.protocol": "Block Fault Grammar Role Splitter grammar_from_toml load_grammar parse "
    "system_prompt",
    "coa.tasks": "Task TaskSet make_tasks",
    "coa.engines": "Completion Engine Sampling load_engine",
    "coa.engines.scripted": "ScriptedEngine",
    "coa.tools": "Observation Tool ToolCall ToolMistake Toolbox tool",
    "coa.tools.functions": "State",
    "coa.tools.sources": "corpus_tools sandbox",
    "coa.environment": "Environment load_environment open_environments",
    "coa.runtime": "Budget Decoding Rollout run",
    "coa.rewards": "exact f1",
    "coa.teachers": "Teacher load_teacher",
    "coa.teachers.episode": "AgentSpec Episode ModelCall Say Use load_episodes",
    "coa.teachers.stage": "Recording run_recording",
    "coa.distill.convert": "NotConvertible convert",
    "coa.distill.filters": "FilterSettings",
    "coa.distill.stage": "DistillSettings run_distillation",
    "coa.evaluate.stage": "EvalSettings run_eval",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "AgentSpec",
    "Author",
    "Block",
    "Budget",
    "CoaError",
    "Completion",
    "Decoding",
    "DistillSettings",
    "Engine",
    "Environment",
    "Episode",
    "EvalSettings",
    "Fault",
    "FilterSettings",
    "Grammar",
    "ModelCall",
    "NotConvertible",
    "Observation",
    "Recording",
    "Role",
    "Rollout",
    "Sampling",
    "Say",
    "ScriptedEngine",
    "Segment",
    "Splitter",
    "State",
    "Step",
    "StopReason",
    "Task",
    "TaskSet",
    "Teacher",
    "Tool",
    "ToolCall",
    "ToolMistake",
    "Toolbox",
    "Trajectory",
    "Use",
    "convert",
    "corpus_tools",
    "exact",
    "f1",
    "grammar_from_toml",
    "load_engine",
    "load_environment",
    "load_episodes",
    "load_grammar",
    "load_teacher",
    "load_trajectories",
    "make_tasks",
    "open_environments",
    "parse",
    "run",
    "run_distillation",
    "run_eval",
    "run_recording",
    "sandbox",
    "system_prompt",
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
