"""OpenAI Agents SDK with an agent as a tool, by OpenInference and by the SDK's own traces.

`chat`: by chat completions instead of Responses; `handoff`: the researcher takes over. TRACES names
the file of the SDK's own traces.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import agents
from agents import Agent, Runner, function_tool
from agents.tracing import TracingProcessor
from exporting import QUESTION, convert, exporting, lookup
from openinference.instrumentation.openai_agents import OpenAIAgentsInstrumentor

provider = exporting()
OpenAIAgentsInstrumentor().instrument(tracer_provider=provider)


class Keep(TracingProcessor):
    """The five lines of docs/otel.md."""

    def __init__(self, path):
        self.file = Path(path).open("a")  # noqa: SIM115

    def on_trace_start(self, trace): ...
    def on_span_start(self, span): ...
    def shutdown(self): ...
    def force_flush(self): ...

    def on_trace_end(self, trace):
        print(json.dumps(trace.export()), file=self.file, flush=True)

    def on_span_end(self, span):
        record, held = span.export(), span.span_data
        if getattr(held, "response", None):
            record["span_data"] |= {"input": held.input, "response": held.response.model_dump()}
        print(json.dumps(record, default=str), file=self.file, flush=True)


if os.environ.get("TRACES"):
    agents.add_trace_processor(Keep(os.environ["TRACES"]))
if "chat" in sys.argv:
    agents.set_default_openai_api("chat_completions")
os.environ.setdefault("OPENAI_API_KEY", "not-a-key")
researcher = Agent(
    name="researcher", model="gpt-4o", instructions="You find what customers owe.",
    tools=[function_tool(lookup)],
)  # fmt: skip
if "handoff" in sys.argv:
    boss = Agent(
        name="manager", model="gpt-4o", instructions="You answer questions about money.",
        tools=[function_tool(convert)], handoffs=[researcher],
    )  # fmt: skip
else:
    asking = researcher.as_tool("ask_researcher", "Ask what a customer owes.")
    boss = Agent(
        name="manager", model="gpt-4o", instructions="You answer questions about money.",
        tools=[function_tool(convert), asking],
    )  # fmt: skip
print(Runner.run_sync(boss, QUESTION).final_output)
provider.shutdown()
