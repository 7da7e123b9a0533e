"""Small chains made by hand, for tests of what filters and counts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coa.distillation.filters import Candidate, Filtered, FilterSettings, apply_filters
from coa.grammar import Block
from coa.trajectory import Author, Segment, StopReason, Trajectory

Said = tuple[str, str] | tuple[str, str, bool]
"""Role and body of a block, and whether it is marked as a mistake."""
PLAN: Said = ("plan", " 1. look")
LOOK: Said = ("wiki_search", " capital of Peru")
SEARCH: Said = ("web_search", " capital of Peru")
LIMA: Said = ("answer", " Lima")
GOOD = "Information Conflict: good. Tool Effectiveness: good. Trajectory Monitoring: good."
POOR = GOOD.replace("Effectiveness: good", "Effectiveness: poor")


def chain(
    said: Sequence[Said],
    grammar: str = "mhqa",
    question: str = "What is the capital of Peru?",
    task_id: str = "t1",
    seen: Sequence[str] = (),
    **fields: Any,
) -> Trajectory:
    """A trajectory of these blocks; after each call the environment says what is `seen`, in that
    order, and then 'Found.'."""
    answers = iter(seen)
    made = Trajectory(task_id, question, grammar, [Segment(Author.PROMPT, "Work.")])
    protocol = made.protocol
    turn = Segment(Author.MODEL, "")
    for role, body, *marked in said:
        if protocol.interleave and role != protocol.interleave:
            turn.text += f"<{protocol.interleave}> Next step.</{protocol.interleave}>\n"
        text = protocol.render([Block(role, body)])
        if any(marked):
            turn.errs.append((len(turn.text), len(turn.text) + len(text)))
        turn.text += text + "\n"
        if role in protocol.tool_roles:
            turn.text = turn.text.rstrip("\n")
            shown = protocol.render_observation(next(answers, "Found."), turn.text)
            made.segments += [turn, Segment(Author.ENV, shown)]
            turn = Segment(Author.MODEL, "")
    turn.text = turn.text.rstrip("\n")
    made.segments += [turn] if turn.text else []
    given = [body.strip() for role, body, *_ in said if role in protocol.of_kind("answer")]
    made.answer = given[-1] if given else None
    made.stop = StopReason.ANSWERED if given else StopReason.TURNS
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def searched(
    *queries: str, answer: str = "Lima", reflection: str = "", **fields: Any
) -> Trajectory:
    """A chain of the encyclopedia: a plan, these queries, a reflection if any, the answer."""
    said: list[Said] = [("plan", " 1. look"), *(("wiki_search", f" {each}") for each in queries)]
    said += [("reflection", f" {reflection}")] if reflection else []
    return chain([*said, ("answer", f" {answer}")], **fields)


def checked(*scores: int, answer: str = "Lima", **fields: Any) -> Trajectory:
    """A chain of the web: search, suggest, check; after a low score plan and search again."""
    said: list[Said] = []
    for number, score in enumerate(scores):
        said += [("plan", f" 1. look {number}"), ("web_search", f" capital of Peru {number}")]
        said += [("suggested_answer", f" {answer}"), ("double_check", f" Score: {score}")]
    return chain([*said, ("answer", f" {answer}")], "web", **fields)


def closing(answer: str) -> list[Said]:
    """Suggest, check and answer."""
    suggested: Said = ("suggested_answer", f" {answer}")
    return [suggested, ("double_check", " Score: 4"), ("answer", f" {answer}")]


LENIENT = FilterSettings(
    min_interactions=0,
    min_tool_calls=0,
    duplicate_similarity=0,
    keep_without_reflection=1.0,
    reflection_required=(),
    copies_of_corrected=0,
)
"""Nothing but quality is asked for."""


def filtered(
    *chains: Trajectory, settings: FilterSettings = LENIENT, score: float | None = 1.0
) -> Filtered:
    return apply_filters([Candidate(each, score) for each in chains], settings)


def reason_for(trajectory: Trajectory, settings: FilterSettings = LENIENT) -> str:
    """The reason why a right chain is dropped; empty when it is kept."""
    done = filtered(trajectory, settings=settings)
    assert len(done.kept) + len(done.notes) == 1
    return str(done.notes[0]["reason"]) if done.notes else ""
