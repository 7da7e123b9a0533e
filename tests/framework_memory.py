"""Writes what real frameworks dump of teams at work: run by the Python of their environment.

    PYTHON framework_memory.py FOLDER

The models are scripts, the tools are functions. Beside each dump stands what the framework's own
objects say: who called what and what was answered (expected.json).
"""

import json
import sys
from pathlib import Path

FOLDER = Path(sys.argv[1])
EXPECTED = {}


def put(name, value, expected):
    (FOLDER / name).write_text(json.dumps(value, default=str))
    EXPECTED[name] = expected


def smolagents_parts():
    """Two tools, and a model that says what it was told to."""
    from smolagents import Model, Tool
    from smolagents.models import (
        ChatMessage,
        ChatMessageToolCall,
        ChatMessageToolCallFunction,
        MessageRole,
        TokenUsage,
    )

    class Lookup(Tool):
        name = "lookup"
        description = "Looks a word up."
        inputs = {"word": {"type": "string", "description": "what"}}  # noqa: RUF012
        output_type = "string"

        def forward(self, word: str) -> str:
            return f"{word} is 7"

    class Multiply(Tool):
        name = "multiply"
        description = "Multiplies."
        inputs = {  # noqa: RUF012
            "a": {"type": "integer", "description": "one"},
            "b": {"type": "integer", "description": "other"},
        }
        output_type = "integer"

        def forward(self, a: int, b: int) -> int:
            return a * b

    class Scripted(Model):
        def __init__(self, replies):
            super().__init__(model_id="scripted")
            self.replies = iter(replies)

        def generate(self, messages, **kwargs):
            reply = next(self.replies)
            calls = None
            text = reply if isinstance(reply, str) else None
            if text is None:
                calls = [
                    ChatMessageToolCall(
                        function=ChatMessageToolCallFunction(name=name, arguments=arguments),
                        id=call,
                        type="function",
                    )
                    for call, name, arguments in reply
                ]
            return ChatMessage(
                role=MessageRole.ASSISTANT,
                content=text if text is not None else "I call.",
                tool_calls=calls,
                token_usage=TokenUsage(input_tokens=10, output_tokens=3),
            )

    return Lookup, Multiply, Scripted


def smolagents_team():
    from smolagents import CodeAgent, ToolCallingAgent

    Lookup, Multiply, Scripted = smolagents_parts()

    def researcher(replies):
        return ToolCallingAgent(
            tools=[Lookup()],
            model=Scripted(replies),
            name="researcher",
            description="Finds words.",
            verbosity_level=0,
        )

    def calling():
        found = researcher(
            [[("r1", "lookup", {"word": "depth"})], [("r2", "final_answer", {"answer": "It is 7"})]]
        )
        leader = ToolCallingAgent(
            tools=[Multiply(), Lookup()],
            managed_agents=[found],
            planning_interval=5,
            verbosity_level=0,
            model=Scripted(
                [
                    "I plan to ask and to multiply.",
                    [("m1", "researcher", {"task": "Find the depth of the lake"})],
                    [("m2", "multiply", {"a": 7, "b": 6}), ("m3", "lookup", {"word": "other"})],
                    [("m4", "final_answer", {"answer": "42"})],
                ]
            ),
        )
        answer = leader.run("What is six times the depth of the lake?")
        return leader, found, answer

    for kind in ("full", "succinct"):
        leader, found, answer = calling()
        steps = f"get_{kind}_steps"
        put(
            f"smolagents_{kind}.json",
            {
                "name": "manager",
                "system_prompt": leader.memory.system_prompt.system_prompt,
                "steps": getattr(leader.memory, steps)(),
                "managed_agents": {
                    "researcher": {
                        "system_prompt": found.memory.system_prompt.system_prompt,
                        "steps": getattr(found.memory, steps)(),
                    }
                },
            },
            {
                "answer": str(answer),
                "agents": ["manager", "researcher"],
                "tools": [
                    ["researcher", "lookup", {"word": "depth"}, "depth is 7"],
                    ["manager", "multiply", {"a": 7, "b": 6}, "42"],
                    ["manager", "lookup", {"word": "other"}, "other is 7"],
                ],
                "jobs": [["manager", "researcher", "Find the depth of the lake"]],
                "calls": {"manager": 4, "researcher": 2},
            },
        )
        put(
            f"smolagents_alone_{kind}.json",
            getattr(leader.memory, steps)(),
            {"answer": str(answer), "calls": {"agent": 4}},
        )

    coder = CodeAgent(
        tools=[Lookup(), Multiply()],
        verbosity_level=0,
        model=Scripted(
            [
                'Thought: look.\n<code>\nfound = lookup(word="depth")\nprint(found)\n</code>',
                "Thought: multiply.\n<code>\nprint(multiply(a=7, b=6))\n</code>",
                "Thought: done.\n<code>\nfinal_answer(42)\n</code>",
            ]
        ),
    )
    answer = coder.run("What is six times the depth?")
    put(
        "smolagents_code.json",
        coder.memory.get_full_steps(),
        {"answer": str(answer), "calls": {"agent": 3}},
    )
    result = researcher(
        [[("x", "lookup", {"word": "a"})], [("y", "final_answer", {"answer": "7"})]]
    ).run("What is a?", return_full_result=True)
    put(
        "smolagents_result.json",
        result.dict(),
        {"answer": "7", "tools": [["agent", "lookup", {"word": "a"}, "a is 7"]]},
    )


QUESTION = "What is six times the depth of the lake?"
JOB = "Find the depth of the lake"
PLAN = """##DAG_LIST
[]
##PARALLEL_LIST
ST1, ST2
##ST1:The depth
1. Ask the search agent.
##ST2:The product
1. Multiply."""


def oagents_results():
    """Result lines of OAgents, a fork of smolagents, in its three variants: with the scores of its
    reflector, with sub-plans, and with the costs of the run.

    The steps are those of smolagents' own agents, whose memory OAgents writes with the names that
    its fields had in 1.8, a list of facts beside each plan, and what its reflector said.
    """
    from smolagents import CodeAgent, ToolCallingAgent
    from smolagents.memory import ActionStep, SystemPromptStep

    Lookup, Multiply, Scripted = smolagents_parts()
    calls = [[("s1", "lookup", {"word": "depth"})], [("s2", "final_answer", {"answer": "It is 7"})]]
    searcher = ToolCallingAgent(
        tools=[Lookup()],
        model=Scripted(calls),
        name="search_agent",
        description="Searches.",
        verbosity_level=0,
    )
    programs = [
        f'found = search_agent(task="{JOB}")\nprint(found)',
        "product = multiply(a=7, b=6)\nif product > 40:\n    print('more than 40:', product)",
        "final_answer(42)",
    ]
    lead = CodeAgent(
        tools=[Multiply()],
        managed_agents=[searcher],
        planning_interval=9,
        verbosity_level=0,
        model=Scripted([PLAN, *(f"Thought: go on.\n<code>\n{each}\n</code>" for each in programs)]),
    )
    answer = str(lead.run(QUESTION))
    task, planning, asked, multiplied, last = lead.memory.steps
    both = ActionStep(
        step_number=1,
        timing=asked.timing,
        tool_calls=[*asked.tool_calls, *multiplied.tool_calls],
        model_output=f"model_output_list: {[asked.model_output, multiplied.model_output]}",
        observations=f"observation_list: {[asked.observations, multiplied.observations]}",
        action_output=[asked.action_output, multiplied.action_output],
    )
    odd = SystemPromptStep(system_prompt="You lead.")
    judged = [
        _oagents_step(asked, 3.0, "No source is named."),
        _oagents_step(multiplied, 9.0, "Sound."),
    ]
    joined = [_oagents_step(both, 8.0, "Both are sound.")]
    plain = [_oagents_step(asked), _oagents_step(multiplied)]
    model = {"model_id": "scripted", "total_prompt_tokens": 30, "total_completion_tokens": 9}
    costs = {
        "manager_agent_model_cost": {**model, "total_cost": 0.001},
        "search_agent_model_cost": {},
        "embedding_costs_by_tool": [],
        "grand_total_task_tokens": {"total_tokens": 39},
        "grand_total_task_cost": 0.001,
    }
    records = {
        str(searcher.memory.steps[0].task): {
            "answer": "It is 7",
            "tool_calls": [
                {"name": call.name, "args": call.arguments, "observation": step.observations}
                for step in searcher.memory.steps[1:]
                for call in step.tool_calls
                if call.name != "final_answer"
            ],
        }
    }
    program = multiplied.tool_calls[0].arguments
    expected = {
        "answer": answer,
        "tools": [
            ["search_agent", "lookup", {"word": "depth"}, "depth is 7"],
            ["manager", "python", program, multiplied.observations],
        ],
        "jobs": [["manager", "search_agent", JOB]],
    }
    for name, middle, more, scores in (
        ("scores", judged, {}, [["alarm", 3.0], ["approval", 9.0]]),
        ("sub_plans", joined, {}, [["approval", 8.0]]),
        ("costs", [_oagents_step(odd), *plain], {"cost_summary": costs}, []),
    ):
        row = {
            "agent_name": "scripted",
            "question": QUESTION,
            "augmented_question": QUESTION,
            "prediction": answer,
            "true_answer": "42",
            "intermediate_steps": [
                *(_oagents_step(each) for each in (task, planning)),
                *middle,
                _oagents_step(last),
            ],
            "parsing_error": False,
            "iteration_limit_exceeded": False,
            "agent_error": None,
            "start_time": "2026-11-01 10:00:00",
            "end_time": "2026-11-01 10:02:00",
            "task": 1,
            "task_id": f"gaia-{name}",
            "search_agent_actions": records,
            **more,
        }
        reflector = {"reflector": len(scores)} if scores else {}
        put(
            f"oagents_{name}.json",
            row,
            expected
            | {
                "agents": ["manager", "search_agent", *reflector],
                "parts": [["plan", None], *scores],
                "calls": {"manager": 5, "search_agent": 2, **reflector},
            },
        )


def _oagents_step(step, score=0.0, said=None):
    """A step of smolagents as OAgents writes it."""
    from smolagents.memory import ActionStep, PlanningStep, TaskStep

    held = step.dict()
    for name in [name for name in held if name.startswith("model_output_message")]:
        del held[name]
    if isinstance(step, ActionStep):
        for name in ("token_usage", "is_final_answer", "code_action", "observations_images"):
            del held[name]
        held |= held.pop("timing") | {"step": held.pop("step_number")}
        held |= {"score": score, "evaluate_thought": said}
    elif isinstance(step, PlanningStep):
        del held["timing"], held["token_usage"]
        held["facts"] = "Here are the facts that I know so far:\n```\nA lake.\n```"
    kinds = {ActionStep: "action", PlanningStep: "planning", TaskStep: "task"}
    emptied = {"model_input_messages": None}  # before it is written, whatever its kind
    return held | emptied | {"step_type": kinds.get(type(step), "unknown")}


def langchain_messages():
    from langchain_core.load import dumpd
    from langchain_core.messages import (
        AIMessage,
        HumanMessage,
        SystemMessage,
        ToolMessage,
        convert_to_openai_messages,
        messages_to_dict,
    )

    usage = {"input_tokens": 20, "output_tokens": 4, "total_tokens": 24}
    messages = [
        SystemMessage("You answer."),
        HumanMessage("What is 6 times 7?"),
        AIMessage(
            [
                {"type": "reasoning", "reasoning": "I multiply."},
                {"type": "text", "text": "Let me see."},
            ],
            name="solver",
            tool_calls=[{"name": "multiply", "args": {"a": 6, "b": 7}, "id": "c1"}],
            usage_metadata=usage | {"input_token_details": {"cache_read": 5}},
            response_metadata={"model_name": "m-1", "finish_reason": "tool_calls"},
        ),
        ToolMessage("42", tool_call_id="c1", name="multiply"),
        AIMessage("It is 42.", name="solver", usage_metadata=usage),
    ]
    expected = {
        "answer": "It is 42.",
        "tools": [["solver", "multiply", {"a": 6, "b": 7}, "42"]],
        "agents": ["solver"],
        "calls": {"solver": 2},
    }
    put("langchain_dict.json", messages_to_dict(messages), expected)
    put("langchain_dumpd.json", dumpd(messages), expected)
    put("langchain_state.json", {"messages": [m.model_dump() for m in messages]}, expected)
    plain = {**expected, "tools": [["agent_1", *expected["tools"][0][1:]]]}
    plain |= {"agents": ["agent_1"], "calls": {"agent_1": 2}}
    openai = convert_to_openai_messages(messages)
    for each in openai:
        each.pop("name", None)
    put("langchain_openai.json", {"messages": openai}, plain)


def langgraph_team():
    from langchain.agents import create_agent
    from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
    from langchain_core.messages import AIMessage, messages_to_dict
    from langgraph.graph import START, MessagesState, StateGraph

    class Scripted(GenericFakeChatModel):
        def bind_tools(self, tools, **kwargs):
            return self

    def multiply(a: int, b: int) -> int:
        """Multiplies."""
        return a * b

    def agent(name, replies):
        return create_agent(Scripted(messages=iter(replies)), tools=[multiply], name=name)

    calls = [{"name": "multiply", "args": {"a": 6, "b": 7}, "id": "c1"}]
    one = agent("solver", [AIMessage("", tool_calls=calls), AIMessage("The product is 42 exactly")])
    two = agent("writer", [AIMessage("The answer is 42.")])
    graph = StateGraph(MessagesState)
    graph.add_node("solver", one)
    graph.add_node("writer", two)
    graph.add_edge(START, "solver")
    graph.add_edge("solver", "writer")
    state = graph.compile().invoke({"messages": [("user", "What is 6 times 7?")]})
    put(
        "langgraph_state.json",
        {"messages": messages_to_dict(state["messages"])},
        {
            "answer": "The answer is 42.",
            "tools": [["solver", "multiply", {"a": 6, "b": 7}, "42"]],
            "agents": ["solver", "writer"],
            "calls": {"solver": 2, "writer": 1},
        },
    )


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    for write in (smolagents_team, oagents_results, langchain_messages, langgraph_team):
        write()
    (FOLDER / "expected.json").write_text(json.dumps(EXPECTED))


main()
