"""Runs a team's program as it is and writes down what the framework's own objects say of the run.

    python witness.py FOLDER PROGRAM QUESTION...

It is the truth that a recording is compared with, so it reads nothing that went over the wire:
smolagents' memory, the messages in LangGraph's state, the new items of the Agents SDK, CrewAI's
events and task outputs, pydantic-ai's messages. The program runs as `__main__`, unchanged; the
calls that return such objects are only listened to. Imported by nobody: it runs where the
frameworks are.

One JSON file for each question: {question, answer, agents: {name: system prompt}, runs: [{agent,
asker, job, report, to}], uses: [{agent, tool, arguments, result}]}. A run is one job that an agent
did; its asker is an agent, or empty for the code of the program. Its report is said to an agent or
to `user`. A job that was handed over without a word is empty.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import hashlib
import io
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Json = dict[str, Any]
SEEN: Json = {"agents": {}, "runs": [], "uses": []}
_asker: contextvars.ContextVar[str] = contextvars.ContextVar("asker", default="")


def ran(agent: str, asker: str, job: str, report: Any, to: str = "") -> None:
    run = {"agent": agent, "asker": asker, "job": job, "report": str(report)}
    SEEN["runs"].append({**run, "to": to or asker or "user"})


def used(agent: str, tool: str, arguments: Any, result: Any) -> None:
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    use = {"agent": agent, "tool": tool, "arguments": arguments, "result": str(result)}
    SEEN["uses"].append(use)


def listen(owner: Any, name: str, heard: Callable[..., None]) -> None:
    """Call `heard` with what a method returned, and its arguments, whenever it is called."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        heard(result, *args, **kwargs)
        return result

    setattr(owner, name, call)


# -- smolagents --------------------------------------------------------------------------------


def smolagents() -> None:
    from smolagents import CodeAgent, FinalAnswerTool, Tool
    from smolagents.agents import MultiStepAgent

    owners: dict[str, str] = {}
    askers: dict[str, str] = {}

    def name_of(agent: Any) -> str:
        return agent.name or "manager"

    def made(_: None, agent: Any, *args: Any, **kwargs: Any) -> None:
        owners.update({tool: name_of(agent) for tool in agent.tools})
        askers.update({each: name_of(agent) for each in agent.managed_agents})

    def has_run(report: Any, agent: Any, task: str, *args: Any, **kwargs: Any) -> None:
        name = name_of(agent)
        SEEN["agents"][name] = agent.memory.system_prompt.system_prompt
        job = re.search(r"\n---\nTask:\n(.*?)\n---\n", task, re.DOTALL)
        ran(name, askers.get(name, ""), job[1] if job else task, report)
        for step in agent.memory.steps:
            if not isinstance(agent, CodeAgent):
                for use in _uses_of(step):
                    if use[0] not in (*askers, "final_answer"):
                        used(name, *use)

    def tool_ran(tool: Any, args: Any, kwargs: Json, result: Any) -> None:
        """The only objects that know what a program called are the tools themselves."""
        if not isinstance(tool, FinalAnswerTool):
            named = dict(zip(tool.inputs, args, strict=False)) | kwargs
            used(owners[tool.name], tool.name, named, result)

    call_tool = Tool.__call__

    def call(tool: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs_of_tool = {k: v for k, v in kwargs.items() if k != "sanitize_inputs_outputs"}
        try:
            result = call_tool(tool, *args, **kwargs)
        except Exception as error:
            tool_ran(tool, args, kwargs_of_tool, error)
            raise
        tool_ran(tool, args, kwargs_of_tool, result)
        return result

    listen(MultiStepAgent, "__init__", made)
    listen(MultiStepAgent, "run", has_run)
    if "CodeAgent" in Path(sys.argv[0]).read_text(encoding="utf-8"):
        Tool.__call__ = call


def _uses_of(step: Any) -> Iterator[tuple[str, Any, str]]:
    """(tool, arguments, result) of a step in a smolagents memory."""
    if getattr(step, "error", None):  # of a step that failed the memory holds what the model wrote
        message = step.model_output_message
        for each in (message.tool_calls or []) if message else []:
            yield each.function.name, each.function.arguments, str(step.error.message)
        return
    calls = getattr(step, "tool_calls", None) or []
    results = [step.observations or ""] if calls else []
    if len(calls) > 1:  # they stand one below the other, in order of the calls
        results = re.sub(r"(from your managed agent '\w+':)\n", r"\1 ", results[0]).split("\n")
        assert len(results) == len(calls), (calls, results)
    for each, result in zip(calls, results, strict=True):
        yield each.name, each.arguments, result


# -- LangGraph ---------------------------------------------------------------------------------


def langgraph() -> None:
    import langchain.agents
    from langgraph.graph.state import CompiledStateGraph

    prompts: dict[str, str] = {}

    def made(_: Any, *args: Any, name: str, system_prompt: str, **kwargs: Any) -> None:
        prompts[name] = system_prompt

    def invoked(state: Json, graph: Any, *args: Any, **kwargs: Any) -> None:
        if graph.name in prompts:  # a node of the whole
            return
        messages = state["messages"]
        results = {m.tool_call_id: m for m in messages if m.type == "tool"}
        jobs: dict[str, str] = {}  # agent -> asker
        for message in messages:
            if message.type != "ai":
                continue
            agent = message.name
            SEEN["agents"][agent] = prompts[agent]
            for call in message.tool_calls:
                target = call["name"].removeprefix("transfer_to_")
                if target in graph.nodes:
                    jobs[target] = agent
                else:
                    used(agent, call["name"], call["args"], results[call["id"]].content)
            if not message.tool_calls:
                ran(agent, jobs.pop(agent, ""), "", message.content)

    listen(langchain.agents, "create_agent", made)
    listen(CompiledStateGraph, "invoke", invoked)


# -- OpenAI Agents SDK -------------------------------------------------------------------------


def agents_sdk() -> None:
    from agents.items import (
        HandoffOutputItem,
        MessageOutputItem,
        ToolCallItem,
        ToolCallOutputItem,
    )
    from agents.run import AgentRunner

    run = AgentRunner.run
    inner: list[tuple[str, str]] = []
    """(asker, agent) of runs inside a tool."""

    async def listened(self: Any, starting_agent: Any, input: Any, **kwargs: Any) -> Any:
        asker = _asker.get()
        token = _asker.set("a tool")
        result = await run(self, starting_agent, input, **kwargs)
        _asker.reset(token)
        results = {
            item.raw_item["call_id"]: item.output
            for item in result.new_items
            if isinstance(item, ToolCallOutputItem)
        }
        agent, came_from, job, to = starting_agent, asker, input, asker
        SEEN["agents"][agent.name] = agent.instructions
        for item in result.new_items:
            if isinstance(item, HandoffOutputItem):
                # Who hands over does not wait: the answer goes to whoever asked in the beginning.
                came_from, job, agent = item.source_agent.name, "", item.target_agent
                to = asker or "user"
                SEEN["agents"][agent.name] = agent.instructions
            elif isinstance(item, ToolCallItem):
                call = item.raw_item
                if (tool := _agent_of_tool(item.agent, call.name)) is not None:
                    inner.append((item.agent.name, tool))
                else:
                    used(item.agent.name, call.name, call.arguments, results[call.call_id])
            elif isinstance(item, MessageOutputItem):
                assert item.agent.name == agent.name
        # Inside a tool, the asker is known when the outer run is over.
        ran(agent.name, came_from, str(job), result.final_output, to)
        if not asker:
            for each in SEEN["runs"]:
                if each["asker"] == "a tool":
                    asked_by = next(a for a, name in inner if name == each["agent"])
                    each.update(asker=asked_by, to=asked_by)
        return result

    AgentRunner.run = listened


def _agent_of_tool(agent: Any, name: str) -> str | None:
    """The agent that a tool asks, where it is one."""
    tool = next(each for each in agent.tools if each.name == name)
    inside = getattr(tool, "_agent_instance", None)
    return inside.name if inside is not None else None


# -- CrewAI ------------------------------------------------------------------------------------


def crewai() -> None:
    from crewai import Crew
    from crewai.events import crewai_event_bus
    from crewai.events.types.tool_usage_events import ToolUsageErrorEvent, ToolUsageFinishedEvent

    @crewai_event_bus.on(ToolUsageFinishedEvent)
    def finished(_: Any, event: Any) -> None:
        used(event.agent_role, event.tool_name, event.tool_args, event.output)

    @crewai_event_bus.on(ToolUsageErrorEvent)
    def failed(_: Any, event: Any) -> None:
        used(event.agent_role, event.tool_name, event.tool_args, event.error)

    def kicked_off(result: Any, crew: Any, *args: Any, **kwargs: Any) -> None:
        crewai_event_bus.flush()
        for agent in crew.agents:
            SEEN["agents"][agent.role] = f"Your personal goal is: {agent.goal}"
        for task in crew.tasks:
            for before in task.context if isinstance(task.context, list) else []:
                ran(before.agent.role, "", "", before.output.raw, task.agent.role)
        last = crew.tasks[-1]
        ran(last.agent.role, "", "", last.output.raw)

    listen(Crew, "kickoff", kicked_off)


# -- pydantic-ai -------------------------------------------------------------------------------


def pydantic_ai() -> None:
    from pydantic_ai import Agent
    from pydantic_ai.messages import (
        ModelRequest,
        ModelResponse,
        RetryPromptPart,
        ToolCallPart,
        ToolReturnPart,
    )

    run = Agent.run
    colleagues: set[str] = set()

    async def listened(self: Any, prompt: str, **kwargs: Any) -> Any:
        asker = _asker.get()
        if asker:
            colleagues.add(f"ask_{self.name}")
        token = _asker.set(self.name)
        result = await run(self, prompt, **kwargs)
        _asker.reset(token)
        calls: Json = {}
        for message in result.all_messages():
            if isinstance(message, ModelRequest) and message.instructions:
                SEEN["agents"][self.name] = message.instructions
            if isinstance(message, ModelResponse):
                calls |= {p.tool_call_id: p for p in message.parts if isinstance(p, ToolCallPart)}
                continue
            for part in message.parts:
                call = calls.get(getattr(part, "tool_call_id", None))
                if call is None or call.tool_name in colleagues:
                    continue
                if isinstance(part, ToolReturnPart):
                    used(self.name, call.tool_name, call.args, part.content)
                elif isinstance(part, RetryPromptPart):
                    used(self.name, call.tool_name, call.args, part.model_response())
        ran(self.name, asker, prompt, result.output)
        return result

    Agent.run = listened


# -- the driver --------------------------------------------------------------------------------

FRAMEWORKS = (smolagents, langgraph, agents_sdk, crewai, pydantic_ai)
"""Each is called before a program of its name is run, and listens."""


def main() -> None:
    folder, program, *given = sys.argv[1:]
    sys.argv = [program, *given]
    sys.path[0] = str(Path(program).resolve().parent)  # as Python does for a program
    name = Path(program).stem
    next(each for each in FRAMEWORKS if name.startswith(each.__name__))()
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(program, run_name="__main__")
    sys.stdout.write(out.getvalue())
    SEEN.update(question=given[0], answer=out.getvalue().strip().splitlines()[-1])
    key = hashlib.sha256(given[0].encode()).hexdigest()[:16]
    path = Path(folder) / f"{name}-{key}.json"
    path.write_text(json.dumps(SEEN, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
