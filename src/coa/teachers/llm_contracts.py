"""Output contracts: the form in which agents are asked to reply.

A reply is labelled lines (`THOUGHT: ...`, `INPUT: ...`), not JSON: a small model forgets a quote or
a brace long before it forgets a word at the start of a line, a program needs no escaping, and a
reply that was cut still shows what is missing. How replies are read is in `llm_labels`
and `llm_replies`.

The contracts stand after the agents' prompts, which are the same for the rule-based experts.
"""

from __future__ import annotations

from collections.abc import Sequence

from coa.tools.base import Tool

CRITERIA = ("Information Conflict", "Tool Effectiveness", "Trajectory Monitoring")
ECHOES = {
    *("what to do", "what to do next", "how the results give the answer", "the reason"),
    *("one short sentence", "one sentence", "its name", "what the tool is given", "the program"),
    *("what you found, in one or two sentences", "what you could not find", "the answer alone"),
}
"""Words that only say what belongs there: a small model likes to repeat the form itself."""


def plan_contract(workers: Sequence[str]) -> str:
    return f"""Reply in exactly this form, one step a line, nothing else:
THOUGHT: one short sentence
1. {workers[0]}: what to do (after none)
2. {workers[-1]}: what to do next (after 1)
3. verifier: how the results give the answer (after 1, 2)
Every step begins with who does it: {either([*workers, "verifier"])}. At its end stand the \
numbers of the steps whose results it needs; steps with (after none) are done at the same time. \
If there is no way to answer, write one line instead: IMPOSSIBLE: the reason"""


def call_contract(tools: Sequence[Tool]) -> str:
    lines = [f"- {tool.name}: {tool.about}{_shape(tool)}" for tool in tools]
    which = "TOOL: its name\n" if len(tools) > 1 else ""
    holds = "\n```py\nthe program\n```" if _is_code(tools) else " what the tool is given"
    return (
        "You have these tools:\n" + "\n".join(lines) + "\nReply in exactly this form, nothing "
        f"else:\nTHOUGHT: one short sentence\n{which}INPUT:{holds}"
    )


def report_contract(tools: Sequence[Tool]) -> str:
    report = """When you have read what the step asks for, reply with one line:
REPORT: what you found, in one or two sentences
If it is not there, reply with one line:
MISSING: what you could not find"""
    return f"{report}\nOtherwise call a tool first. {call_contract(tools)}" if tools else report


def judge_contract(rated: bool, coding: bool) -> str:
    if rated:
        lines = "\n".join(f"{name}: good, average or poor" for name in CRITERIA)
        return f"""Reply in exactly this form, one rating for each, nothing else:
THOUGHT: one short sentence
{lines}
REASON: one sentence
Three times good approves the work. The worst rating counts otherwise: poor makes the planner plan \
again, average has the work done again."""
    again = "write again" if coding else "read again, search again, plan again"
    return f"""Reply in exactly this form, nothing else:
VERDICT: one of: approve, {again}
REASON: one sentence"""


VERIFY_CONTRACT = """When you are asked for the answer, reply in exactly this form, nothing else:
THOUGHT: one short sentence
ANSWER: the answer alone
When you are asked to check it, reply in exactly this form, nothing else:
THOUGHT: one short sentence
REASON: one sentence
SCORE: a number from 1 to 4"""


def either(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _is_code(tools: Sequence[Tool]) -> bool:
    return all(tool.body == "code" for tool in tools)


def _shape(tool: Tool) -> str:
    return f" (a JSON object by this schema: {tool.schema})" if tool.schema else ""
