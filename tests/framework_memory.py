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


def smolagents_team():
    from smolagents import CodeAgent, Model, Tool, ToolCallingAgent
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
    for write in (smolagents_team, langchain_messages, langgraph_team):
        write()
    (FOLDER / "expected.json").write_text(json.dumps(EXPECTED))


main()
