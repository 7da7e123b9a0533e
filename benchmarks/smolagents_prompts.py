"""How many tokens the prompts of smolagents have, as its agents really send them.

    python benchmarks/smolagents_prompts.py [--env FOLDER] [--write]

A CodeAgent leads a ToolCallingAgent that searches the web and reads pages, both plan at every step
(as OAgents sets it). A model that only follows a script stands behind each and keeps what it was
sent, so nothing is rendered by hand. Counted is what every such call carries whatever the task is:
system prompt, planning prompts, the frame around a task that is handed on, and the schemas of tools
that go beside the messages. Lengths are in tokens of the student's tokenizer.

smolagents is installed into an environment of its own (`--env`, made when it is not there). JSON is
printed; `--write` also stores it where `coa study cost` reads it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import venv
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "src" / "coa" / "evaluate" / "peer_prompts.json"
ENV = ROOT / ".cache" / "smolagents"
VERSION = "1.26.0"
COMMAND = "python benchmarks/smolagents_prompts.py --write"
MODEL = "smollm2-135m"
TASK = "@@the task@@"
"""Stands for whatever is asked, and is taken out before counting."""
LEADER, SEARCHER = "leader", "searcher"
SCRIPTS = {
    LEADER: [
        "1. Ask the search agent.",
        f'Thought: I ask.\n<code>\nprint(search_agent(task="{TASK}"))\n</code>',
        "1. Answer.",
        'Thought: I answer.\n<code>\nfinal_answer("done")\n</code>',
    ],
    SEARCHER: [
        "1. Read a page.",
        # No page is there: the failure is an observation, after which the agent plans again.
        '{"name": "visit_webpage", "arguments": {"url": "http://127.0.0.1:9/"}}',
        "1. Answer.",
        '{"name": "final_answer", "arguments": {"answer": "done"}}',
    ],
}
KINDS = ("plan", "act", "replan", "act")
"""What the calls of a script are for, in their order."""


def render() -> dict[str, dict[str, str]]:
    """Inside the environment: the fixed texts of every kind of call, by agent and kind."""
    lib: Any = import_module("smolagents")
    schema_of = import_module("smolagents.models").get_tool_json_schema
    calls: dict[str, list[tuple[Any, Any]]] = {LEADER: [], SEARCHER: []}

    class Script(lib.Model):  # type: ignore[misc, name-defined]
        """Keeps what it is sent and says what is next in its script."""

        def __init__(self, agent: str) -> None:
            super().__init__(model_id=agent)
            self.agent = agent

        def generate(self, messages: Any, tools_to_call_from: Any = None, **_: Any) -> Any:
            said = SCRIPTS[self.agent][len(calls[self.agent])]
            calls[self.agent].append((list(messages), tools_to_call_from))
            role = lib.models.MessageRole.ASSISTANT
            return lib.ChatMessage(role=role, content=said)

    quiet = lib.LogLevel.OFF
    searcher = lib.ToolCallingAgent(
        tools=[lib.WebSearchTool(), lib.VisitWebpageTool()],
        model=Script(SEARCHER),
        name="search_agent",
        description="A team member that will search the web to answer your question.",
        planning_interval=1,
        verbosity_level=quiet,
    )
    leader = lib.CodeAgent(
        tools=[],
        model=Script(LEADER),
        managed_agents=[searcher],
        planning_interval=1,
        verbosity_level=quiet,
    )
    answer = leader.run(TASK)
    assert answer == "done", answer
    found: dict[str, dict[str, str]] = {}
    for agent, made in calls.items():
        assert len(made) == len(KINDS), (agent, len(made))
        for kind, (messages, tools) in zip(KINDS, made, strict=True):
            fixed = _fixed(kind, messages)
            if tools:  # sent beside the messages, and paid for like them
                fixed["tools"] = json.dumps([schema_of(tool) for tool in tools])
            again = found.setdefault(f"{agent}_{kind}", fixed)
            assert again == fixed, f"{agent}: what is fixed changed from one {kind} to the next"
    return found


def _fixed(kind: str, messages: list[Any]) -> dict[str, str]:
    """What of a call does not come from the task or from what was done so far."""
    texts = [(str(m.role.value), "".join(part["text"] for part in m.content)) for m in messages]
    fixed = {"system": "".join(text for role, text in texts if role == "system")}
    if kind in ("plan", "replan"):
        fixed["planning"] = texts[-1][1]
    else:
        fixed["task"] = next(text for role, text in texts if role == "user")
    return {name: text.replace(TASK, "") for name, text in fixed.items() if text}


def installed(env: Path) -> Path:
    """The Python of the environment, which is made when it is not there."""
    python = env / "bin" / "python"
    if not python.is_file():
        venv.create(env, with_pip=True)
        wanted = f"smolagents=={VERSION}"
        command = [str(python), "-m", "pip", "install", "-q", "--no-input", wanted]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return python


def measure(env: Path) -> dict[str, Any]:
    from coa.models.codec import Codec
    from coa.models.references import model_folder, resolve

    codec = Codec.from_folder(model_folder(resolve(MODEL)))
    command = [str(installed(env)), "-I", __file__, "--render"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rendered: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    tokens = {
        call: {name: len(codec.encode(text)) for name, text in fixed.items()}
        for call, fixed in rendered.items()
    }
    return {"smolagents": VERSION, "tokenizer": MODEL, "command": COMMAND, "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--env", type=Path, default=ENV, help="folder of its environment")
    parser.add_argument("--write", action="store_true", help=f"store the result in {TABLE.name}")
    parser.add_argument("--render", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.render:
        print(json.dumps(render()))
        return
    result = json.dumps(measure(given.env), indent=2)
    print(result)
    if given.write:
        TABLE.write_text(result + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
