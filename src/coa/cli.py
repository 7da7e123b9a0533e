"""The command line: parse, call, print.

Results go to stdout, progress and notes to stderr; `--json` prints one JSON object on stdout and
nothing else there. A mistake of the user is one line and exit code 2.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from coa.cli_datasets import add_datasets
from coa.cli_options import (
    CacheOption,
    ConstrainFlag,
    CorpusOption,
    ExpireOption,
    GrammarOption,
    JsonFlag,
    ModelOption,
    ModeOption,
    SeedOption,
    SessionFlag,
    UnsafeFlag,
    emit,
    note,
)
from coa.cli_things import add_things
from coa.errors import CoaError, UsageError

app = typer.Typer(
    name="coa",
    help="Turn a multi-agent system into one model: record, distil, train, measure, ask.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
add_things(app)
add_datasets(app)


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
    if trajectory.failed_outside:
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
def sft(
    recipe: Annotated[Path, typer.Argument(help="A TOML recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="a.b=value ...")] = None,
    preview: Annotated[
        bool, typer.Option("--preview", help="Show rows, their mask and figures; train nothing.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Try two parts, say what all takes; write nothing.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Fine-tune a model on trajectories; the same command again continues."""
    from coa.display import console
    from coa.train.stage import plan_from_recipe, preview_from_recipe, sft_from_recipe

    if preview:
        report = preview_from_recipe(recipe, overrides or [], None if as_json else console())
        if as_json:
            emit(report.to_json())
    elif dry_run:
        plan = plan_from_recipe(recipe, overrides or [])
        if as_json:
            emit(plan.to_json())
        else:
            print("\n".join(plan.lines()))
    else:
        _say_adapter(sft_from_recipe(recipe, overrides or [], note), as_json)


@app.command()
def rl(
    recipe: Annotated[Path, typer.Argument(help="A TOML recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="a.b=value ...")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Improve a model on tasks by what its own rollouts earn; the same command again continues."""
    from coa.train.rl_stage import rl_from_recipe

    _say_adapter(rl_from_recipe(recipe, overrides or [], note), as_json)


def _say_adapter(adapter: Path, as_json: bool) -> None:
    """Print where the result is; of several processes only the first does."""
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        emit({"adapter": str(adapter)})
    else:
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
        str, typer.Option(help="An expression, as judge*format; auto suits the tasks.")
    ] = "auto",
    judge: Annotated[str, typer.Option(help="openai:NAME@URL, for the reward 'judge'.")] = "",
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
        judge=judge,
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
        str, typer.Argument(help="What to measure: parse, rl, rollout, sandbox, search or sft.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Of rl and sft: name=value ...")
    ] = None,
    rollouts: Annotated[str, typer.Option(help="Of rollout: how many at once.")] = "32,64",
    as_json: JsonFlag = False,
) -> None:
    """Measure speed against peers, in the same run."""
    from coa.evaluate.bench import run_bench

    result, lines = run_bench(name, rollouts, note, overrides or [])
    if as_json:
        emit(result)
    else:
        print("\n".join(lines))


@app.command()
def study(
    name: Annotated[str, typer.Argument(help="cost: a team against its chain.")],
    out: Annotated[Path, typer.Option(help="Directory to write or continue.")] = Path("runs"),
    n: Annotated[int, typer.Option(min=1, help="Tasks of each set.")] = 600,
    prices: Annotated[
        str, typer.Option(help="Per million tokens: input, cached input, output; an example.")
    ] = "1,0.1,5",
    seed: SeedOption = 5,
    as_json: JsonFlag = False,
) -> None:
    """Put a claim to the test: an experiment with intervals."""
    from coa.evaluate.cost_counts import parse_price
    from coa.evaluate.cost_lines import cost_lines
    from coa.evaluate.study_cost import study_cost

    if name != "cost":
        raise UsageError(f"{name!r} is not a study; expected cost.")
    result = study_cost(out / name, n=n, seed=seed, price=parse_price(prices), note=note)
    if as_json:
        emit(result)
    else:
        print("\n".join(cost_lines(result)))
