"""A run of another framework, distilled; its tools are not here, so the record answers for them."""

from pathlib import Path

from coa import AgentSpec, Episode, Message, ToolUse, distill
from coa.io.runs import dumps

STEPS = [  # as smolagents, OAgents and others keep them
    {"type": "planning", "says": "1. find when Yaren was founded"},
    {"type": "action", "thinks": "I search.", "tool": "google", "says": "Yaren", "sees": "Nauru"},
    {"type": "reflection", "says": "That is a place, not a year."},
    {"type": "action", "thinks": "I read.", "tool": "visit", "says": "yaren.nr", "sees": "1968"},
]
PARTS = {"planning": "plan", "action": "query", "reflection": "alarm"}


def events_of(step):
    facts = {"part": PARTS[step["type"]]}
    yield Message("lead", "system", step["says"], step.get("thinks", ""), facts)
    if "tool" in step:
        yield ToolUse("lead", step["tool"], step["says"], step["sees"])


lead = AgentSpec("lead", "planner", "You lead a team.")
events = [event for step in STEPS for event in events_of(step)]
episode = Episode("run-1", "When was Yaren founded?", "smolagents", [lead], events, "1968")
Path("episodes.jsonl").write_text(dumps(episode.to_json()) + "\n")
recipe = {"grammar": "mhqa", "tools": "recorded"}
print(distill("episodes.jsonl", out="dataset", recipe=recipe).kept[0].text)
