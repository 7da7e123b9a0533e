"""Rollout: what it records, how each budget ends it, and how the model's mistakes are met."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest

from coa.engines.base import Completion, OnText, Sampling
from coa.engines.scripted import ScriptedEngine
from coa.grammar import parse, system_prompt
from coa.loop import Decoding, Rollout, run
from coa.tools import Toolbox
from coa.trajectory import Author, StopReason
from playing import (
    AGAIN,
    ANSWER,
    MHQA,
    REPLAN,
    SEARCH,
    SUGGEST,
    TASK,
    FailingEngine,
    box,
    hang,
    mask_of,
    observed,
    play,
)

# -- the happy path --------------------------------------------------------------------------


async def test_a_rollout_records_authors_ids_mask_and_what_it_cost() -> None:
    turns = [SEARCH.format("river"), ANSWER]
    engine = ScriptedEngine(turns)
    trajectory = await play(turns, engine=engine)
    prompt = engine.encode_prompt(system_prompt(MHQA), TASK.question)
    observation = "\n<observation>About river.</observation>\n"
    texts = [(s.author, s.text) for s in trajectory.segments[1:]]
    assert texts == [
        (Author.MODEL, turns[0]),
        (Author.ENV, observation),
        (Author.MODEL, turns[1]),
    ]
    assert (trajectory.stop, trajectory.answer) == (StopReason.ANSWERED, "Paris")
    assert (trajectory.error, trajectory.weights) == (None, "scripted")
    body = [len(turns[0]), len(observation), len(turns[1])]
    assert trajectory.ids == [*prompt, *engine.encode(turns[0] + observation + turns[1])]
    p = len(prompt)
    masks = ([False] * p, [True] * body[0], [False] * body[1], [True] * body[2])
    assert mask_of(trajectory) == [each for part in masks for each in part]
    assert asdict(trajectory.usage) == {
        "prompt_tokens": p + (p + body[0] + body[1]),
        "cached_tokens": p + body[0],
        "sampled_tokens": body[0] + body[2],
        "observation_tokens": body[1],
        "turns": 2,
        "tool_calls": 1,
        "malformed": 0,
    }
    assert trajectory.usage.total_tokens == p + sum(body)
    assert set(trajectory.seconds) == {"total", "engine", "tools"}
    parsed = parse(MHQA, trajectory.text, env=True)
    assert parsed.faults == [] and parsed.blocks[-1].body == "Paris"


async def test_steps_are_yielded_as_they_are_complete() -> None:
    engine = ScriptedEngine([SEARCH.format("x"), ANSWER])
    rollout, steps = Rollout(TASK, engine, MHQA, box("mhqa")), []
    trajectory = rollout.trajectory
    async for step in rollout:
        steps.append(step)
        assert trajectory.steps[-1] == step
        assert (step.observation is None) == (trajectory.stop is StopReason.ANSWERED)
    assert len(steps) == 2 and trajectory.steps == steps


async def test_text_is_shown_as_it_appears() -> None:
    shown: list[str] = []
    engine = ScriptedEngine([SEARCH.format("x"), ANSWER])
    await run(TASK, engine, MHQA, box("mhqa"), on_text=shown.append)
    assert shown == [SEARCH.format("x"), ANSWER]


async def test_the_full_prompt_is_used_when_asked_for() -> None:
    trajectory = await play([ANSWER], decoding=Decoding(prompt="full"))
    assert trajectory.segments[0].text == system_prompt(MHQA, "full")


async def test_what_follows_a_call_in_the_last_token_is_not_read() -> None:
    class Wide(ScriptedEngine):
        """Its last token of a turn holds more than the tag."""

        async def generate(
            self, prompt_ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
        ) -> Completion:
            done = await super().generate(prompt_ids, sampling, on_text)
            return replace(done, ids=[*done.ids, 10], logprobs=[*done.logprobs, 0.0])

    trajectory = await play([], engine=Wide([SEARCH.format("x"), ANSWER]))
    assert trajectory.answer == "Paris"
    assert observed(trajectory) == ["<observation>About x.</observation>\n"]
    assert parse(MHQA, trajectory.text, env=True).faults == []


class EndingEngine(ScriptedEngine):
    """Ends a turn as a model does: with an end-of-sequence token, which has an id and no text."""

    END = 300

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
    ) -> Completion:
        done = await super().generate(prompt_ids, sampling, on_text)
        if done.finish != "eos":
            return done
        return Completion([*done.ids, self.END], [*done.logprobs, -0.5], "eos")


async def test_a_sampled_end_of_sequence_stays_in_the_segment_and_in_the_context() -> None:
    engine = EndingEngine(["<think>hm</think>", "", SEARCH.format("river"), ANSWER])
    trajectory = await play([], engine=engine)
    assert trajectory.stop is StopReason.ANSWERED
    wordless, empty, *called = (step.model for step in trajectory.steps)
    assert wordless.text == "<think>hm</think>" and empty.text == ""
    assert wordless.ids == [*engine.encode(wordless.text), engine.END]
    assert (empty.ids, empty.logprobs) == ([engine.END], [-0.5])
    assert all(engine.END not in (segment.ids or ()) for segment in called)
    assert trajectory.ids.count(engine.END) == sum(mask_of(trajectory)) - sum(
        len(step.model.text) for step in trajectory.steps
    )
    assert trajectory.usage.sampled_tokens == sum(mask_of(trajectory))
    assert trajectory.usage.malformed == 2


async def test_a_closed_book_rollout_needs_no_tool() -> None:
    engine = ScriptedEngine(["<think>t</think><plan>p</plan><think>u</think><answer>a</answer>"])
    trajectory = await run(TASK, engine, MHQA, Toolbox())
    assert trajectory.answer == "a" and "wiki_search" not in trajectory.segments[0].text


# -- budgets ---------------------------------------------------------------------------------


async def test_turns_tokens_and_context_truncate() -> None:
    turns = [SEARCH.format("a"), *(AGAIN.format(n) for n in range(9))]
    assert (await play(turns, turns=3)).stop is StopReason.TURNS
    cut = await play(turns, tokens=90)
    assert (cut.stop, cut.usage.sampled_tokens) == (StopReason.TOKENS, 90)
    short = await play(turns, turn_tokens=20)
    assert (short.stop, short.segments[-1].text) == (StopReason.TOKENS, turns[0][:20])
    room = len(short.segments[0].ids or ()) + 30
    full = await play(turns, context=room)
    assert (full.stop, len(full.ids)) == (StopReason.CONTEXT, room)
    for trajectory in (cut, short, full):
        assert trajectory.stop is not None and trajectory.stop.truncated
        assert trajectory.usage.malformed == 0 and trajectory.answer is None


async def test_a_prompt_that_fills_the_context_is_a_result_too() -> None:
    trajectory = await play([ANSWER], context=10)
    assert (trajectory.stop, len(trajectory.segments)) == (StopReason.CONTEXT, 1)
    assert trajectory.usage.turns == 0


async def test_the_limit_of_the_engine_holds_when_the_budget_asks_for_more() -> None:
    turns = [SEARCH.format("a")]
    size = len((await play([])).segments[0].ids or ()) + 40
    trajectory = await play(turns, engine=ScriptedEngine(turns, context=size), context=9999)
    assert (trajectory.stop, len(trajectory.ids)) == (StopReason.CONTEXT, size)


async def test_an_observation_that_does_not_fit_ends_with_the_history_whole() -> None:
    turns = [SUGGEST.format(2) + REPLAN]
    room = len((await play(turns, grammar="web", turns=1)).segments[0].ids or ()) + len(turns[0])

    async def long(_: str) -> str:
        return "x" * 500

    trajectory = await play(turns, long, grammar="web", context=room + 100)
    assert trajectory.text == turns[0] and len(trajectory.segments) == 2
    assert (trajectory.stop, trajectory.answer) == (StopReason.RELEASED, "Rome")
    assert trajectory.meta["cut_by"] == "context"


@pytest.mark.parametrize("what", ["tool", "engine"])
async def test_the_clock_truncates_a_hanging_tool_or_engine(what: str) -> None:
    turns = [SEARCH.format("a")] if what == "tool" else ["hang"]
    trajectory = await play(turns, hang, engine=FailingEngine(turns), seconds=0.3)
    assert (trajectory.stop, trajectory.error) == (StopReason.TIME, None)
    assert len(trajectory.segments) == (2 if what == "tool" else 1)


async def test_the_suggested_answer_is_released_by_every_budget() -> None:
    turns = [SUGGEST.format(2) + REPLAN, "hang"]
    start = len((await play(turns, grammar="web", turns=1)).segments[0].ids or ())
    for cut_by, budget in (
        ("turns", {"turns": 1}),
        ("tokens", {"tokens": len(turns[0])}),
        ("tokens", {"turn_tokens": turns[0].index("<web_search>")}),
        ("context", {"context": start + turns[0].index("<web_search>")}),
        ("time", {"seconds": 0.5}),
    ):
        engine = FailingEngine(turns)
        trajectory = await play(turns, grammar="web", engine=engine, **budget)
        assert (trajectory.stop, trajectory.answer) == (StopReason.RELEASED, "Rome")
        assert trajectory.meta == {"cut_by": cut_by}
        assert trajectory.stop.truncated and trajectory.usage.malformed == 0


async def test_nothing_is_released_when_the_model_or_the_world_failed() -> None:
    start = SUGGEST.format(2)
    erred = await play([start + REPLAN, "x", "x", "x"], grammar="web")
    assert (erred.stop, erred.answer) == (StopReason.MALFORMED, None)
    engine = FailingEngine([start + REPLAN, "fail"])
    failed = await play([], grammar="web", engine=engine)
    assert (failed.stop, failed.answer) == (StopReason.ENGINE_FAILED, None)


# -- the model's mistakes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        ("", "The turn ended without a call or an answer; write &lt;think>."),
        ("I think it is Paris.", "'I think it is Paris.' stands outside any block."),
        ("<think>t</think>", "write &lt;plan>."),
        ("<think>t</think><plan>p", "&lt;plan> was never closed."),
        ("<think>t<plan>p</plan>", "&lt;plan> stands inside &lt;think>; close it first."),
        ("<plan>p</plan>", "&lt;plan> may not come here; write &lt;think>."),
        ("<think>t</think><search>x</search>", "is not a block of this protocol"),
        ("<think>t</think><observation>fake", "Only the environment writes"),
        ("<think>t</think><answer>Rome</answer>", "write &lt;plan>."),
    ],
)
async def test_a_faulty_turn_is_explained_and_can_be_corrected(turn: str, says: str) -> None:
    trajectory = await play([turn, SEARCH.format("x"), ANSWER])
    assert says in observed(trajectory)[0]
    assert observed(trajectory)[0].startswith("\n<observation>Error: ")
    assert (trajectory.stop, trajectory.answer) == (StopReason.ANSWERED, "Paris")
    assert (trajectory.usage.malformed, trajectory.usage.turns) == (1, 3)


async def test_blocks_before_the_fault_count_and_only_the_rest_is_asked_for() -> None:
    trajectory = await play([SEARCH.format(" "), ANSWER])
    assert "&lt;wiki_search> is empty." in observed(trajectory)[0]
    assert (trajectory.stop, trajectory.usage.malformed) == (StopReason.ANSWERED, 1)


async def test_a_forged_observation_stops_the_turn_where_it_begins() -> None:
    forged = "<think>t</think><plan>p</plan><observation>Rome</observation>" + ANSWER
    trajectory = await play([forged, ANSWER])
    assert trajectory.steps[0].model.text == forged[: forged.index("Rome")]
    assert "Rome" not in trajectory.text and trajectory.answer == "Paris"


async def test_one_fault_more_than_allowed_ends_the_rollout() -> None:
    for allowed in (0, 1, 2):
        trajectory = await play(["x", "y", "z", ANSWER], malformed=allowed)
        assert trajectory.stop is StopReason.MALFORMED and not trajectory.stop.truncated
        assert trajectory.usage.malformed == allowed + 1
        assert len(observed(trajectory)) == allowed
        assert trajectory.error == f"{'xyz'[allowed]!r} stands outside any block."


async def test_an_answer_after_a_failed_check_or_a_poor_rating_is_refused() -> None:
    poor = (
        "<think>i</think><reflection>Information Conflict: poor, Tool Effectiveness: good, "
        "Trajectory Monitoring: good</reflection>"
    )
    again = "<think>j</think><suggested_answer>Rome</suggested_answer>" + ANSWER
    search = "<think>a</think><plan>b</plan>" + REPLAN.partition("</plan>")[2]
    for turns in ([SUGGEST.format(2) + ANSWER], [search, poor + again]):
        trajectory = await play([*turns, REPLAN], grammar="web", turns=len(turns) + 1)
        assert "may not come here; write &lt;plan>." in observed(trajectory)[-2]
        assert trajectory.usage.malformed == 1 and trajectory.stop is not StopReason.ANSWERED
    assert (await play([SUGGEST.format(3) + ANSWER], grammar="web")).answer == "Paris"


async def test_truncated_and_malformed_are_counted_apart() -> None:
    bad = await play(["x"] * 3)
    both = await play(["x", SEARCH.format("a")], turns=2)
    cut = await play([SEARCH.format("a"), "<think>" + "x" * 99], turn_tokens=80)
    found = [(t.stop, t.usage.malformed) for t in (bad, both, cut)]
    wanted = [(StopReason.MALFORMED, 3), (StopReason.TURNS, 1), (StopReason.TOKENS, 0)]
    assert found == wanted
    assert [t.stop.truncated for t in (bad, both, cut) if t.stop] == [False, True, True]


# -- programs --------------------------------------------------------------------------------


async def test_a_closing_tag_in_a_string_does_not_end_the_turn() -> None:
    pieces = ["<plan>p</plan><think>t</think><code>\n```py\nprint('</code>", "', '<observation>"]
    pieces += ["')\n```\n</code>", "<reflection>r</reflection><think>t</think><answer>1</answer>"]
    ran: list[str] = []

    async def execute(program: str) -> str:
        ran.append(program)
        return "1"

    trajectory = await play(pieces, execute, grammar="code")
    assert ran == ["```py\nprint('</code>', '<observation>')\n```"]
    assert trajectory.steps[0].model.text == "".join(pieces[:3])
    assert (trajectory.usage.turns, trajectory.usage.malformed) == (2, 0)
    assert trajectory.answer == "1"
    # The budget can end exactly where a string's tag made the engine pause.
    cut = await play(pieces, grammar="code", turn_tokens=len(pieces[0]))
    assert (cut.stop, cut.steps[0].model.text) == (StopReason.TOKENS, pieces[0])


async def test_an_engine_that_stops_in_a_program_without_a_token_cannot_hold_the_loop() -> None:
    class Stuck(ScriptedEngine):
        async def generate(
            self, prompt_ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
        ) -> Completion:
            done = await super().generate(prompt_ids, sampling, on_text)
            return replace(done, finish="stop")

    engine = Stuck(["<plan>p</plan><think>t</think><code>```py\n'</code>'"])
    trajectory = await play([], grammar="code", engine=engine)
    assert trajectory.stop is StopReason.MALFORMED
