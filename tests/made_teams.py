"""Episodes of teams in the shapes of well-known frameworks, as a recorder writes them down.

Nothing in them says what a message is: each answered model call is one `Message` with its `call`,
jobs that the code between agents passes on have none, and arguments are JSON with sorted keys.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from coa.recording.episode import (
    SYSTEM,
    USER,
    AgentSpec,
    Episode,
    Message,
    ModelCall,
    ToolSpec,
    ToolUse,
)

CUSTOMERS = ("Acme", "Borealis", "Cobalt", "Dunlin", "Ember", "Fjord")


def schema(required: tuple[str, ...] = (), /, **properties: str) -> str:
    """A schema of typed arguments; those that are not optional are required."""
    parts = {name: {"type": kind} for name, kind in properties.items()}
    needed = list(required or properties)
    return json.dumps({"type": "object", "properties": parts, "required": needed})


SEARCH = ToolSpec(
    "search_documents", "Search the company's documents.", "json", schema(query="string")
)
LOOKUP = ToolSpec(
    "lookup_invoice",
    "Look up what a customer was billed in a year.",
    "json",
    schema(year="integer", customer="string"),
)
CONVERT = ToolSpec(
    "convert_currency",
    "Convert euros into another currency.",
    "json",
    schema(amount="number", to="string"),
)


class Script:
    """Writes an episode event by event."""

    def __init__(
        self, task: str, question: str, teacher: str, agents: dict[str, str], *tools: ToolSpec
    ) -> None:
        specs = [AgentSpec(name, "", prompt) for name, prompt in agents.items()]
        self.episode = Episode(task, question, teacher, specs, tools=list(tools))
        self.branch = ""

    def say(self, agent: str, to: str, text: str = "", thought: str = "") -> Script:
        call = ModelCall("a-model", text or thought, 900, 0, 40) if agent != SYSTEM else None
        said = Message(agent, to, text, thought, branch=self.branch, call=call)
        self.episode.events.append(said)
        return self

    def use(self, agent: str, tool: str, result: str, **arguments: Any) -> Script:
        argument = json.dumps(arguments, sort_keys=True)
        self.episode.events.append(ToolUse(agent, tool, argument, result, branch=self.branch))
        return self

    def call(
        self, agent: str, tool: str, result: str, thought: str = "", /, **arguments: Any
    ) -> Script:
        """A reply that only uses a tool."""
        return self.say(agent, SYSTEM, thought=thought).use(agent, tool, result, **arguments)

    def answer(self, agent: str, text: str, answer: str) -> Episode:
        self.say(agent, USER, text)
        self.episode.answer = answer
        return self.episode


def facts(number: int) -> tuple[str, int, int, str, str]:
    """Customer, year, euros, and what these are in dollars and crowns."""
    customer, year = CUSTOMERS[number % len(CUSTOMERS)], 2020 + number % 5
    euros = 100 + 37 * number
    return customer, year, euros, f"{euros * 1.25:g}", f"{euros * 11:g}"


BOILERPLATE = "You are an expert assistant who can solve any task using tool calls. "


def smolagents(number: int) -> Episode:
    """A manager with two managed agents, which are called like tools and report at length."""
    customer, year, euros, dollars, _ = facts(number)
    prompts = {
        "manager": BOILERPLATE + "You can give tasks to members of your team.",
        "researcher": BOILERPLATE + "You are a researcher who finds invoices and documents.",
        "accountant": BOILERPLATE + "You are an accountant who converts amounts of money.",
    }
    question = f"What did {customer} pay in {year}, in dollars?"
    script = Script(f"s{number}", question, "smolagents", prompts, SEARCH, LOOKUP, CONVERT)
    script.say("manager", "researcher", f"Find what {customer} was billed in {year}.")
    if number % 3 == 0:
        script.call(
            "researcher", SEARCH.name, f"{customer} is a customer.", query=f"{customer} {year}"
        )
    script.call("researcher", LOOKUP.name, f'{{"euros": {euros}}}', customer=customer, year=year)
    script.say(
        "researcher",
        "manager",
        f"### 1. Task outcome (short version):\n{customer} was billed {euros} euros in {year}.\n"
        "### 2. Task outcome (extremely detailed version):\n"
        f"The invoice of {customer} for {year} is {euros} euros.\n### 3. Additional context:\n",
    )
    script.say("manager", "accountant", f"Convert {euros} euros to USD.")
    script.call("accountant", CONVERT.name, dollars, "I convert.", amount=euros, to="USD")
    script.say("accountant", "manager", f"{euros} euros are {dollars} USD.")
    return script.answer("manager", dollars, dollars)


def langgraph(number: int) -> Episode:
    """A supervisor that sends the conversation to one specialist after another."""
    customer, year, euros, _, crowns = facts(number)
    prompts = {
        "supervisor": "You are a supervisor who hands work to agents, one at a time.",
        "billing_expert": "You are a billing expert. Use one tool at a time.",
        "Math-Expert": "You are a maths expert.",
    }
    question = f"How many crowns did {customer} pay in {year}?"
    script = Script(f"l{number}", question, "langgraph", prompts, LOOKUP, CONVERT)
    script.say("supervisor", "billing_expert", "", "The bill first.")
    script.call("billing_expert", LOOKUP.name, f"{euros} euros", customer=customer, year=year)
    script.say("billing_expert", "supervisor", f"{customer} paid {euros} euros.")
    script.say("supervisor", "Math-Expert", "")
    script.call("Math-Expert", CONVERT.name, crowns, amount=euros, to="NOK")
    script.say("Math-Expert", "supervisor", f"That is {crowns} crowns.")
    return script.answer("supervisor", f"{customer} paid {crowns} crowns in {year}.", crowns)


def handoff(number: int) -> Episode:
    """OpenAI Agents: a triage agent hands over to one of two who answer the user themselves."""
    customer, year, euros, dollars, _ = facts(number)
    prompts = {
        "Triage": "You are the front desk. Hand every request to the right agent.",
        "Billing": "You answer questions about bills.",
        "Exchange": "You answer questions about money.",
    }
    if number % 2:
        question = f"What was {customer} billed in {year}?"
        script = Script(f"h{number}", question, "openai", prompts, LOOKUP, CONVERT)
        script.say("Triage", "Billing", f"A bill of {customer}.")
        script.call("Billing", LOOKUP.name, str(euros), customer=customer, year=year)
        return script.answer("Billing", str(euros), str(euros))
    question = f"How much are {euros} euros in dollars?"
    script = Script(f"h{number}", question, "openai", prompts, LOOKUP, CONVERT)
    script.say("Triage", "Exchange", "")
    script.call("Exchange", CONVERT.name, dollars, amount=euros, to="USD")
    return script.answer("Exchange", dollars, dollars)


def crewai(number: int) -> Episode:
    """A crew in sequence: the output of one task is what the next one begins with."""
    customer, year, euros, dollars, _ = facts(number)
    prompts = {
        "Researcher": "You are Researcher. You find what customers were billed.",
        "Converter": "You are Converter. You know exchange rates.",
        "Writer": "You are Writer. You write the final number.",
    }
    question = f"State in dollars what {customer} paid in {year}."
    script = Script(f"c{number}", question, "crewai", prompts, LOOKUP, SEARCH, CONVERT)
    script.say(USER, "Researcher", question)
    script.call("Researcher", LOOKUP.name, str(euros), customer=customer, year=year)
    script.say("Researcher", "Converter", f"{customer} was billed {euros} euros in {year}.")
    script.call("Converter", CONVERT.name, dollars, amount=euros, to="USD")
    script.say("Converter", "Writer", f"It is {dollars} dollars, by the rate of the day.")
    return script.answer("Writer", dollars, dollars)


def pydantic_ai(number: int) -> Episode:
    """An agent whose tool runs another agent; several jobs and a tool in one reply, in branches."""
    customer, year, euros, dollars, crowns = facts(number)
    prompts = {
        "assistant": "You are an assistant of the sales department.",
        "finance": "You are finance. Convert what you are asked to.",
    }
    question = f"In dollars and crowns, what did {customer} pay in {year}?"
    script = Script(f"p{number}", question, "pydantic-ai", prompts, LOOKUP, CONVERT)
    script.call("assistant", LOOKUP.name, str(euros), customer=customer, year=year)
    script.say("assistant", SYSTEM, thought="Both at once.")
    for branch, to in (("1", "USD"), ("2", "NOK")):
        script.branch = branch
        script.say(SYSTEM, "finance", f"Convert {euros} euros to {to}")
    for branch, to, result in (("2", "NOK", crowns), ("1", "USD", dollars)):
        script.branch = branch
        script.call("finance", CONVERT.name, result, amount=euros, to=to)
    for branch, to, result in (("1", "USD", dollars), ("2", "NOK", crowns)):
        script.branch = branch
        script.say("finance", "assistant", f"{result} {to}")
    script.branch = ""
    return script.answer("assistant", f"{dollars} and {crowns}", f"{dollars} and {crowns}")


def autogen(number: int) -> Episode:
    """A writer and a critic in turns, until the critic is content."""
    customer, year, euros, *_ = facts(number)
    prompts = {
        "writer": "You write answers. Improve them as you are told.",
        "reader": "You read drafts and say what is wrong with them. Say APPROVED when nothing is.",
    }
    question = f"What did {customer} pay in {year}?"
    script = Script(f"a{number}", question, "autogen", prompts, LOOKUP)
    script.call("writer", LOOKUP.name, str(euros), customer=customer, year=year)
    if number % 2:
        script.say("writer", "reader", f"{customer} paid {euros} in {year}, I believe.")
        script.say("reader", "writer", "The currency is missing, and so is your confidence.")
    script.say("writer", "reader", f"{customer} paid {euros} euros in {year}.")
    script.say("reader", "writer", "APPROVED")
    return script.answer("writer", str(euros), str(euros))


def planned(number: int) -> Episode:
    """One who plans and never comes back, one who does what was planned, one who checks it."""
    customer, year, euros, dollars, _ = facts(number)
    prompts = {
        "strategist": "You write numbered steps.",
        "executor": "You carry out steps with your tools.",
        "inspector": "You look at the work of the executor.",
    }
    question = f"What are {customer}'s costs of {year} in dollars?"
    script = Script(f"n{number}", question, "plan-and-execute", prompts, LOOKUP, CONVERT)
    script.say("strategist", "executor", "1. find the bill\n2. convert it to dollars")
    script.call("executor", LOOKUP.name, str(euros), customer=customer, year=year)
    if number % 2:
        script.say("executor", "inspector", f"{customer} paid {euros} in {year}.")
        script.say("inspector", "executor", "You forgot the second step of the plan.")
    script.call("executor", CONVERT.name, dollars, amount=euros, to="USD")
    script.say("executor", "inspector", f"{customer} paid {dollars} dollars in {year}.")
    script.say("inspector", "executor", "Fine; go on.")
    return script.answer("executor", dollars, dollars)


def reviewed(number: int) -> Episode:
    """A lead that gives out jobs, one of them to look at what the others brought."""
    customer, year, euros, *_ = facts(number)
    prompts = {
        "lead": "You lead a team.",
        "clerk": "You look up bills.",
        "second_pair_of_eyes": "You doubt what clerks say.",
    }
    question = f"Which sum did {customer} owe in {year}?"
    script = Script(f"r{number}", question, "lead-and-clerks", prompts, LOOKUP)
    job = f"Find the bill of {customer} in {year}."
    if number % 2:
        script.say("lead", "clerk", job)
        script.call("clerk", LOOKUP.name, "7", customer=customer, year=1999)
        script.say("clerk", "lead", "The bill is 7 euros.")
        script.say("lead", "second_pair_of_eyes", "Is a bill of 7 euros right?")
        script.say("second_pair_of_eyes", "lead", "No: it is of another year.")
        job += " Mind the year."
    script.say("lead", "clerk", job)
    script.call("clerk", LOOKUP.name, str(euros), customer=customer, year=year)
    script.say("clerk", "lead", f"The bill is {euros} euros.")
    script.say("lead", "second_pair_of_eyes", f"Is a bill of {euros} euros right?")
    script.say("second_pair_of_eyes", "lead", "Yes.")
    return script.answer("lead", f"{euros} euros", f"{euros} euros")


def own_plan(number: int) -> Episode:
    """An agent that plans its own work in a call without tools, and does it alone."""
    customer, year, euros, dollars, _ = facts(number)
    question = f"What did {customer} pay in {year}, in dollars?"
    prompts = {"agent": "You are an agent."}
    script = Script(f"o{number}", question, "one-agent", prompts, LOOKUP, CONVERT)
    script.say("agent", SYSTEM, "First the bill, then its conversion to dollars.")
    script.call("agent", LOOKUP.name, str(euros), customer=customer, year=year)
    script.call("agent", CONVERT.name, dollars, amount=euros, to="USD")
    return script.answer("agent", dollars, dollars)


SHAPES: dict[str, Callable[[int], Episode]] = {
    each.__name__: each
    for each in (
        *(smolagents, langgraph, handoff, crewai, pydantic_ai),
        *(autogen, planned, reviewed, own_plan),
    )
}


def team(shape: str, count: int = 12) -> list[Episode]:
    return [SHAPES[shape](number) for number in range(count)]
