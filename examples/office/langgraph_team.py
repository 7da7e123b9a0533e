"""A team of LangGraph: a supervisor that hands over to a researcher and an accountant.

python langgraph_team.py "What did Willow Bakery pay in 2014, in USD?"
"""

import os
import sys
from typing import Annotated

import office
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_tool_call
from langchain.tools import InjectedToolCallId
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import InjectedState
from langgraph.types import Command

model = ChatOpenAI(model=os.environ.get("MODEL", "gpt-4.1-mini"), streaming=True)


@wrap_tool_call
def tell_errors(request, call):
    """What a tool raises is for the model to read."""
    try:
        return call(request)
    except LookupError as error:
        return ToolMessage(f"Error: {error}", tool_call_id=request.tool_call["id"], status="error")


def handoff_to(name: str, about: str) -> BaseTool:
    """A tool of the supervisor that goes on with another agent."""

    @tool(f"transfer_to_{name}", description=about)
    def handoff(
        state: Annotated[MessagesState, InjectedState],
        tool_call_id: Annotated[str, InjectedToolCallId],
    ) -> Command:
        done = ToolMessage(f"Transferred to {name}.", name=name, tool_call_id=tool_call_id)
        return Command(
            goto=name, graph=Command.PARENT, update={"messages": [*state["messages"], done]}
        )

    return handoff


supervisor = create_agent(
    model,
    [
        handoff_to("researcher", "Ask the researcher about customers, discounts and policies."),
        handoff_to("accountant", "Ask the accountant what customers paid, or to calculate."),
    ],
    system_prompt="You are the supervisor of an office. Hand over to one agent at a time. In the "
    "end answer with the value alone, or with: not found.",
    name="supervisor",
)
researcher = create_agent(
    model,
    [office.find_customer, office.search_policy],
    system_prompt="You are the researcher of an office. Find what is asked about customers, "
    "discounts and policies, and nothing else.",
    middleware=[tell_errors],
    name="researcher",
)
accountant = create_agent(
    model,
    [office.lookup_invoice, office.convert, office.deduct, office.add],
    system_prompt="You are the accountant of an office. Look up what customers paid and "
    "calculate with the tools.",
    middleware=[tell_errors],
    name="accountant",
)
graph = StateGraph(MessagesState)
graph.add_node("supervisor", supervisor, destinations=("researcher", "accountant"))
graph.add_node("researcher", researcher)
graph.add_node("accountant", accountant)
graph.add_edge(START, "supervisor")
graph.add_edge("researcher", "supervisor")
graph.add_edge("accountant", "supervisor")
team = graph.compile()

if __name__ == "__main__":
    done = team.invoke({"messages": [{"role": "user", "content": sys.argv[1]}]})
    print(done["messages"][-1].content)
