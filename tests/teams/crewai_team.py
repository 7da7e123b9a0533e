"""A team of CrewAI: a researcher, and then an accountant who is given what the researcher found.

python crewai_team.py "What did Willow Bakery pay in 2014, in USD?"
"""

import os
import sys

import office
from crewai import LLM, Agent, Crew, Process, Task
from crewai.tools import tool

model = LLM(model=os.environ.get("MODEL", "gpt-4.1-mini"), stream=True)
find_customer, search_policy, lookup_invoice, convert, deduct, add = map(tool, office.tools)

researcher = Agent(
    role="Researcher",
    goal="Look customers, discounts and policies up",
    backstory="You have kept the files of the office for years.",
    tools=[find_customer, search_policy],
    llm=model,
)
accountant = Agent(
    role="Accountant",
    goal="Look up what customers paid, calculate, and answer",
    backstory="You keep the books of the office.",
    tools=[lookup_invoice, convert, deduct, add],
    llm=model,
)
research = Task(
    description="Find what customers' files and policies say about this question: {question}",
    expected_output="What was found, in a few words",
    agent=researcher,
)
answer = Task(
    description="Answer this question: {question}",
    expected_output="The value alone, or: not found",
    agent=accountant,
    context=[research],
)
team = Crew(agents=[researcher, accountant], tasks=[research, answer], process=Process.sequential)

if __name__ == "__main__":
    print(team.kickoff(inputs={"question": sys.argv[1]}).raw)
