"""pydantic-ai: a manager whose tool is a researcher; it writes spans of the GenAI conventions
itself. The argument is the version of its instrumentation."""

from __future__ import annotations

import os
import sys

from exporting import QUESTION, convert, exporting, lookup
from pydantic_ai import Agent
from pydantic_ai.models.instrumented import InstrumentationSettings
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = exporting()
Agent.instrument_all(
    InstrumentationSettings(tracer_provider=provider, version=int((sys.argv[1:] or ["2"])[0]))
)
served = OpenAIProvider(base_url=os.environ["OPENAI_BASE_URL"], api_key="not-a-key")
model = OpenAIChatModel("gpt-4o", provider=served)
researcher = Agent(model, name="researcher", instructions="You find what customers owe.")
researcher.tool_plain(lookup)
boss = Agent(model, name="manager", instructions="You answer questions about money.")
boss.tool_plain(convert)


@boss.tool_plain
async def ask_researcher(input: str) -> str:
    """Ask what a customer owes."""
    return (await researcher.run(input)).output


print(boss.run_sync(QUESTION).output)
provider.shutdown()
