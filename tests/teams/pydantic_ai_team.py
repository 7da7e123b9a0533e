"""A team of pydantic-ai: a desk whose tools ask a researcher and an accountant.

python pydantic_ai_team.py "What did Willow Bakery pay in 2014, in USD?"
"""

import functools
import os
import sys

import office
from pydantic_ai import Agent, ModelRetry
from pydantic_ai.models.openai import OpenAIChatModel

model = OpenAIChatModel(os.environ.get("MODEL", "gpt-4.1-mini"))


def retried(function):
    """What a tool raises is for the model to read."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except LookupError as error:
            raise ModelRetry(str(error)) from error

    return call


find_customer, search_policy, lookup_invoice, convert, deduct, add = map(retried, office.tools)

researcher = Agent(
    model,
    name="researcher",
    instructions="You look customers, discounts and policies up.",
    tools=[find_customer, search_policy],
    retries=3,
)
accountant = Agent(
    model,
    name="accountant",
    instructions="You look up what customers paid, and calculate with the tools.",
    tools=[lookup_invoice, convert, deduct, add],
    retries=3,
)
desk = Agent(
    model,
    name="desk",
    instructions="Ask your colleagues. Answer with the value alone, or with: not found.",
)


@desk.tool_plain
async def ask_researcher(question: str) -> str:
    """Ask the researcher about customers, discounts and policies."""
    return (await researcher.run(question)).output


@desk.tool_plain
async def ask_accountant(question: str) -> str:
    """Ask the accountant what customers paid, or to calculate."""
    return (await accountant.run(question)).output


if __name__ == "__main__":
    print(desk.run_sync(sys.argv[1]).output)
