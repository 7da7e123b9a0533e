"""Files as other programs write them, made from the documented shapes: two agents, three tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Json = dict[str, Any]
QUESTION = "What is six times the depth of the lake?"
JOB = "Find the depth of the lake"
FRAMED = f"You are a member of the team named 'researcher'.\nTask:\n{JOB}\nBe thorough."


def write(path: Path, *values: Any, indent: int | None = None) -> Path:
    """One value as a file of JSON, several as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(value, indent=indent) for value in values) + "\n")
    return path


# -- ATIF ----------------------------------------------------------------------------------------


def atif_step(number: int, source: str, message: Any, **more: Any) -> Json:
    return {"step_id": number, "source": source, "message": message, **more}


def atif_call(name: str, call: str, arguments: Any) -> Json:
    return {"tool_call_id": call, "function_name": name, "arguments": arguments}


def atif_searcher(**more: Any) -> Json:
    """A sub-agent's trajectory."""
    return {
        "schema_version": "ATIF-v1.7",
        "trajectory_id": "researcher-1",
        "agent": {"name": "researcher", "version": "1", "model_name": "small"},
        "steps": [
            atif_step(1, "system", "You research."),
            atif_step(2, "user", FRAMED),
            atif_step(
                3,
                "agent",
                "I look.",
                reasoning_content="Lakes have depths.",
                tool_calls=[atif_call("search", "s1", {"query": "depth"})],
                observation={"results": [{"source_call_id": "s1", "content": "7 m"}]},
                metrics={"prompt_tokens": 30, "completion_tokens": 5, "cached_tokens": 10},
            ),
            atif_step(4, "agent", "The depth is 7."),
        ],
        **more,
    }


def atif_team(ref: Json | None = None, **more: Any) -> Json:
    """A manager who asks a researcher and multiplies."""
    ref = {"trajectory_id": "researcher-1"} if ref is None else ref
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    function = {"name": "multiply", "description": "Multiplies.", "parameters": schema}
    asked = {
        "source_call_id": "m1",
        "content": "The depth is 7.",
        "subagent_trajectory_ref": [ref],
    }
    return {
        "schema_version": "ATIF-v1.7",
        "session_id": "run-1",
        "agent": {
            "name": "manager",
            "version": "1",
            "model_name": "large",
            "tool_definitions": [{"type": "function", "function": function}],
        },
        "steps": [
            atif_step(1, "system", "You lead."),
            atif_step(2, "user", QUESTION, timestamp="2026-11-01T10:00:00Z"),
            atif_step(
                3,
                "agent",
                "",
                tool_calls=[atif_call("researcher", "m1", {"task": JOB})],
                observation={"results": [asked]},
                metrics={"prompt_tokens": 50, "completion_tokens": 9, "cost_usd": 0.01},
            ),
            atif_step(
                4,
                "agent",
                "Now six times.",
                tool_calls=[atif_call("multiply", "m2", {"b": 6, "a": 7})],
                observation={"results": [{"source_call_id": "m2", "content": "42"}]},
                metrics={"prompt_tokens": 70, "completion_tokens": 8},
            ),
            atif_step(5, "agent", "42", timestamp="2026-11-01T10:01:30Z"),
        ],
        "subagent_trajectories": [atif_searcher()],
        **more,
    }


def atif_since(minor: int) -> Json:
    """The team as version 1.`minor` of the format has it, with all that came up to then; before
    1.7 the sub-agent stands in sub/r.json."""
    team = atif_team({"session_id": "run-1", "trajectory_path": "sub/r.json"})
    team |= {
        "schema_version": f"ATIF-v1.{minor}",
        "notes": "n",
        "final_metrics": {"total_steps": 5},
    }
    asking, multiplying, answering = team["steps"][2:]
    definitions = team["agent"].pop("tool_definitions")
    searcher = team.pop("subagent_trajectories")
    if minor >= 1:
        team["extra"] = {"mine": 1}
    if minor >= 2:  # the system may see something
        seen = {"results": [{"content": "The door is open."}]}
        team["steps"].insert(3, atif_step(4, "system", "", observation=seen))
    if minor >= 3:
        multiplying["metrics"]["completion_token_ids"] = [5, 6]
    if minor >= 4:
        multiplying["metrics"]["prompt_token_ids"] = [1, 2, 3]
    if minor >= 5:
        team["agent"]["tool_definitions"] = definitions
    if minor >= 6:
        image = {"type": "image", "source": {"media_type": "image/png", "path": "i.png"}}
        answering["message"] = [{"type": "text", "text": answering["message"]}, image]
    if minor >= 7:  # sub-agents stand in the document
        del team["session_id"]
        team["trajectory_id"] = "run-1"
        team["subagent_trajectories"] = searcher
        refs = asking["observation"]["results"][0]["subagent_trajectory_ref"]
        refs[0] = {"trajectory_id": "researcher-1"}
        asking |= {"llm_call_count": 1, "extra": {"mine": 2}}
        asking["tool_calls"][0]["extra"] = {"mine": 3}
    if minor >= 8:
        audio = {"type": "audio", "source": {"media_type": "audio/wav", "path": "a.wav"}}
        answering["message"].append(audio)
    for number, step in enumerate(team["steps"], start=1):
        step["step_id"] = number
    return team


def atif_expert() -> Json:
    """Whom the researcher asks."""
    return {
        "schema_version": "ATIF-v1.7",
        "trajectory_id": "expert-1",
        "agent": {"name": "expert", "version": "1"},
        "steps": [
            atif_step(1, "user", "How deep are lakes?"),
            atif_step(2, "agent", "7 m, most of them."),
        ],
    }


def atif_chief(asked: Json) -> Json:
    """The researcher, who asks an expert that `asked` refers to instead of searching."""
    searcher = atif_searcher()
    call = atif_call("expert", "s1", {"task": "How deep are lakes?"})
    result = {"source_call_id": "s1", "subagent_trajectory_ref": [asked]}
    searcher["steps"][2] |= {"tool_calls": [call], "observation": {"results": [result]}}
    return searcher


def adp() -> Json:
    return {
        "schema_version": "1.1.0",
        "id": "adp-1",
        "content": [
            {"class_": "text_observation", "content": QUESTION, "source": "user"},
            {
                "class_": "api_action",
                "function": "search",
                "kwargs": {"query": "depth"},
                "description": "I look.",
                "reasoning_content": "Lakes.",
            },
            {"class_": "text_observation", "content": "7 m", "source": "environment"},
            {"class_": "code_action", "language": "python", "content": "print(6*7)"},
            {"class_": "web_observation", "html": "<p>42</p>", "axtree": "42", "url": "u"},
            {"class_": "message_action", "content": "42"},
        ],
        "details": {},
    }


# -- LangGraph -----------------------------------------------------------------------------------


def messages() -> list[Json]:
    """As `messages_to_dict` has them."""
    usage = {"input_tokens": 20, "output_tokens": 4, "input_token_details": {"cache_read": 5}}
    said: list[tuple[str, Json]] = [
        ("system", {"content": "You answer."}),
        ("human", {"content": QUESTION, "id": "h"}),
        (
            "ai",
            {
                "content": "",
                "name": "researcher",
                "id": "a1",
                "tool_calls": [{"name": "search", "args": {"query": "depth"}, "id": "c1"}],
                "usage_metadata": usage,
                "response_metadata": {"model_name": "small", "finish_reason": "tool_calls"},
            },
        ),
        ("tool", {"content": "7 m", "tool_call_id": "c1", "name": "search", "status": "success"}),
        (
            "ai",
            {
                "content": [{"type": "text", "text": "The depth of the lake is 7 metres."}],
                "name": "researcher",
                "id": "a2",
                "usage_metadata": usage,
            },
        ),
        (
            "ai",
            {
                "content": "",
                "name": "solver",
                "id": "a3",
                "tool_calls": [{"name": "multiply", "args": {"a": 7, "b": 6}, "id": "c2"}],
            },
        ),
        ("tool", {"content": "42", "tool_call_id": "c2", "name": "multiply"}),
        ("ai", {"content": "42", "name": "solver", "id": "a4"}),
    ]
    return [{"type": kind, "data": {"type": kind, **held}} for kind, held in said]


def langsmith_runs(trace: str = "t1", start: int = 0) -> list[Json]:
    """A root and two model calls of one trace, as LangSmith exports them."""
    call = {"name": "search", "args": {"query": "depth"}, "id": f"{trace}-c"}
    first = {"type": "human", "data": {"content": f"{QUESTION} ({trace})"}}
    one = {"type": "ai", "data": {"content": "", "tool_calls": [call]}}
    seen = {"type": "tool", "data": {"content": "7 m", "tool_call_id": f"{trace}-c"}}
    two = {"type": "ai", "data": {"content": "42"}}

    def run(number: int, kind: str, parent: str | None, **more: Any) -> Json:
        return {
            "id": f"{trace}-{number}",
            "trace_id": trace,
            "parent_run_id": parent,
            "run_type": kind,
            "inputs": {},
            "start_time": f"2026-11-01T10:00:{start + number:02}",
            "end_time": f"2026-11-01T10:00:{start + number:02}.5",
            **more,
        }

    return [
        run(0, "chain", None, end_time=f"2026-11-01T10:00:{start + 9:02}"),
        run(
            1,
            "llm",
            f"{trace}-0",
            inputs={"messages": [[first]]},
            outputs={"generations": [[{"message": one}]]},
            extra={"metadata": {"ls_model_name": "small", "lc_agent_name": "solver"}},
        ),
        run(
            2,
            "llm",
            f"{trace}-0",
            inputs={"messages": [[first, one, seen]]},
            outputs={"generations": [[{"message": two}]]},
            extra={"metadata": {"lc_agent_name": "solver"}},
        ),
    ]


# -- smolagents ----------------------------------------------------------------------------------


def action(number: int, begun: float, ended: float, calls: Any, seen: Any, **more: Any) -> Json:
    """A step as `get_succinct_steps` has it."""
    return {
        "step_number": number,
        "timing": {"start_time": begun, "end_time": ended, "duration": ended - begun},
        "tool_calls": [
            {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call, name, arguments in calls
        ],
        "error": None,
        "model_output_message": {"role": "assistant", "content": "I call.", "tool_calls": None},
        "model_output": "I call.",
        "code_action": None,
        "observations": seen,
        "observations_images": None,
        "action_output": None,
        "token_usage": {"input_tokens": 10, "output_tokens": 3},
        "is_final_answer": False,
        **more,
    }


def smolagents_before(version: tuple[int, int]) -> list[Json]:
    """The memory of one agent as an older version has it."""
    said: Json = {"role": "assistant", "content": "I know a lake."}
    planning: Json = {"model_input_messages": None, "plan": "1. multiply"}
    if version < (1, 12):
        planning |= {"facts": "A lake.", "model_output_message_facts": said}
        planning["model_output_message_plan"] = {**said, "content": "1. multiply"}
    else:
        planning["model_output_message"] = {**said, "content": "1. multiply"}
    ends: Json = {"answer": "42"}
    steps = [
        action(1, 21, 22, [("m2", "multiply", {"a": 7, "b": 6})], "42"),
        action(2, 23, 24, [("m3", "final_answer", ends)], "42", action_output="42"),
    ]
    for step in steps:
        step["step"] = step.pop("step_number")
        for name in ("code_action", "is_final_answer", "observations_images"):
            del step[name]
        if version < (1, 17):
            del step["token_usage"]
            step |= step.pop("timing")
    return [{"task": QUESTION, "task_images": None}, planning, *steps]


def smolagents_team() -> Json:
    report = "Here is the final answer from your managed agent 'researcher':\nThe depth is 7."
    ends: Json = {"is_final_answer": True}
    return {
        "name": "manager",
        "system_prompt": "You lead.",
        "tools": [
            {
                "name": "multiply",
                "description": "Multiplies.",
                "inputs": {"a": {"type": "integer"}, "b": {"type": "integer", "nullable": True}},
            }
        ],
        "steps": [
            {"task": QUESTION, "task_images": None},
            action(1, 10, 20, [("m1", "researcher", {"task": JOB})], report),
            action(2, 21, 22, [("m2", "multiply", {"a": 7, "b": 6})], "42"),
            action(
                3, 23, 24, [("m3", "final_answer", {"answer": "42"})], "42",
                action_output="42", **ends,
            ),
        ],
        "managed_agents": {
            "researcher": {
                "system_prompt": "You research.",
                "steps": [
                    {"task": FRAMED, "task_images": None},
                    action(1, 12, 13, [("r1", "search", {"query": "depth"})], "7 m"),
                    action(
                        2, 14, 15, [("r2", "final_answer", {"answer": "The depth is 7."})],
                        "The depth is 7.", action_output="The depth is 7.", **ends,
                    ),
                ],
            }
        },
    }  # fmt: skip


# -- OAgents -------------------------------------------------------------------------------------


def oagents_action(number: int, code: str, seen: str, output: Any = None, **more: Any) -> Json:
    function = {"name": "python_interpreter", "arguments": code}
    return {
        "step_type": "action",
        "model_input_messages": None,
        "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}],
        "start_time": 1.0,
        "end_time": 2.0,
        "step": number,
        "error": None,
        "duration": 1.0,
        "model_output": f"Thought: next.\nCode:\n```py\n{code}\n```<end_code>",
        "observations": seen,
        "action_output": output,
        "score": 0.0,
        "evaluate_thought": "",
        **more,
    }


def oagents_row(**more: Any) -> Json:
    asked = f'found = search_agent(task="{JOB}")\nprint(found)'
    return {
        "agent_name": "gpt-4.1",
        "question": QUESTION,
        "augmented_question": f"You have one question to answer.\n{QUESTION}",
        "prediction": "42",
        "true_answer": "SECRET GOLD",
        "intermediate_steps": [
            {"step_type": "task", "task": f"You have one question to answer.\n{QUESTION}"},
            {"step_type": "planning", "facts": "A lake.", "plan": "1. ask 2. multiply"},
            oagents_action(
                1, asked, "Execution logs:\nThe depth is 7.",
                score=3, evaluate_thought="No source is named.",
            ),
            oagents_action(
                2, "print(7 * 6)", "Execution logs:\n42", score=9, evaluate_thought="Sound."
            ),
            oagents_action(3, "final_answer(42)", "Out: 42", 42),
        ],
        "parsing_error": False,
        "iteration_limit_exceeded": False,
        "agent_error": None,
        "start_time": "2026-11-01 10:00:00",
        "end_time": "2026-11-01 10:02:00",
        "task": 1,
        "task_id": "gaia-1",
        "search_agent_actions": {
            FRAMED: {
                "answer": "The depth is 7.",
                "tool_calls": [
                    {"name": "wiki", "args": {"query": "lake"}, "observation": "A lake."},
                    {"name": "crawl", "args": {"url": "u"}, "observation": "7 m"},
                ],
            }
        },
        **more,
    }  # fmt: skip


def oagents_sub_plans() -> Json:
    """A result of a manager who plans in sub-plans, and works on two of them in one step."""
    plan = (
        "Here is the plan of action that I will follow to solve the task:\n```\n##DAG_LIST\n"
        "[]\n##PARALLEL_LIST\nST1, ST2\n##ST1:Depth\n1. Ask.\n##ST2:Product\n1. Multiply.\n```"
    )
    codes = [f'found = search_agent(task="{JOB}")\nprint(found)', 'print("it\'s", 7 * 6)']
    steps = [
        oagents_action(1, code, f"Execution logs:\n{seen}\nLast output from code snippet:\nNone")
        for code, seen in zip(codes, ("The depth is 7.", "it's 42"), strict=True)
    ]
    both = oagents_action(1, "", "", [None, None], score=8, evaluate_thought="Both are sound.")
    both |= {
        "tool_calls": [step["tool_calls"][0] for step in steps],
        "model_output": f"model_output_list: {[step['model_output'] for step in steps]}",
        "observations": f"observation_list: {[step['observations'] for step in steps]}",
    }
    row = oagents_row()
    task, planning, *_, last = row["intermediate_steps"]
    row["intermediate_steps"] = [task, {**planning, "plan": plan}, both, {**last, "step": 2}]
    return row


def langgraph_state() -> Json:
    return {"messages": messages()}


ALL = {
    "atif": atif_team,
    "langgraph": langgraph_state,
    "smolagents": smolagents_team,
    "oagents": oagents_row,
}
"""A whole file of each format."""
