"""A team of smolagents that write their tool calls as Python, which is smolagents' default.

python smolagents_code_team.py "What did Willow Bakery pay in 2014, in USD?"
"""

import os
import sys

import office
from smolagents import CodeAgent, OpenAIModel, tool

model = OpenAIModel(os.environ.get("MODEL", "gpt-4.1-mini"))
find_customer, search_policy, lookup_invoice, convert, deduct, add = map(tool, office.tools)

researcher = CodeAgent(
    tools=[find_customer, search_policy],
    model=model,
    name="researcher",
    description="Knows the customers and the policies of the office, discounts among them.",
    verbosity_level=0,
)
accountant = CodeAgent(
    tools=[lookup_invoice, convert, deduct, add],
    model=model,
    name="accountant",
    description="Knows what customers paid, converts, adds and takes discounts off.",
    verbosity_level=0,
)
team = CodeAgent(
    tools=[],
    model=model,
    managed_agents=[researcher, accountant],
    instructions="Answer with the value alone, or with: not found.",
    verbosity_level=0,
)

if __name__ == "__main__":
    print(team.run(sys.argv[1]))
