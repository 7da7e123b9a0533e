"""LangGraph: a manager whose tool is a researcher, by OpenInference's LangChain instrumentation."""

from __future__ import annotations

import os

from exporting import QUESTION, convert, exporting, lookup
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openinference.instrumentation.langchain import LangChainInstrumentor

provider = exporting()
LangChainInstrumentor().instrument(tracer_provider=provider)
model = ChatOpenAI(model="gpt-4o", base_url=os.environ["OPENAI_BASE_URL"], api_key="not-a-key")
researcher = create_agent(
    model, [tool(lookup)], system_prompt="You find what customers owe.", name="researcher"
)


@tool
def ask_researcher(input: str) -> str:
    """Ask what a customer owes."""
    return researcher.invoke({"messages": [("user", input)]})["messages"][-1].content


boss = create_agent(
    model,
    [tool(convert), ask_researcher],
    system_prompt="You answer questions about money.",
    name="manager",
)
print(boss.invoke({"messages": [("user", QUESTION)]})["messages"][-1].content)
provider.shutdown()
