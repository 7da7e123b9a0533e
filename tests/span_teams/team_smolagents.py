"""smolagents with a managed agent, by OpenInference; `code` as the argument: agents that write
programs."""

from __future__ import annotations

import os
import sys

from exporting import QUESTION, convert, exporting, lookup
from openinference.instrumentation.smolagents import SmolagentsInstrumentor
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

provider = exporting()
SmolagentsInstrumentor().instrument(tracer_provider=provider)
Agent = CodeAgent if sys.argv[1:] == ["code"] else ToolCallingAgent
model = OpenAIServerModel("gpt-4o", api_base=os.environ["OPENAI_BASE_URL"], api_key="not-a-key")
researcher = Agent(
    tools=[tool(lookup)],
    model=model,
    name="researcher",
    description="Finds what customers owe.",
    verbosity_level=0,
)
boss = Agent(
    tools=[tool(convert)],
    model=model,
    managed_agents=[researcher],
    name="manager",
    verbosity_level=0,
)
print(boss.run(QUESTION))
provider.shutdown()
