"""`coa study NAME`: claims put to the test, each an experiment with seeds and intervals.

A study is a question, settings, a plan with an estimate, and a function that runs its arms below a
directory. Arms are run directories of the usual stages, and finished ones are kept: a killed study
continues with the same command. With other settings the directory refuses.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from coa.errors import ModelError, UsageError
from coa.io.progress import duration
from coa.io.runs import Json, Run, write_atomic
from coa.io.settings import to_json, without_speed
from coa.lab.study_arms import (
    SEED_FILES,
    Note,
    Study,
    StudyPiece,
    TrainingStudy,
    common_settings,
    reader,
)
from coa.lab.study_cost import CostStudy, cost_lines, study_cost
from coa.lab.study_student import student_lines, student_pieces, study_student
from coa.lab.study_training import MASK, REACT, RL
from coa.lab.study_unseen import UNSEEN_TOOL
from coa.models.references import identity


def _plan_cost(settings: CostStudy) -> list[StudyPiece]:
    sets = len(settings.sets)
    return [
        StudyPiece(f"record, distil and count {settings.n} tasks", sets, settings.n * 0.05),
        *student_pieces(settings.student),
    ]


def _run_cost(settings: CostStudy, root: Path, note: Note) -> Json:
    result = study_cost(settings, root, note)
    if settings.student.model:
        result["student"] = study_student(root / "student", settings.student, note)
    return result


def _show_cost(result: Json) -> Iterable[str]:
    yield from cost_lines(result)
    if "student" in result:
        yield ""
        yield from student_lines(result["student"])


STUDIES = {
    "cost": Study(
        "what does a solved task cost a team, its chain, and a student?",
        reader(CostStudy),
        _plan_cost,
        _run_cost,
        _show_cost,
    ),
    "mask": MASK,
    "react": REACT,
    "rl": RL,
    "unseen-tool": UNSEEN_TOOL,
}
SHORT = {
    "cost": {"model": "student.model", "n": "n", "prices": "prices", "seed": "seed"},
    "unseen-tool": {"model": "model", "n": "eval.n"},
}
"""Which settings the options of the command line stand for."""
SHORT_OF_TRAINING = {"model": "sft.model", "n": "eval.n"}


def as_overrides(name: str, **options: str | int | None) -> list[str]:
    """Options of the command line as settings of the study; those left out are none."""
    find_study(name)
    known = SHORT.get(name, SHORT_OF_TRAINING)
    made = []
    for option, value in options.items():
        if value is None or value == "":
            continue
        if option not in known:
            raise UsageError(
                f"--{option} is not an option of the study {name}. It has "
                f"{', '.join(f'--{each}' for each in known)}, and settings as a.b=value."
            )
        made.append(f"{known[option]}={value}")
    return made


def find_study(name: str) -> Study:
    if name not in STUDIES:
        raise UsageError(f"{name!r} is not a study; expected {', '.join(STUDIES)}.")
    return STUDIES[name]


def plan_study(name: str, overrides: Sequence[str]) -> Json:
    """What a study would do, and how long it may take on two cores."""
    study = find_study(name)
    planned = study.plan(study.read(overrides))
    return {
        "study": name,
        "question": study.question,
        "pieces": [piece._asdict() for piece in planned],
        "seconds": round(sum(piece.times * piece.seconds for piece in planned)),
    }


def study_plan_lines(planned: Json) -> Iterable[str]:
    """What will be run and how long it may take."""
    yield f"study {planned['study']}: {planned['question']}"
    for piece in (StudyPiece(**each) for each in planned["pieces"]):
        yield f"   {piece.times:>3} x {piece.what:<48}{duration(piece.times * piece.seconds):>8}"
    total = duration(planned["seconds"])
    yield f"   about {total} on two free cores; the same command continues what is there"


def run_study(name: str, root: Path, overrides: Sequence[str], note: Note) -> Json:
    """Run a study below `root`, or continue it; returns what `NAME.json` holds."""
    study = find_study(name)
    settings = study.read(overrides)
    for line in study_plan_lines(plan_study(name, overrides)):
        note(line)
    recipe = to_json(settings)
    result: Json = {"study": name, "question": study.question, "settings": recipe}
    with ExitStack() as held:
        if name != "cost":  # its files claim what they were made with themselves
            by_seed = isinstance(settings, TrainingStudy)  # it keeps a file for each of its seeds
            brought = SEED_FILES if by_seed else ""
            counting = common_settings if by_seed else without_speed
            made, stage = counting(recipe), f"study {name}"
            inputs = _models(recipe)
            opened = Run.open(root, stage, made, inputs, 0, counting=counting, brought=brought)
            held.enter_context(opened)
        result |= study.run(settings, root, note)
        write_atomic(root / f"{name}.json", json.dumps(result, indent=2) + "\n")
    return result


def _models(recipe: Json) -> dict[str, str]:
    """Hashes of the models that a study starts from."""
    found: dict[str, str] = {}
    for name in ("model", "base"):
        ref = recipe.get(name) or (recipe.get("sft", {}).get("model") if name == "base" else "")
        if ref:
            try:
                found |= {f"{name} {what}": each for what, each in identity(ref).items()}
            except ModelError as wrong:
                raise UsageError(f"{name}: {wrong}") from wrong
    return found


def study_lines(result: Json) -> Iterable[str]:
    """A result for people."""
    study = find_study(result["study"])
    if result["study"] != "cost":
        yield f"{result['study']}: {result['question']}"
        rerun = next(iter(result["measures"].values()))["rerun"]
        drawn = "tasks and seeds" if rerun else "tasks"
        yield f"95% intervals: bootstrap over {drawn}, differences paired by task"
        yield ""
    yield from study.show(result)
