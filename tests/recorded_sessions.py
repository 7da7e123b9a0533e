"""Sessions as frameworks really send them, written by hand: what a recorder would have seen.

    team = Team()
    boss = team.agent("You are the boss.", tools=[tool("look", q="string")])
    boss.user("How many?")
    said = boss.replies("", call("look", q="many"))
    boss.result(said, "12")
    boss.replies("12")
    session = team.session()

A `Conversation` is one agent's memory; each `replies` is one model call, which is given all of it.
Time is a clock that moves on by a second before and during each call, unless it is told otherwise.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from coa.recording.calls import LoggedCall, LoggedSession
from coa.recording.episode import ToolSpec
from coa.recording.wire import FunctionCall, WireExchange, WireMessage, WireUsage

_ids = itertools.count(1)


def tool(name: str, about: str = "", **arguments: str) -> ToolSpec:
    """A declared tool, with the JSON type of each argument."""
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in arguments.items()},
        "required": list(arguments),
    }
    return ToolSpec(name, about or f"Does {name}.", "json", json.dumps(schema, sort_keys=True))


def call(name: str, /, **arguments: Any) -> FunctionCall:
    """A native call, with an id of its own."""
    return FunctionCall(f"call_{next(_ids):04}", name, arguments)


class Team:
    """The calls of one run, on one clock."""

    def __init__(self, name: str = "run", **about: Any) -> None:
        self.name, self.about = name, about
        self.calls: list[LoggedCall] = []
        self.clock = 1000.0

    def agent(self, system: str = "", tools: Sequence[ToolSpec] = ()) -> Conversation:
        return Conversation(self, system, tools)

    def write(
        self,
        system: str,
        tools: Sequence[ToolSpec],
        messages: Iterable[WireMessage],
        reply: WireMessage | None,
        *,
        begun: float | None = None,
        ended: float | None = None,
        usage: WireUsage | None = None,
        stop: str = "stop",
        id: str = "",
        follows: str = "",
        kept: str = "",
        model: str = "model-1",
        **of_call: Any,
    ) -> None:
        begun = self.clock + 1 if begun is None else begun
        ended = begun + 1 if ended is None else ended
        self.clock = max(self.clock, ended)
        counted = usage or WireUsage(100, 0, 10, 0.001)
        exchange = WireExchange(
            model,
            system,
            tuple(tools),
            tuple(messages),
            reply,
            counted,
            stop,
            id,
            follows,
            kept=kept,
        )
        self.calls.append(LoggedCall(self.name, "chat", exchange, begun, ended, **of_call))

    def session(self, end: dict[str, Any] | bool | None = True, **about: Any) -> LoggedSession:
        """What was recorded; `end=None`: it was cut."""
        calls = sorted(self.calls, key=lambda each: each.ended)
        ended = {"exit_code": 0} if end is True else end or None
        return LoggedSession(self.name, {**self.about, **about}, calls, ended)


class Conversation:
    """The memory of one agent, in the form of native calls."""

    def __init__(self, team: Team, system: str, tools: Sequence[ToolSpec]) -> None:
        self.team, self.system, self.tools = team, system, tools
        self.messages: list[WireMessage] = []

    def add(self, role: Any, text: str, **fields: Any) -> None:
        self.messages.append(WireMessage(role, text, **fields))

    def user(self, text: str) -> None:
        self.add("user", text)

    def replies(
        self, text: str = "", *calls: FunctionCall, reasoning: str = "", **of_call: Any
    ) -> WireMessage:
        """One model call; its reply joins the conversation, without its reasoning."""
        said = WireMessage("assistant", text, reasoning, calls)
        self.team.write(self.system, self.tools, self.messages, said, **of_call)
        self.messages.append(WireMessage("assistant", text, "", calls))
        return said

    def result(self, said: WireMessage, *texts: str, failed: bool = False) -> None:
        """The results of the calls of a reply, in their order."""
        for made, text in zip(said.calls, texts, strict=True):
            self.add("tool", text, answers=made.id, failed=failed)


class SmolMemory:
    """The memory of a smolagents agent, which says everything in texts and joins neighbours."""

    def __init__(
        self, team: Team, system: str, tools: Sequence[ToolSpec] = (), task: str = ""
    ) -> None:
        self.team, self.system, self.tools, self.task = team, system, tools, task
        self.messages = [WireMessage("user", f"New task:\n{task}")]

    def join(self, role: Any, text: str) -> None:
        if self.messages[-1].role == role:
            text = f"{self.messages.pop().text}\n{text}"
        self.messages.append(WireMessage(role, text))

    def plans(self, plan: str, **of_call: Any) -> None:
        asks = f"You are a world expert at planning. Here is your task:\n{self.task}\nWrite a plan."
        said = WireMessage("assistant", plan)
        if len(self.messages) == 1:
            self.team.write("", (), [WireMessage("user", asks)], said, **of_call)
        else:
            kept = SmolMemory(self.team, "", (), self.task)
            kept.messages = list(self.messages)
            kept.join("user", "Now write your updated facts below, taking into account the above.")
            system = f"You are a world expert. Your task is:\n{self.task}\nFind the history below:"
            self.team.write(system, (), kept.messages, said, **of_call)
        self.join("assistant", f"Here are the facts and the plan:\n```\n{plan}\n```")
        self.join("user", "Now proceed and carry out this plan.")

    def replies(self, text: str = "", *calls: FunctionCall, **of_call: Any) -> WireMessage:
        said = WireMessage("assistant", text, "", calls)
        self.team.write(self.system, self.tools, self.messages, said, **of_call)
        return said

    def seen(self, said: WireMessage, *texts: str) -> None:
        """What its calls returned."""
        listed = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in said.calls
        ]
        if said.text:
            self.join("assistant", said.text)
        self.join("assistant", f"Calling tools:\n{listed}")
        self.join("user", "Observation:\n" + "\n".join(texts))

    def ran(self, said: WireMessage, code: str, logs: str, last: str = "None") -> None:
        """What a program printed, and the value of its last statement."""
        self.join("assistant", f"{said.text}</code>")
        call = {"name": "python_interpreter", "arguments": code}
        listed = [{"id": "call_2", "type": "function", "function": call}]
        self.join("assistant", f"Calling tools:\n{listed}")
        shown = f"Execution logs:\n{logs}Last output from code snippet:\n{last}"
        self.join("user", f"Observation:\n{shown}")

    def programs(self, thought: str, code: str, **of_call: Any) -> WireMessage:
        return self.replies(f"Thought: {thought}\n<code>\n{code}\n", **of_call)


def code_prompt(*functions: str) -> str:
    """The prompt of a code-writing agent, with the first lines of its functions."""
    defined = "\n".join(
        f'def {each}:\n    """About {each.partition("(")[0]}.\n\n    Args:\n        q: it"""\n'
        for each in functions
    )
    return (
        "You are an expert assistant who can solve any task using code blobs.\n"
        "The code sequence must be opened with '<code>', and closed with '</code>'.\n"
        f"<code>\n{defined}\n</code>\nNow Begin!"
    )


# -- whole teams -------------------------------------------------------------------------------

QUESTION = "How much did Acme owe for 2014?"
INVOICES = "Acme has three invoices of 2014; they sum up to 42 dollars."
JOB = "Find all invoices of Acme of the year 2014."


def agents_as_tools() -> LoggedSession:
    """A sub-agent is called as a tool (OpenAI Agents SDK, pydantic-ai)."""
    team = Team()
    boss = team.agent("You are the boss.", [tool("researcher", task="string"), tool("add")])
    boss.user(QUESTION)
    asks = boss.replies("I ask.", call("researcher", task=JOB), reasoning="Who knows?")
    other = team.agent("You are careful.", [tool("look", q="string")])
    other.user(JOB)
    looks = other.replies("", call("look", q="Acme"), call("look", q="2014"))
    other.result(looks, "three invoices", "42")
    other.replies(INVOICES)
    boss.result(asks, INVOICES)
    adds = boss.replies("", call("add", a=40, b=2))
    boss.result(adds, "42")
    boss.replies("42 dollars")
    return team.session()


def handoff() -> LoggedSession:
    """The conversation goes on under another prompt (OpenAI Agents SDK, swarms)."""
    team = Team()
    first = team.agent("You are the triage agent.", [tool("look"), tool("transfer_to_refunds")])
    first.user(QUESTION)
    first.result(first.replies("", call("look", q="Acme")), "a customer")
    first.result(first.replies("", call("transfer_to_refunds")), '{"assistant": "Refunds"}')
    second = team.agent("You handle refunds.", [tool("pay", order="string")])
    second.messages = list(first.messages)
    second.result(second.replies("", call("pay", order="17")), "paid")
    second.replies("It is paid.")
    return team.session()


def supervisor(whole: bool = False) -> LoggedSession:
    """langgraph-supervisor: handed over, and back with messages that no model wrote."""
    team = Team()
    head = team.agent(
        "You are a supervisor.", [tool("transfer_to_finder"), tool("transfer_to_adder")]
    )
    head.user(QUESTION)
    for name, uses, result, says in (
        ("finder", call("look", q="Acme"), "40 and 2", "Acme owes 40 dollars and 2 dollars"),
        ("adder", call("add", a=40, b=2), "42.0", "The sum of both is 42 dollars"),
    ):
        hands = head.replies("", call(f"transfer_to_{name}"))
        head.messages[-1] = WireMessage("assistant", "", calls=hands.calls, name="supervisor")
        head.result(hands, f"Successfully transferred to {name}")
        worker = team.agent(f"You are a {name}.", [tool(uses.name, q="string")])
        worker.messages = list(head.messages)
        worker.result(worker.replies("", uses), result)
        worker.replies(says)
        own = worker.messages[len(head.messages) :] if whole else worker.messages[-1:]
        head.messages += [
            WireMessage(m.role, m.text, "", m.calls, m.answers, name=name) for m in own
        ]
        back = call("transfer_back_to_supervisor")
        head.add("assistant", "Transferring back to supervisor", calls=(back,), name=name)
        head.add("tool", "Successfully transferred back to supervisor", answers=back.id)
    head.replies("Altogether it is 42 dollars.")
    return team.session()


def pipeline() -> LoggedSession:
    """Plain nodes: each is given what the one before wrote, inside a larger text."""
    team = Team()
    planner = team.agent("You are the planner.")
    planner.user(QUESTION)
    planner.replies("First find the invoices of Acme, then add what they say.")
    worker = team.agent("You are the worker.", [tool("look", q="string")])
    plan = planner.messages[-1].text
    worker.user(f"Question: {QUESTION}\nPlan: {plan}\nDo it.")
    worker.result(worker.replies("", call("look", q="Acme")), "42")
    worker.replies(INVOICES)
    writer = team.agent("You are the writer.")
    writer.user(f"Facts: {INVOICES}\nAnswer the question: {QUESTION}")
    writer.replies("Acme owed 42 dollars.")
    return team.session()


def several_at_once() -> LoggedSession:
    """Two jobs and a tool in one reply; the agents work at the same time."""
    team = Team()
    boss = team.agent(
        "You are the boss.", [tool("left", task="string"), tool("right", task="string")]
    )
    boss.user(QUESTION)
    jobs = ("Look into the left drawer, please.", "Look into the right drawer, please.")
    asks = boss.replies(
        "",
        *(call(name, task=job) for name, job in zip(("left", "right"), jobs, strict=True)),
        call("look", q="x"),
    )
    begun = team.clock
    said = {"left": "There is nothing at all in it.", "right": "There are 42 dollars inside it."}
    for name, job, shift in (("left", jobs[0], 0.0), ("right", jobs[1], 0.5)):
        agent = team.agent(f"Drawer: {name}.", [tool("open", drawer="string")])
        agent.user(job)
        opens = agent.replies(
            "", call("open", drawer=name), begun=begun + shift, ended=begun + 2 + shift
        )
        agent.result(opens, f"{name} is open")
        agent.replies(
            said[name], begun=begun + 3 + shift, ended=begun + (6 if name == "left" else 5)
        )
    boss.result(asks, said["left"], said["right"], "x!")
    boss.replies("42 dollars")
    return team.session()


def delegation_inside_a_tool() -> LoggedSession:
    """pydantic-ai: a tool runs an agent, which ends by a tool; its result is made of that."""
    team = Team()
    head = team.agent("This agent selects.", [tool("joke_factory", count="integer")])
    head.user("Tell me a joke.")
    asks = head.replies("", call("joke_factory", count=2))
    maker = team.agent("This one invents.", [tool("look", q="string"), tool("final_result")])
    maker.user("Please generate 2 jokes.")
    maker.result(maker.replies("", call("look", q="jokes")), "many jokes")
    jokes = ["why did the chicken cross the road", "a horse walks into a bar one day"]
    maker.replies("", call("final_result", response=jokes))
    head.result(asks, json.dumps(jokes))
    head.replies("Why did the chicken cross the road?")
    return team.session()


def smolagents_team() -> LoggedSession:
    """Tool-calling agents with planning, a managed agent and `final_answer`."""
    team = Team()
    ends = tool("final_answer", answer="string")
    asks = tool("researcher", task="string", additional_args="object")
    boss = SmolMemory(
        team, "You can solve any task. You can ask researcher.", [asks, ends], QUESTION
    )
    boss.plans("1. ask the researcher for the invoices, 2. add them up")
    said = boss.replies("I ask.", call("researcher", task=JOB, additional_args={}))
    other = SmolMemory(
        team,
        "You can solve any task.",
        [tool("look", q="string"), ends],
        f"You're a helpful agent named 'researcher'.\n---\nTask:\n{JOB}\n---\nBe verbose.",
    )
    other.plans("1. look up Acme and then the year 2014")
    looks = other.replies("", call("look", q="Acme"), call("look", q="2014"))
    other.seen(looks, "three invoices", "42")
    other.plans("2. just say what the invoices sum up to")
    other.replies("Done.", call("final_answer", answer=INVOICES))
    boss.seen(said, f"Here is the final answer from your managed agent 'researcher':\n{INVOICES}")
    boss.replies("", call("final_answer", answer="42 dollars"))
    return team.session()


def code_team() -> LoggedSession:
    """Code-writing agents: tools and a managed agent are functions."""
    team = Team()
    boss = SmolMemory(
        team,
        code_prompt(
            "add(a: float, b: float) -> float",
            "final_answer(answer: any) -> any",
            "researcher(task: str, additional_args: dict[str, Any]) -> str",
        ),
        task=QUESTION,
    )
    code = f'found = researcher(task="{JOB}")\nprint(found)'
    said = boss.programs("I ask.", code)
    other = SmolMemory(
        team,
        code_prompt("look(q: string) -> string", "final_answer(answer: any) -> any"),
        task=f"You're a helpful agent named 'researcher'.\nTask:\n{JOB}",
    )
    looks = 'name = "Acme"\npage = look(q=name)\nprint("Page:", page)\nprint(look("2014"))'
    ran = other.programs("I look.", looks)
    other.ran(ran, looks, "Page: three invoices\n42\n")
    other.programs("Done.", f'final_answer("{INVOICES}")')
    report = f"Here is the final answer from your managed agent 'researcher':\n{INVOICES}"
    boss.ran(said, code, f"{report}\n")
    loop = "total = 0\nfor each in (40, 2):\n    total = add(total, each)\nprint(total)"
    boss.ran(boss.programs("I add.", loop), loop, "42\n")
    adds = "total = add(a=40, b=2)"
    boss.ran(boss.programs("Again.", adds), adds, "", "42")
    boss.programs("Done.", "final_answer(total)")
    return team.session()


def crew() -> LoggedSession:
    """CrewAI without native calls: ReAct as text, delegation, one task after the other."""
    team = Team()
    rules = (
        "\nYou ONLY have access to the following tools:\n{}\nUse this format:\nThought: think\n"
        "Action: the action\nAction Input: JSON\nObservation: the result\nThen:\nFinal Answer: it"
    )
    lead = team.agent(
        "You are Lead. You lead.\nYour personal goal is: answers"
        + rules.format("Tool Name: Delegate work to coworker\nTool Name: add")
    )
    lead.user(f"Current Task: {QUESTION}\nThought:")
    job = {"task": JOB, "context": "The year 2014.", "coworker": "Finder"}
    said = lead.replies(
        f"Thought: I ask.\nAction: Delegate work to coworker\nAction Input: {json.dumps(job)}"
    )
    finder = team.agent(
        "You are Finder. You find.\nYour personal goal is: facts" + rules.format("Tool Name: look")
    )
    finder.user(f"Current Task: {JOB}\nThis is the context: The year 2014.\nThought:")
    looks = finder.replies('Thought: I look.\nAction: look\nAction Input: {"q": "Acme"}')
    finder.messages[-1] = WireMessage("assistant", f"{looks.text}\nObservation: 40 and 2")
    finder.replies(f"Thought: I now know.\nFinal Answer: {INVOICES}")
    lead.messages[-1] = WireMessage("assistant", f"{said.text}\nObservation: {INVOICES}")
    lead.replies("Thought: I now know.\nFinal Answer: 42 dollars")
    return team.session()


def group_chat() -> LoggedSession:
    """AutoGen-like: everybody sees all messages, with the names of those who spoke."""
    team = Team()
    lines = [
        ("writer", "Here is a draft: Acme owed 40 dollars for 2014."),
        ("critic", "The second invoice is missing: add the 2 dollars."),
        ("writer", "Here is another draft: Acme owed 42 dollars for 2014."),
        ("critic", "APPROVE: this is what the invoices say."),
    ]
    for number, (name, text) in enumerate(lines):
        agent = team.agent(f"You are a {name} in a group. Speak only for yourself.")
        agent.user(QUESTION)
        for who, said in lines[:number]:
            agent.add("assistant" if who == name else "user", said, name=who)
        agent.replies(text)
    return team.session(answer="Acme owed 42 dollars for 2014.")


TEAMS = {
    each.__name__: each
    for each in (
        agents_as_tools,
        handoff,
        supervisor,
        pipeline,
        several_at_once,
        delegation_inside_a_tool,
        smolagents_team,
        code_team,
        crew,
        group_chat,
    )
}
"""Teams whose sessions are as frameworks send them, by name."""
