"""Tools that a model may call, and the Toolbox that holds those of one rollout."""

from coa.tools.base import Observation, Tool, Toolbox, ToolCall, ToolMistake, tool

__all__ = ["Observation", "Tool", "ToolCall", "ToolMistake", "Toolbox", "tool"]
