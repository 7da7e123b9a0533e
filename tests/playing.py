"""A scripted rollout in one call, and the small engines and tools that the tests of it share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from coa.engines.base import Completion, Engine, OnText, Sampling
from coa.engines.scripted import Script, ScriptedEngine
from coa.errors import EngineError
from coa.grammar import load_grammar
from coa.io.runs import dumps
from coa.loop import Budget, Decoding, run
from coa.tasks import Task
from coa.tools import Tool, Toolbox
from coa.trajectory import Author, StopReason, Trajectory

MHQA = load_grammar("mhqa")
TASK = Task("Where is it?", ("Paris",), gold={"hops": ["France"]})
SEARCH = "<think>t</think><plan>p</plan><think>u</think><wiki_search>{}</wiki_search>"
AGAIN = "<think>v</think><wiki_search>{}</wiki_search>"
ANSWER = "<think>w</think><answer>Paris</answer>"
SUGGEST = (
    "<think>a</think><plan>b</plan><think>c</think><suggested_answer> Rome\n</suggested_answer>"
    "<think>d</think><double_check>Score: {}</double_check>"
)
REPLAN = "<think>e</think><plan>f</plan><think>g</think><web_search>h</web_search>"
Run = Callable[[str], Awaitable[str]]


async def found(query: str) -> str:
    return f"About {query}."


async def hang(_: str) -> str:
    await asyncio.Event().wait()
    raise AssertionError


def box(grammar_name: str, answer: Run = found, **limits: float) -> Toolbox:
    names = load_grammar(grammar_name).tool_roles
    return Toolbox(Tool(name, answer, pure=True, **limits) for name in names)


async def play(
    script: Script,
    answer: Run = found,
    *,
    grammar: str = "mhqa",
    engine: ScriptedEngine | None = None,
    task: Task = TASK,
    decoding: Decoding | None = None,
    timeout_s: float = 30.0,
    **budget: float,
) -> Trajectory:
    """Roll out a script, and check what must hold of every trajectory."""
    engine = engine or ScriptedEngine(script)
    trajectory = await run(
        task,
        engine,
        load_grammar(grammar),
        box(grammar, answer, timeout_s=timeout_s),
        budget=Budget(**budget),
        decoding=decoding,
    )
    check_record(trajectory, engine)
    return trajectory


def check_record(trajectory: Trajectory, engine: ScriptedEngine) -> None:
    assert trajectory.stop is not None
    assert trajectory.segments[0].author is Author.PROMPT
    for segment in trajectory.segments[1:]:
        assert engine.decode(segment.ids or ()) == segment.text
        sampled = segment.author is Author.MODEL
        assert (segment.logprobs is not None) == sampled
        assert not sampled or len(segment.logprobs or ()) == len(segment.ids or ())
    assert Trajectory.from_json(trajectory.to_json()) == trajectory
    assert dumps(trajectory.to_json()).encode()


def mask_of(trajectory: Trajectory) -> list[bool]:
    """True where the model wrote the token."""
    return [s.author is Author.MODEL for s in trajectory.segments for _ in s.ids or ()]


def observed(trajectory: Trajectory) -> list[str]:
    return [s.text for s in trajectory.segments if s.author is Author.ENV]


class FailingEngine(ScriptedEngine):
    """Raises instead of the turn that is called `fail`."""

    error: BaseException = EngineError("out of memory")

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
    ) -> Completion:
        completion = await super().generate(prompt_ids, sampling, on_text)
        if self.decode(completion.ids) == "fail":
            raise self.error
        if self.decode(completion.ids) == "hang":
            await asyncio.Event().wait()
        return completion


def sampled_rollout(engine: Engine) -> Trajectory:
    """A hot rollout of a real engine that keeps the ids that were sampled, checked to do so."""
    budget = Budget(turns=3, turn_tokens=48, tokens=120, seconds=120)
    decoding = Decoding(temperature=0.8, seed=1)
    trajectory = asyncio.run(run(TASK, engine, MHQA, box("mhqa"), budget=budget, decoding=decoding))
    assert trajectory.stop is not StopReason.ENGINE_FAILED, trajectory.error
    for segment in trajectory.segments:
        if segment.author is Author.MODEL:
            assert engine.decode(segment.ids or ()) == segment.text
            assert len(segment.ids or ()) == len(segment.logprobs or ())
    return trajectory


def constrained_rollouts(
    engine: Engine, grammar: str, questions: Sequence[str], count: int, budget: Budget
) -> list[Trajectory]:
    """Rollouts of a model that was never trained on the grammar, at temperature 1, bound to it."""

    async def together() -> list[Trajectory]:
        jobs = [
            run(
                Task(questions[i % len(questions)]),
                engine,
                load_grammar(grammar),
                box(grammar),
                budget=budget,
                decoding=Decoding(temperature=1.0, sample=i, prompt="full", constrain=True),
            )
            for i in range(count)
        ]
        return await asyncio.gather(*jobs)

    return asyncio.run(together())
