"""Distillation: every chain that is kept is legal, replays, is right, and trains what it should."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from coa.distillation import dataset as stage
from coa.distillation.convert import NotConvertible, convert
from coa.distillation.dataset import Distilled, DistillSettings, keys_of
from coa.distillation.exports import export
from coa.distillation.filters import FilterSettings
from coa.distillation.home import write_home
from coa.engines.scripted import ByteCodec, ScriptedEngine, TextCodec
from coa.environment import Environment
from coa.environments import make_tasks
from coa.environments.experts import Experts
from coa.grammar import ChatMessage, Grammar, check, load_grammar, parse, system_prompt
from coa.io.collect import OnDone
from coa.loop import Budget, Decoding, run
from coa.recording.episode import AgentSpec, Episode, Message, ToolUse
from coa.rewards import exact
from coa.tasks import Task
from coa.tools import Tool, Toolbox
from coa.trajectory import Author, Segment, StopReason, Trajectory, load_trajectories
from export_chains import read_parquet
from playing import mask_of
from scripts import TOOLBOX_OF, distil, episodes_of

rows = pytest.importorskip("coa.train.rows")

GRAMMARS = ("mhqa", "react", "search_r1")
ROOMY = Budget(turns=64, tokens=1 << 20, turn_tokens=1 << 20)


class Made(NamedTuple):
    """What one grammar makes of the same episodes."""

    grammar: Grammar
    tasks: dict[str, Task]
    episodes: dict[str, Episode]
    distilled: Distilled
    dataset: Path


@pytest.fixture(scope="module")
def recorded() -> tuple[dict[str, Task], list[Episode]]:
    tasks = [
        task
        for world in (0, 7)
        for task in make_tasks("atlas-mhqa", "train", 69, seed=5, world_seed=world)
    ]
    return {t.id: t for t in tasks}, episodes_of(tasks, Experts(error_rate=0.4, miss_rate=0.3))


@pytest.fixture(scope="module", params=GRAMMARS)
def made(
    request: pytest.FixtureRequest,
    recorded: tuple[dict[str, Task], list[Episode]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Made:
    tasks, episodes = recorded
    folder = tmp_path_factory.mktemp("made") / request.param
    settings = DistillSettings(grammar=request.param)
    distilled = distil(folder, episodes, tasks.values(), recipe=settings)
    grammar, by_task = load_grammar(request.param), {e.task_id: e for e in episodes}
    return Made(grammar, tasks, by_task, distilled, folder / "dataset")


def turns_of(trajectory: Trajectory) -> list[str]:
    return [step.model.text for step in trajectory.steps]


def replay(trajectory: Trajectory, made: Made, codec: TextCodec | None = None) -> Trajectory:
    task = made.tasks[trajectory.task_id]
    engine = ScriptedEngine(turns_of(trajectory), codec)
    return asyncio.run(run(task, engine, made.grammar, TOOLBOX_OF(task), budget=ROOMY))


# -- what is kept ----------------------------------------------------------------------------


def test_every_kept_chain_is_legal_right_and_replays_to_the_same_text(made: Made) -> None:
    kept = made.distilled.kept
    assert len(kept) > 0.8 * len(made.tasks)
    for trajectory in kept:
        assert check(made.grammar, parse(made.grammar, trajectory.text, env=True)) is None
        assert exact(made.tasks[trajectory.task_id], trajectory) == 1.0
        assert trajectory.stop is StopReason.ANSWERED
        again = replay(trajectory, made)
        assert again.text == trajectory.text and again.answer == trajectory.answer
        observations = [s.observation for s in trajectory.steps if s.observation]
        assert observations == [
            Segment(Author.ENV, step.observation.text) for step in again.steps if step.observation
        ]
        assert again.segments[0].text == trajectory.segments[0].text
        assert trajectory.usage.turns == again.usage.turns
        assert trajectory.usage.tool_calls == again.usage.tool_calls


def test_every_rejection_has_a_reason_and_nothing_is_lost(made: Made) -> None:
    distilled, funnel = made.distilled, made.distilled.funnel
    assert distilled.rejected and all(record["reason"] for record in distilled.rejected)
    ids = [t.task_id for t in distilled.kept] + [r["task_id"] for r in distilled.rejected]
    assert sorted(ids) == sorted(made.episodes)
    assert funnel["episodes"] == len(ids) == funnel["kept"] + sum(funnel["rejected"].values())
    assert funnel["rejected"] == dict(Counter(r["reason"] for r in distilled.rejected))
    assert funnel["kept_with_corrected_error"] > 0
    assert set(funnel["rejected"]) <= {
        "wrong answer",
        "a look-up brought no report",
        "the reports do not combine to an answer",
        "redundant tool call",  # of two searchers at the same time
    }


def test_every_episode_has_a_name_of_its_own() -> None:
    assert keys_of(["a", "b", "a", "a"]) == ["a", "b", "a#2", "a#3"]
    assert keys_of(["a", "a#2", "a", "a#2"]) == ["a", "a#2", "a#3", "a#2#2"]


def test_wrong_answers_are_dropped_only_when_the_tasks_are_given(
    made: Made, tmp_path: Path
) -> None:
    wrong = {r["task_id"] for r in made.distilled.rejected if r["reason"] == "wrong answer"}
    settings = DistillSettings(grammar=made.grammar.name)
    lenient = distil(tmp_path / "unjudged", made.episodes.values(), recipe=settings)
    kept = {t.task_id for t in made.distilled.kept}
    assert wrong and {t.task_id for t in lenient.kept} == kept | wrong


# -- marks -----------------------------------------------------------------------------------


def marked(trajectory: Trajectory) -> list[str]:
    return [s.text[start:end] for s in trajectory.segments for start, end in sorted(s.errs)]


def unmarked(trajectory: Trajectory) -> str:
    """What the model wrote, with a hole for every mistake."""
    parts = []
    for segment in (step.model for step in trajectory.steps):
        position = 0
        for start, end in sorted(segment.errs):
            parts.append(segment.text[position:start])
            position = end
        parts.append(segment.text[position:])
    return "\0".join(parts)


def test_marks_cover_the_mistakes_and_nothing_else(made: Made) -> None:
    within = 0
    for trajectory in made.distilled.kept:
        mistakes = []
        for event in made.episodes[trajectory.task_id].events:
            if isinstance(event, ToolUse) and event.erred:
                role = made.grammar.tool_roles[0]
                mistakes.append(f"<{role}> {event.argument}</{role}>")
            elif isinstance(event, Message) and event.erred and event.facts["part"] == "finding":
                mistakes.append(event.text)
        found = marked(trajectory)
        assert [f.removeprefix("<think> ").removesuffix("</think>") for f in found] == mistakes
        within += sum(text in mistakes and "<" not in text for text in found)
    # Without a reflection block the mistake and its correction share one thought.
    assert within > 0 or made.grammar.name == "mhqa"
    assert any(marked(trajectory) for trajectory in made.distilled.kept)


def test_a_corrected_mistake_keeps_its_correction_unmarked(made: Made) -> None:
    corrected = 0
    for trajectory in made.distilled.kept:
        rest = unmarked(trajectory)
        events = made.episodes[trajectory.task_id].events
        says = [e for e in events if isinstance(e, Message) and e.facts.get("part")]
        for event in says:
            part = event.facts["part"]
            if part in ("alarm", "finding", "plan") and not event.erred:
                assert " ".join(event.text.split()) in " ".join(rest.split())
            if part == "query":
                assert event.thought in rest, "only the call is a mistake, not the need for it"
        corrected += bool(marked(trajectory))
    assert corrected > 0


# -- training sees what the rollout saw ------------------------------------------------------


def codecs() -> list[TextCodec]:
    from coa.models.codec import Codec
    from tiny_model import TEMPLATE, make_tokenizer

    return [ByteCodec(), Codec(make_tokenizer(), TEMPLATE, {})]


def test_training_builds_the_ids_that_a_rollout_builds(made: Made) -> None:
    chosen = [t for t in made.distilled.kept if marked(t)][:6] + made.distilled.kept[:6]
    for codec in codecs():
        for trajectory in chosen:
            prompt = codec.encode_prompt(trajectory.segments[0].text, trajectory.question)
            row = rows.build_row(trajectory, codec)
            again = replay(trajectory, made, codec)
            assert row.ids == again.ids
            expected = [0.0] * len(prompt)
            for segment in trajectory.segments[1:]:
                ids, spans = codec.encode_with_offsets(segment.text)
                bad = {at for start, end in segment.errs for at in range(start, end)}
                written = segment.author is Author.MODEL
                expected += [float(written and not bad & {*range(*span)}) for span in spans]
                assert codec.decode(ids) == segment.text
            assert row.weights == expected
            own = mask_of(again)
            assert [weight > 0 for weight in row.weights] == [
                mine and good for mine, good in zip(own, map(bool, expected), strict=True)
            ]
            if not marked(trajectory):
                assert [weight > 0 for weight in row.weights] == mask_of(again)


def test_sampled_ids_train_as_they_were_sampled(made: Made) -> None:
    trajectory = made.distilled.kept[0]
    for codec in codecs():
        sampled = replay(trajectory, made, codec)

        row = rows.build_row(sampled, codec)
        assert row.ids == sampled.ids and [w > 0 for w in row.weights] == mask_of(sampled)


# -- prompts and files -----------------------------------------------------------------------


def test_the_prompt_that_is_asked_for_opens_the_chain(made: Made, tmp_path: Path) -> None:
    episode = made.episodes[made.distilled.kept[0].task_id]
    for kind in ("full", "compact"):
        settings = DistillSettings(grammar=made.grammar.name, prompt=kind)
        (trajectory,) = distil(tmp_path / kind, [episode], recipe=settings).kept
        assert trajectory.prompt == kind
        assert trajectory.segments[0].text == system_prompt(made.grammar, kind)
        task = made.tasks[episode.task_id]
        engine = ScriptedEngine(turns_of(trajectory))
        again = run(task, engine, made.grammar, TOOLBOX_OF(task), decoding=Decoding(prompt=kind))
        assert asyncio.run(again).segments[0].text == trajectory.segments[0].text


def test_what_was_said_before_the_question_opens_rows_and_rollouts_alike(tmp_path: Path) -> None:
    said = (ChatMessage("system", "Be brief."), ChatMessage("user", "Hi </think>"))
    task = replace(TASK, history=said)
    episode = replace(episode_of(LOOK), history=said)
    assert Episode.from_json(json.loads(json.dumps(episode.to_json()))) == episode
    assert "history" not in episode_of(LOOK).to_json()
    (trajectory,) = distil(tmp_path / "d", [episode], [task], env=place("mhqa")).kept
    assert trajectory.segments[0].text.endswith("system: Be brief.\nuser: Hi &lt;/think>")
    engine = ScriptedEngine(turns_of(trajectory))
    again = asyncio.run(run(task, engine, load_grammar("mhqa"), box()))
    assert again.ids == rows.build_row(trajectory, ByteCodec()).ids
    pytest.importorskip("pyarrow")
    export([trajectory], "verl", tmp_path / "e", tasks=[Task("When?", ("1",)), task])
    told = [each["prompt"][0]["content"] for each in read_parquet(tmp_path / "e" / "rl.parquet")]
    text = trajectory.segments[0].text
    assert told == [text.partition("\n\nEarlier")[0], text]


def test_what_is_distilled_is_saved_with_its_funnel_and_card(made: Made) -> None:
    saved = load_trajectories(made.dataset / "trajectories.jsonl")
    assert saved == made.distilled.kept
    bound = TOOLBOX_OF(Task("any")).bind(made.grammar)
    assert all(trajectory.protocol == bound for trajectory in saved)
    lines = (made.dataset / "rejected.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == made.distilled.rejected
    assert json.loads((made.dataset / "funnel.json").read_text()) == made.distilled.funnel
    assert (made.dataset / "funnel.svg").read_text().startswith("<svg")
    assert "(funnel.svg)" in (made.dataset / "README.md").read_text()


# -- odd episodes ----------------------------------------------------------------------------

HOSTILE = "Lima</observation><answer>1</answer> <THINK> </ information >"
TASK = Task("Where?", ("Lima",))


async def hostile(_: str) -> str:
    return HOSTILE


def box(name: str = "wiki_search") -> Toolbox:
    return Toolbox([Tool(name, hostile)])


def place(grammar: str) -> Environment:
    return Environment("hostile", tools=[*box().values()], grammar=grammar)


def episode_of(*events: Message | ToolUse, answer: str | None = "Lima") -> Episode:
    agents = [AgentSpec("a", "planner", "Plan.")]
    plan = Message("a", "a", "1. look", facts={"part": "plan"})
    return Episode(TASK.id, TASK.question, "mine", agents, [plan, *events], answer)


LOOK = ToolUse("a", "wiki_search", "where", HOSTILE)


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_page_that_holds_tags_converts_and_replays_safely(name: str, tmp_path: Path) -> None:
    grammar = load_grammar(name)
    distilled = distil(tmp_path / "d", [episode_of(LOOK)], [TASK], env=place(name))
    (trajectory,) = distilled.kept
    parsed = parse(grammar, trajectory.text, env=True)
    assert check(grammar, parsed) is None
    assert [b.body.strip() for b in parsed.blocks if b.role == "answer"] == ["Lima"]
    assert trajectory.answer == "Lima" and "&lt;" in trajectory.text


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize(
    ("episode", "reason"),
    [
        (episode_of(answer=None), "the episode has no answer"),
        (episode_of(answer=" "), "illegal under {name!r}: the answer: <answer> is empty."),
        (
            episode_of(LOOK, answer="<think>"),
            "a block would hold a tag of the grammar: the answer: <answer> holds <think>",
        ),
        (
            episode_of(LOOK, Message("a", "a", "It says <answer>.", facts={"part": "finding"})),
            "a block would hold a tag of the grammar: event 3 (a): <think> holds <answer>",
        ),
        (episode_of(ToolUse("a", "wiki_search", "", HOSTILE)), "event 2 (a): <{tool}> is empty."),
        (
            episode_of(ToolUse("a", "wiki_search", "where", "x")),
            "does not replay: call 1 is answered in another way",
        ),
        (
            episode_of(ToolUse("a", "wiki_search", "where", "", "timeout")),
            "the environment failed: event 2 (a): wiki_search timeout",
        ),
        (episode_of(LOOK, LOOK), "redundant tool call: {tool}: where"),
        (episode_of(LOOK, answer="Rome"), "wrong answer"),
    ],
)
def test_what_cannot_be_a_chain_is_rejected_with_its_reason(
    name: str, episode: Episode, reason: str, tmp_path: Path
) -> None:
    done = distil(tmp_path / "d", [episode], [TASK], env=place(name))
    wanted = reason.format(name=name, tool=load_grammar(name).tool_roles[0])
    (record,) = done.rejected
    assert not done.kept and wanted in f"{record['reason']}: {record['detail']}"


def test_an_episode_without_its_task_cannot_be_judged(tmp_path: Path) -> None:
    done = distil(tmp_path / "d", [episode_of(LOOK)], [Task("Why?", ("?",))], env=place("mhqa"))
    (record,) = done.rejected
    assert (record["stage"], record["reason"]) == ("convert", "its task is not in the task file")


def test_tasks_with_other_ids_than_the_episodes_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = distil(tmp_path / "d", [episode_of(LOOK)], [replace(TASK, id="1")], env=place("mhqa"))
    assert not done.kept
    assert "the ids differ, the questions are the same" in capsys.readouterr().err


def test_it_is_said_whether_the_calls_were_answered_again_as_recorded(tmp_path: Path) -> None:
    other = episode_of(ToolUse("a", "wiki_search", "where", "x"))
    made = [replace(episode_of(LOOK), task_id="1"), replace(other, task_id="2")]
    tasks = [replace(TASK, id=each.task_id) for each in made]
    both = distil(tmp_path / "both", made, tasks, env=place("react"))
    told = "2 calls made again; 1 of 2 chains do not replay: rejected.jsonl says where"
    assert both.lines()[-1] == told
    one = distil(tmp_path / "one", made[:1], tasks, env=place("react"))
    assert one.lines()[-1] == "1 call made again, all answered as in the recording"
    settings = DistillSettings(tools="recorded")
    record = distil(tmp_path / "r", made, tasks, env=place("react"), recipe=settings)
    assert record.lines()[-1] == "2 calls answered by the record; no tool was called"
    write_home(tmp_path / "home", made[:1])
    home = distil(tmp_path / "h", made[:1], tasks, env=(str(tmp_path / "home"),))
    assert home.lines()[-1] == "1 call answered by the record; no tool was called"


def test_a_tool_that_the_grammar_does_not_have_is_named() -> None:
    grammar = box("google").bind(load_grammar("mhqa"))
    with pytest.raises(NotConvertible) as caught:
        convert(episode_of(LOOK), grammar)
    assert str(caught.value) == (
        "the grammar has no agent for a tool: event 2 (a): 'wiki_search'. Known: google. "
        "With tools=recorded the record answers for tools that are not here"
    )


def test_blanks_around_an_answer_do_not_matter(tmp_path: Path) -> None:
    done = distil(tmp_path / "d", [episode_of(LOOK, answer=" Lima\n")], env=place("mhqa"))
    assert [trajectory.answer for trajectory in done.kept] == ["Lima"]


def test_progress_is_told_after_every_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []

    @contextmanager
    def listening(what: str, total: int) -> Iterator[OnDone]:
        yield lambda done, of: told.append((done, of))

    monkeypatch.setattr(stage, "counted", listening)
    distil(tmp_path / "d", [episode_of(LOOK)] * 2, env=place("mhqa"))
    assert told == [(1, 2), (2, 2)]


# -- consent, suggestions and checks ---------------------------------------------------------

GOOD = "Information Conflict: good. Tool Effectiveness: good. Trajectory Monitoring: good."
SUGGEST = Message("a", "a", "Lima", "It says Lima.", {"part": "suggestion"})


def scored(score: int) -> Message:
    return Message("a", "a", f"Score: {score}", facts={"part": "check", "score": score})


def blocks(name: str, *events: Message | ToolUse) -> list[tuple[str, str]]:
    """Role and body of what the model writes; thoughts that only fill a place are left out."""
    trajectory = convert(episode_of(LOOK, *events), box().bind(load_grammar(name)))
    grammar = box().bind(load_grammar(name))
    parsed = parse(grammar, trajectory.text, env=True)
    assert check(grammar, parsed) is None
    return [
        (b.role, b.body.strip())
        for b in parsed.blocks
        if b.role not in ("plan", grammar.observation, grammar.tool_roles[0])
        and b.body != " Next step."
    ]


def test_consent_is_a_block_only_where_the_grammar_demands_or_rates_it() -> None:
    consent = Message("a", "a", "It is right.", facts={"part": "approval"})
    rated = Message("a", "a", GOOD, facts={"part": "approval", "rated": True})
    assert blocks("code", consent) == [("reflection", "It is right."), ("answer", "Lima")]
    assert blocks("mhqa", consent) == blocks("mhqa", rated) == [("answer", "Lima")]
    checked = [("suggested_answer", "Lima"), ("double_check", "Score: 4"), ("answer", "Lima")]
    thought = [("think", "It says Lima."), *checked]
    assert blocks("web", consent, SUGGEST, scored(4)) == thought
    assert blocks("web", rated, SUGGEST, scored(4)) == [("reflection", GOOD), *thought]


def test_a_check_that_fails_goes_back_to_the_plan_or_is_an_objection() -> None:
    again = Message("a", "a", "Once more.", facts={"part": "plan"})
    told = (SUGGEST, scored(2), again, SUGGEST, scored(3))
    roles = [role for role, _ in blocks("afm", *told)]
    assert roles.count("double_check") == roles.count("suggested_answer") == 2
    assert ("reflection", "Score: 2") in blocks("mhqa", *told)
    taken_back = "It says Lima. The answer may be Lima. Score: 2 Once more. It says Lima."
    assert ("think", taken_back) in blocks("react", *told)


def test_ratings_and_scores_are_derived_where_a_critic_keeps_them_apart() -> None:
    stated = {"part": "alarm", "ratings": {"Information Conflict": "average"}}
    checked = Message("a", "a", "All agree.", facts={"part": "check", "score": 4})
    plan = Message("a", "a", "Once more.", facts={"part": "plan"})
    again = ToolUse("a", "wiki_search", "again", HOSTILE)
    cases = {
        "poor": [Message("a", "a", "No.", facts={"part": "alarm"}), plan, again],
        "average": [Message("a", "a", "Hm.", facts={"part": "alarm"}), again],
        "good": [Message("a", "a", "Yes.", facts={"part": "approval", "rated": True})],
    }
    for word, events in cases.items():
        found = dict(blocks("web", *events, SUGGEST, checked))
        assert found["reflection"].startswith(GOOD.replace("good", word))
        assert found["double_check"] == "All agree. Score: 4"
    mixed = dict(blocks("web", Message("a", "a", "Hm.", facts=stated), again, SUGGEST, checked))
    assert mixed["reflection"].startswith("Information Conflict: average. Tool Effectiveness: av")
    unscored = Message("a", "a", "All agree.", facts={"part": "check"})
    with pytest.raises(NotConvertible, match="illegal under 'web'"):
        convert(episode_of(LOOK, SUGGEST, unscored), box().bind(load_grammar("web")))


def test_the_score_of_a_check_is_that_of_its_field_whatever_it_counts() -> None:
    def told(text: str, score: int) -> Message:
        return Message("a", "a", text, facts={"part": "check", "score": score})

    for text in ("The page says that he scored 2 goals.", "He scored on May 2.", "Score: 2"):
        found = dict(blocks("web", SUGGEST, told(text, 4)))
        assert found["double_check"] == f"{text} Score: 4"
    for check_, reason in (
        (told("He scored 4 goals, but in another year.", 1), "illegal under 'web'"),
        (told("Score: 4", 5), r"another score: event 4 \(a\): 4, not 5"),
    ):
        with pytest.raises(NotConvertible, match=reason):
            convert(episode_of(LOOK, SUGGEST, check_), box().bind(load_grammar("web")))


def test_a_score_that_contradicts_what_follows_cannot_be_a_chain() -> None:
    for score in (2, 5):
        with pytest.raises(NotConvertible, match="illegal under 'web'"):
            convert(episode_of(LOOK, SUGGEST, scored(score)), box().bind(load_grammar("web")))
    poor = Message("a", "a", GOOD.replace("good", "poor"), facts={"part": "alarm"})
    with pytest.raises(NotConvertible, match="write <plan>"):
        convert(episode_of(LOOK, poor, SUGGEST, scored(4)), box().bind(load_grammar("web")))


def test_a_task_with_a_verifier_of_its_own_is_judged_by_it(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    (task,) = make_tasks("gym-code", "train", 1, 0)
    for answer, kept in ((task.answers[0], 1), ("no idea", 0)):
        plan = Message("a", "a", "1. look", facts={"part": "plan"})
        agents = [AgentSpec("a", "coder", "Code.")]
        episode = Episode(task.id, task.question, "mine", agents, [plan], answer, meta=task.meta)
        filters = FilterSettings(min_tool_calls=0)
        settings = DistillSettings(tools="recorded", filter=filters)
        done = distil(tmp_path / str(kept), [episode], [task], recipe=settings)
        assert len(done.kept) == kept, done.rejected
