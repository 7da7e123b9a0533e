"""Tools that a model may call, and the Toolbox that holds those of one rollout."""

from coa.tools.base import Observation, Tool, Toolbox, ToolCall, ToolMistake
from coa.tools.functions import tool

__all__ = ["Observation", "Tool", "ToolCall", "ToolMistake", "Toolbox", "tool"]
