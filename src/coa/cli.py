"""The command line: parse, call, print.

Results go to stdout, progress and notes to stderr; `--json` prints one JSON object on stdout and
nothing else there. A mistake of the user is one line and exit code 2.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from coa.errors import CoaError, UsageError

app = typer.Typer(
    name="coa",
    help="Turn a multi-agent system into one model: record, distil, train, measure, ask.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
grammar_app = typer.Typer(help="Look at protocols.", no_args_is_help=True)
model_app = typer.Typer(help="Get and list models.", no_args_is_help=True)
tasks_app = typer.Typer(help="Make task files.", no_args_is_help=True)
app.add_typer(grammar_app, name="grammar")
app.add_typer(model_app, name="model")
app.add_typer(tasks_app, name="tasks")

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
GrammarOption = Annotated[
    str, typer.Option(help="Preset name or a .toml file; auto is what the model was trained on.")
]
ConstrainFlag = Annotated[
    bool, typer.Option("--constrain", help="Sample only what the grammar allows.")
]
ModelOption = Annotated[str, typer.Option(help="Model reference; see `coa model list`.")]
SeedOption = Annotated[int, typer.Option(help="Seed of every random choice.")]


def main() -> None:
    """Entry point of the `coa` command."""
    try:
        app()
    except CoaError as error:
        print(f"coa: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except SystemExit as ended:
        if ended.code == 130:  # what typer makes of Ctrl-C
            print("coa: interrupted.", file=sys.stderr)
        raise
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(141) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"coa: {where}{error.strerror or error}.", file=sys.stderr)
        raise SystemExit(2) from None


def emit(record: Any) -> None:
    """Print one JSON object."""
    print(json.dumps(record, ensure_ascii=False))


def note(line: str) -> None:
    """Say something that is not a result."""
    print(line, file=sys.stderr)


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    model: ModelOption = "auto",
    grammar: GrammarOption = "auto",
    corpus: Annotated[str, typer.Option(help="atlas, or atlas:K for world K.")] = "atlas",
    prompt: Annotated[str, typer.Option(help="full or compact; auto fits the model.")] = "auto",
    temperature: float = 0.0,
    constrain: ConstrainFlag = False,
    seed: SeedOption = 0,
    out: Annotated[Path | None, typer.Option(help="Append the trajectory to this file.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Answer a question, showing the chain of agents as it is written."""
    from coa.asking import ask_once

    if not question.strip():
        raise UsageError('the question is empty. Example: coa ask "What is the capital of Peru?"')
    trajectory = asyncio.run(
        ask_once(
            question,
            model=model,
            grammar_name=grammar,
            corpus=corpus,
            prompt=prompt,
            temperature=temperature,
            constrain=constrain,
            seed=seed,
            out_path=out,
            quiet=as_json,
        )
    )
    if as_json:
        emit({**trajectory.to_json(), "seconds": trajectory.seconds})
    if trajectory.stop is not None and trajectory.stop.environment:
        raise SystemExit(1)


@app.command()
def doctor(as_json: JsonFlag = False) -> None:
    """Say what this machine can do, and what is missing."""
    from coa.doctor import examine, print_findings

    findings = examine()
    if as_json:
        emit(findings)
    else:
        print_findings(findings)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A trajectories.jsonl, or its directory.")],
    n: Annotated[int, typer.Option(min=1, help="How many to show.")] = 3,
    task: Annotated[str, typer.Option(help="Only the task with this id.")] = "",
    grammar: Annotated[str, typer.Option(help="A .toml file, when it is no preset.")] = "",
) -> None:
    """Print chains from a trajectories file."""
    from coa.display import console, print_chain
    from coa.trajectory import load_trajectories

    chosen = [t for t in load_trajectories(file) if not task or t.task_id == task][:n]
    if not chosen:
        raise UsageError(f"{file}: nothing to show{f' for task {task!r}' if task else ''}.")
    out = console()
    for trajectory in chosen:
        print_chain(out, trajectory, grammar)
        out.print()


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A trajectories.jsonl, or its directory.")],
    n: Annotated[int, typer.Option(min=1, help="How many to show.")] = 1,
) -> None:
    """Show the loss mask: what is trained, what is a marked mistake, what is not trained."""
    from coa.display import console, print_mask
    from coa.trajectory import load_trajectories

    out = console()
    for trajectory in load_trajectories(file)[:n]:
        print_mask(out, trajectory)


@grammar_app.command("show")
def grammar_show(
    name: Annotated[str, typer.Argument(help="Preset name or a .toml file.")],
    prompt: Annotated[str, typer.Option(help="Print this prompt: full or compact.")] = "",
    mermaid: Annotated[bool, typer.Option(help="Print a Mermaid diagram.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show a protocol: its blocks, what may follow what, its prompts."""
    from coa.display import console, print_grammar
    from coa.protocol import load_grammar, system_prompt

    grammar = load_grammar(name)
    if as_json:
        import dataclasses

        emit(dataclasses.asdict(grammar) | {"stop_strings": grammar.stop_strings})
    elif prompt:
        if prompt not in ("full", "compact"):
            raise UsageError(f"--prompt {prompt!r}: expected full or compact.")
        print(system_prompt(grammar, "full" if prompt == "full" else "compact"))
    elif mermaid:
        print(grammar.mermaid())
    else:
        print_grammar(console(), grammar)


@model_app.command("pull")
def model_pull(
    ref: Annotated[str, typer.Argument(help="Model reference.")] = "smollm2-135m",
) -> None:
    """Download a model into the cache, check its hash and unpack it."""
    from coa.engines.store import pull

    print(pull(ref, progress=note))


@model_app.command("list")
def model_list(as_json: JsonFlag = False) -> None:
    """List the models that are here and the forms of a model reference."""
    from coa.engines.store import describe_models

    models = describe_models()
    if as_json:
        emit({"models": models})
        return
    for each in models:
        print(f"{each['ref']:<28} {each['state']:<12} {each['about']}")


@tasks_app.command("make")
def tasks_make(
    out: Annotated[Path, typer.Option(help="The file to write.")],
    task_set: Annotated[str, typer.Option("--set", help="Which set: atlas-mhqa.")] = "atlas-mhqa",
    split: Annotated[str, typer.Option(help="train, heldout_entity or heldout_family.")] = "train",
    n: Annotated[int, typer.Option(help="How many tasks.")] = 100,
    seed: SeedOption = 0,
    world_seed: Annotated[int, typer.Option(help="0 is the real world; K invents one.")] = 0,
    families: Annotated[str, typer.Option(help="Only these families, by comma.")] = "",
) -> None:
    """Make a file of tasks with gold answers."""
    from coa.tasks import make_tasks

    chosen = [name.strip() for name in families.split(",") if name.strip()] or None
    tasks = make_tasks(task_set, split, n, seed, world_seed=world_seed, families=chosen)
    tasks.save(out)
    note(f"{len(tasks)} tasks in {out}")


@app.command()
def record(
    tasks: Annotated[Path, typer.Option(help="Task file (JSONL or CSV).")],
    out: Annotated[Path, typer.Option(help="Episodes file to write or continue.")],
    teacher: Annotated[str, typer.Option(help="experts or module:attribute.")] = "experts",
    error_rate: Annotated[float, typer.Option(help="How often the experts err.")] = 0.1,
    seed: SeedOption = 0,
) -> None:
    """Record a multi-agent system at work on tasks."""
    from coa.progress import counted
    from coa.runs import claim
    from coa.tasks.task import TaskSet
    from coa.teachers import load_teacher, record_all
    from coa.tools.search import toolbox_for

    loaded = TaskSet.load(tasks)
    options = {"error_rate": error_rate} if teacher == "experts" else {}
    agents = load_teacher(teacher, **options)
    public = TaskSet(tuple(task.public() for task in loaded)).fingerprint()
    claim(out, {"teacher": teacher, **options, "seed": seed, "tasks": public})
    with counted("record", len(loaded)) as on_done:
        episodes = asyncio.run(
            record_all(loaded, agents, toolbox_for(), out, seed=seed, on_done=on_done)
        )
    answered = sum(episode.answer is not None for episode in episodes)
    note(f"{len(episodes)} episodes in {out}, {answered} with an answer")


@app.command()
def distill(
    episodes: Annotated[Path, typer.Option(help="Episodes file from `coa record`.")],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    grammar: Annotated[str, typer.Option(help="Preset name or a .toml file.")] = "mhqa",
    tasks: Annotated[
        Path | None, typer.Option(help="Task file with gold, to drop wrong answers.")
    ] = None,
    prompt: Annotated[str, typer.Option(help="full or compact.")] = "compact",
) -> None:
    """Turn episodes into chain-of-agents trajectories; every rejection has its reason."""
    from coa.distill.pipeline import distill as run_distill
    from coa.distill.pipeline import save_distilled
    from coa.progress import counted
    from coa.protocol import load_grammar
    from coa.tasks.task import TaskSet
    from coa.teachers.episode import load_episodes
    from coa.tools.search import toolbox_for

    if prompt not in ("full", "compact"):
        raise UsageError(f"--prompt {prompt!r}: expected full or compact.")
    loaded = load_episodes(episodes)
    gold = {task.id: task for task in TaskSet.load(tasks)} if tasks else None
    if gold is None:
        note("no --tasks: answers are not judged, so wrong ones are kept")
    with counted("distil", len(loaded)) as on_done:
        distilled = asyncio.run(
            run_distill(
                loaded,
                load_grammar(grammar),
                toolbox_for(),
                gold,
                prompt="full" if prompt == "full" else "compact",
                on_done=on_done,
            )
        )
    save_distilled(out, distilled)
    if not distilled.kept:
        reasons = ", ".join(distilled.funnel["rejected"])
        raise UsageError(f"no episode was kept: {reasons}. See {out}/rejected.jsonl.")
    print(json.dumps(distilled.funnel, indent=2))


@app.command()
def sft(
    recipe: Annotated[Path, typer.Argument(help="A TOML recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="a.b=value ...")] = None,
) -> None:
    """Fine-tune a model on trajectories; the same command again continues."""
    from coa.train.stage import sft_from_recipe

    adapter = sft_from_recipe(recipe, overrides or [], note)
    print(adapter)


@app.command("eval")
def evaluate(
    tasks: Annotated[Path, typer.Option(help="Task file with gold answers.")],
    out: Annotated[Path, typer.Option(help="Run directory to write or continue.")],
    model: ModelOption = "auto",
    grammar: GrammarOption = "auto",
    k: Annotated[int, typer.Option(help="Rollouts per task.")] = 1,
    observations: Annotated[
        str, typer.Option(help="real; controls: withheld, wrong, closed_book.")
    ] = "real",
    prompt: Annotated[str, typer.Option(help="full or compact; auto fits the model.")] = "auto",
    temperature: float = 0.0,
    constrain: ConstrainFlag = False,
    reward: Annotated[str, typer.Option(help="exact, f1 or module:attribute.")] = "exact",
    turns: Annotated[int, typer.Option(help="Most turns of a rollout.")] = 12,
    turn_tokens: Annotated[int, typer.Option(help="Most tokens sampled in a turn.")] = 256,
    context: Annotated[int, typer.Option(help="Most tokens of a whole rollout.")] = 2048,
    concurrency: Annotated[int, typer.Option(help="Rollouts at once.")] = 96,
    memory: Annotated[float | None, typer.Option(help="Most GB for keys and values.")] = None,
    deterministic: Annotated[bool, typer.Option(help="fp32, fixed batch shapes.")] = False,
    seed: SeedOption = 0,
    as_json: JsonFlag = False,
) -> None:
    """Measure a model on tasks; every task counts, answered or not."""
    from coa.evaluate.stage import EvalSettings, run_eval

    settings = EvalSettings(
        model=model,
        tasks=str(tasks),
        grammar=grammar,
        k=k,
        observations=observations,
        prompt=prompt,
        temperature=temperature,
        constrain=constrain,
        reward=reward,
        turns=turns,
        turn_tokens=turn_tokens,
        context=context,
        concurrency=concurrency,
        memory_gb=memory,
        deterministic=deterministic,
        seed=seed,
    )
    summary = run_eval(settings, out, quiet=as_json)
    if as_json:
        emit(summary)
    else:
        from coa.display import console, print_summary

        print_summary(console(), summary, str(out))


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories of `coa eval`.")],
    as_json: JsonFlag = False,
) -> None:
    """Compare runs on the same tasks: paired differences with intervals."""
    from coa.evaluate.run import compare as compare_runs

    if len(runs) < 2:
        raise UsageError("compare needs at least two run directories.")
    result = compare_runs(runs)
    if as_json:
        emit(result)
    else:
        from coa.display import console, print_comparison

        print_comparison(console(), result)


@app.command()
def speedrun(
    out: Annotated[Path, typer.Option(help="Run directory.")] = Path("runs/speedrun"),
    recipe: Annotated[Path | None, typer.Option(help="A TOML recipe of one's own.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="a.b=value ...")] = None,
    as_json: JsonFlag = False,
) -> None:
    """The whole way on this machine: record, distil, train, measure; continues if interrupted."""
    from coa.display import console, print_speedrun
    from coa.speedrun import run_speedrun

    result = run_speedrun(out, recipe, overrides or [], note)
    if as_json:
        emit(result)
    else:
        print_speedrun(console(), result)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="What to measure: parse or rollout.")],
    rollouts: Annotated[str, typer.Option(help="Of rollout: how many at once.")] = "32,64",
    as_json: JsonFlag = False,
) -> None:
    """Measure speed against peers, in the same run."""
    from coa.evaluate.bench import run_bench

    result, lines = run_bench(name, rollouts, note)
    if as_json:
        emit(result)
    else:
        print("\n".join(lines))
