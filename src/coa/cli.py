"""The command line: parse, call, print.

Results go to stdout, progress and notes to stderr; `--json` prints one JSON object on stdout and
nothing else there. A mistake of the user is one line and exit code 2.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coa.cli_things import JsonFlag, SeedOption, add_things, emit, note
from coa.errors import CoaError, UsageError

if TYPE_CHECKING:
    from coa.tools.kits import KitSettings

app = typer.Typer(
    name="coa",
    help="Turn a multi-agent system into one model: record, distil, train, measure, ask.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
add_things(app)

GrammarOption = Annotated[
    str, typer.Option(help="Preset name or a .toml file; auto is what the model was trained on.")
]
ConstrainFlag = Annotated[
    bool, typer.Option("--constrain", help="Sample only what the grammar allows.")
]
ModelOption = Annotated[str, typer.Option(help="Model reference; see `coa model list`.")]
UnsafeFlag = Annotated[bool, typer.Option("--unsafe-code", help="Run programs WITHOUT a sandbox.")]


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


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    model: ModelOption = "auto",
    grammar: GrammarOption = "auto",
    corpus: Annotated[
        str, typer.Option(help="atlas, atlas:K, a corpus directory, or a .toml for the web.")
    ] = "atlas",
    prompt: Annotated[str, typer.Option(help="full or compact; auto fits the model.")] = "auto",
    temperature: float = 0.0,
    constrain: ConstrainFlag = False,
    unsafe_code: UnsafeFlag = False,
    seed: SeedOption = 0,
    out: Annotated[Path | None, typer.Option(help="Append the trajectory to this file.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Answer a question, showing the chain of agents as it is written."""
    from coa.asking import Asking, ask_once

    if not question.strip():
        raise UsageError('the question is empty. Example: coa ask "What is the capital of Peru?"')
    how = Asking(model, grammar, corpus, prompt, temperature, constrain, seed, unsafe_code)
    trajectory = asyncio.run(ask_once(question, how, out, quiet=as_json))
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


CorpusOption = Annotated[
    str, typer.Option(help="A corpus directory, or a .toml for the web, instead of the Atlas.")
]
CacheOption = Annotated[str, typer.Option(help="File of recorded answers of tools.")]
ModeOption = Annotated[str, typer.Option(help="live, record or replay; the latter need the file.")]
ExpireOption = Annotated[
    float | None, typer.Option(help="Recording: ask again for answers older than so many days.")
]
SessionFlag = Annotated[
    bool, typer.Option("--code-session", help="Programs of a rollout share their variables.")
]


def _kit(
    corpus: str, cache: str, mode: str, expire: float | None, session: bool, unsafe: bool
) -> KitSettings:
    from coa.tools.kits import KitSettings

    return KitSettings(
        corpus=corpus,
        cache=cache,
        mode=mode,
        expire_days=expire,
        code_session=session,
        unsafe_code=unsafe,
    )


@app.command()
def record(
    tasks: Annotated[Path, typer.Option(help="Task file (JSONL or CSV).")],
    out: Annotated[Path, typer.Option(help="Episodes file to write or continue.")],
    teacher: Annotated[str, typer.Option(help="experts or module:attribute.")] = "experts",
    error_rate: Annotated[float, typer.Option(help="How often the experts err.")] = 0.1,
    corpus: CorpusOption = "",
    tool_cache: CacheOption = "",
    tool_mode: ModeOption = "live",
    tool_expire: ExpireOption = None,
    code_session: SessionFlag = False,
    unsafe_code: UnsafeFlag = False,
    seed: SeedOption = 0,
) -> None:
    """Record a multi-agent system at work on tasks."""
    from coa.teachers.stage import run_recording

    options = {"error_rate": error_rate} if teacher == "experts" else {}
    kit = _kit(corpus, tool_cache, tool_mode, tool_expire, code_session, unsafe_code)
    episodes = run_recording(tasks, out, teacher, options, seed=seed, kit=kit)
    answered = sum(episode.answer is not None for episode in episodes)
    note(f"{len(episodes)} episodes in {out}, {answered} with an answer")


@app.command()
def distill(
    episodes: Annotated[Path, typer.Option(help="Episodes file from `coa record`.")],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    grammar: Annotated[
        str, typer.Option(help="Preset name or a .toml file; auto suits the tasks.")
    ] = "auto",
    tasks: Annotated[
        Path | None, typer.Option(help="Task file with gold, to drop wrong answers.")
    ] = None,
    prompt: Annotated[str, typer.Option(help="full or compact.")] = "compact",
    corpus: CorpusOption = "",
    tool_cache: CacheOption = "",
    tool_mode: ModeOption = "live",
    tool_expire: ExpireOption = None,
    code_session: SessionFlag = False,
    unsafe_code: UnsafeFlag = False,
) -> None:
    """Turn episodes into chain-of-agents trajectories; every rejection has its reason."""
    from coa.distill.stage import run_distillation

    if prompt not in ("full", "compact"):
        raise UsageError(f"--prompt {prompt!r}: expected full or compact.")
    distilled = run_distillation(
        episodes,
        out,
        tasks,
        grammar=grammar,
        prompt="full" if prompt == "full" else "compact",
        kit=_kit(corpus, tool_cache, tool_mode, tool_expire, code_session, unsafe_code),
    )
    if tasks is None:
        note("no --tasks: answers were not judged, so wrong ones are kept")
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
    reward: Annotated[
        str, typer.Option(help="exact, f1, gym or module:attribute; auto suits the tasks.")
    ] = "auto",
    corpus: CorpusOption = "",
    tool_cache: CacheOption = "",
    tool_mode: ModeOption = "live",
    tool_expire: ExpireOption = None,
    code_session: SessionFlag = False,
    unsafe_code: UnsafeFlag = False,
    turns: Annotated[int, typer.Option(help="Most turns of a rollout.")] = 12,
    turn_tokens: Annotated[int, typer.Option(help="Most tokens sampled in a turn.")] = 320,
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
        corpus=corpus,
        tool_cache=tool_cache,
        tool_mode=tool_mode,
        tool_expire=tool_expire,
        code_session=code_session,
        unsafe_code=unsafe_code,
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
    name: Annotated[
        str, typer.Argument(help="What to measure: parse, rollout, sandbox or search.")
    ],
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
