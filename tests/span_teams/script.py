"""What a model says to the teams of this folder.

The team is a manager, who may ask a researcher and convert money, and a researcher, who may look
customers up. What comes next follows from which tools are on offer and how many results are in the
conversation, so that frameworks which word their prompts differently get the same work.
"""

from __future__ import annotations

import json

from scripted_provider import Asked, Json, Reply, ToolCall

QUESTION = "How much does Ada owe, in euros?"
ASKED = "How much does Ada owe, in dollars?"
FOUND = "Ada owes 120 dollars."
ANSWER = "Ada owes 108.0 euros."


def says(asked: Asked) -> Reply:
    rest = asked.messages[1:]
    results = len(asked.results)
    if not results:  # smolagents: a result is a text of the user
        results = sum("Observation" in json.dumps(each) for each in rest)
    if not asked.tools:
        return Reply(_program(asked.system, results))
    text, name, arguments = _next(asked.tools, results)
    if not name:
        return Reply(text)
    return Reply(text, (ToolCall(name, arguments, f"call_{name}_{results}"),))


def _next(tools: list[str], results: int) -> tuple[str, str, Json]:
    """(text, tool, arguments) of the next reply; without a tool the text is all."""
    ending = "final_answer" in tools
    if "lookup" in tools:
        if not results:
            return "I look Ada up.", "lookup", {"customer": "Ada"}
        return ("", "final_answer", {"answer": FOUND}) if ending else (FOUND, "", {})
    if not results:
        asking = next(name for name in tools if "researcher" in name)
        given = {} if asking.startswith("transfer") else {"task" if ending else "input": ASKED}
        return "", asking, given
    if results == 1:
        return "", "convert", {"amount": 120, "currency": "EUR"}
    return ("", "final_answer", {"answer": ANSWER}) if ending else (ANSWER, "", {})


def _program(system: str, results: int) -> str:
    """What an agent says that writes programs."""
    if "def lookup(" in system:
        lines = (
            [f"final_answer('{FOUND}')"] if results else ["found = lookup('Ada')", "print(found)"]
        )
    elif results:
        lines = [f"final_answer('{ANSWER}')"]
    else:
        lines = [f"print(researcher(task='{ASKED}'))", "for amount in [120]:"]
        lines += ["    print(convert(amount, 'EUR'))"]
    return "\n".join(["Thought: I do the next step.", "<code>", *lines, "</code>"])
