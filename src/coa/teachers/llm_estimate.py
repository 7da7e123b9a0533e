"""What recording will cost, without a single call: the team's own flow, rehearsed.

The agents' prompts, the questions and the flow are the real ones; what models and tools would say
is filled in at an assumed length (`ASSUMED`). A rehearsal goes well at the first attempt, so what
is estimated is the cost of a team that never has to correct itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coa.runs import Json
from coa.teachers.episode import ModelCall
from coa.teachers.llm_budget import MILLION, Amount, Price
from coa.teachers.llm_contracts import CRITERIA
from coa.teachers.llm_roster import CODE, Roster
from coa.teachers.minds import Paid, Request, count_tokens
from coa.tools.base import Tool, Toolbox

STEPS, REPLY_TOKENS, RESULT_TOKENS = 3, 60, 500
ASSUMED = (
    f"{STEPS} look-ups a task, replies of {REPLY_TOKENS} tokens, tool results of {RESULT_TOKENS}, "
    "nothing corrected, no prompt cache, 4 bytes a token"
)
SAMPLE = 100
"""Tasks that are rehearsed; the others are taken to be like them."""
_WORDS = "words " * (REPLY_TOKENS * 4 // 6)


@dataclass(frozen=True)
class Estimate:
    """Of a whole run; divide by `tasks` for one."""

    tasks: int
    calls: int
    prompt_tokens: int
    sampled_tokens: int
    money: float | None
    """None: no price is known."""
    assumed: str = ASSUMED

    def to_json(self) -> Json:
        return dict(vars(self))

    def lines(self) -> list[str]:
        """For a dry run."""
        each, tokens = max(1, self.tasks), self.prompt_tokens + self.sampled_tokens
        money = "" if self.money is None else f", {self.money:.2f} in money"
        return [
            f"{self.tasks} tasks: about {self.calls} model calls and {tokens / MILLION:.2f} "
            f"million tokens{money}",
            f"a task: {self.calls / each:.0f} calls, {tokens / each:.0f} tokens",
            f"assumed: {self.assumed}",
        ]


class Understudy:
    """A mind that says what fits, at the assumed length."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._said = 0

    def price(self, prompt: int, sampled: int) -> Amount:
        return Amount(prompt + sampled)

    async def answer(self, request: Request) -> Paid:
        self._said += 1
        text = self._reply(request)
        return Paid(ModelCall("", text, request.prompt_tokens, 0, count_tokens(text)))

    def _reply(self, request: Request) -> str:
        agent, roster = request.agent, self._roster
        if agent == "planner":
            lookers = [name for name in roster.workers if name != "coder"][:1] * STEPS
            agents = [*lookers, *(["coder"] if "coder" in roster.tools else []), "verifier"]
            each = _WORDS[: len(_WORDS) // len(agents)].strip()
            lines = [f"{number}. {name}: {each}" for number, name in enumerate(agents, 1)]
            return "\n".join(lines)
        if agent == "coder":
            return f"THOUGHT: so\nINPUT:\n```py\n{_WORDS}{self._said}\n```"
        if agent in roster.workers:
            name = roster.tools[agent][0].name
            return f"THOUGHT: so\nTOOL: {name}\nINPUT: {_WORDS}{self._said}"
        if agent == "reader":
            return f"REPORT: {_WORDS}"
        if agent == roster.critic:
            rated = "\n".join(f"{name}: good" for name in CRITERIA)
            return f"{rated if roster.rated else 'VERDICT: approve'}\nREASON: {_WORDS}"
        if request.messages[-1].text.endswith("Give the answer."):
            return f"THOUGHT: {_WORDS}\nANSWER: so"
        return f"THOUGHT: so\nREASON: {_WORDS}\nSCORE: 4"


def rehearsal_tools(box: Toolbox) -> Toolbox:
    """Tools by the names of a task's own, which return text of the assumed length."""

    async def run(argument: str) -> str:
        return "words " * (RESULT_TOKENS * 4 // 6)

    def standing_in(tool: Tool) -> Tool:
        if tool.schema:
            # As text: the schema is in the prompt all the same, and these words are no JSON.
            return replace(tool, run=run, body="text", session=None, with_state=None)
        return Tool(tool.name, run, about=_WORDS[:80], body="code" if tool.name == CODE else "text")

    return Toolbox(map(standing_in, box.values()))


def scaled(counted: Sequence[tuple[int, int, int]], tasks: int, price: Price | None) -> Estimate:
    """An estimate for all tasks from (calls, prompt tokens, sampled tokens) of some."""
    calls, prompt, sampled = (
        round(sum(each[at] for each in counted) * tasks / max(1, len(counted))) for at in range(3)
    )
    money = None if price is None else price.of(prompt, 0, sampled)
    return Estimate(tasks, calls, prompt, sampled, money)
