"""A team of the OpenAI Agents SDK: a front desk hands over to an accountant or a researcher, and
the accountant has the researcher as a tool.

    python agents_sdk_team.py "What did Willow Bakery pay in 2014, in USD?"
"""

import os
import sys

import office
from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)
model = os.environ.get("MODEL", "gpt-4.1-mini")


def tell(context, error):
    """What a tool raises is for the model to read."""
    return f"Error: {error}"


def usable(function):
    return function_tool(function, failure_error_function=tell)


find_customer, search_policy, lookup_invoice, convert, deduct, add = map(usable, office.tools)
brief = "Answer with the value alone, or with: not found."

researcher = Agent(
    name="Researcher",
    instructions=f"You look customers, discounts and policies up. {brief}",
    handoff_description="Knows the customers and the policies of the office.",
    tools=[find_customer, search_policy],
    model=model,
)
accountant = Agent(
    name="Accountant",
    instructions=f"You look up what customers paid, and calculate with the tools. {brief}",
    handoff_description="Knows what customers paid; calculates.",
    tools=[
        lookup_invoice,
        convert,
        deduct,
        add,
        researcher.as_tool("ask_researcher", "Ask about customers, discounts and policies."),
    ],
    model=model,
)
front_desk = Agent(
    name="Front desk",
    instructions="Hand the question over to the one who can answer it.",
    handoffs=[researcher, accountant],
    model=model,
)

if __name__ == "__main__":
    print(Runner.run_sync(front_desk, sys.argv[1]).final_output)
