"""The command line's measurements: evaluate, compare, benchmarks and studies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coa.cli.options import (
    CacheOption,
    ConstrainFlag,
    CorpusOption,
    EnvOption,
    ExpireOption,
    GrammarOption,
    JsonFlag,
    ModelOption,
    ModeOption,
    SeedOption,
    SessionFlag,
    SettingsArgument,
    UnsafeFlag,
    emit,
    note,
    only_env_settings,
)
from coa.errors import UsageError


def add_measures(app: typer.Typer) -> None:
    """Put the commands of this module under the main command."""
    app.command("eval")(evaluate)
    app.command()(compare)
    app.command()(report)
    app.command()(bench)
    app.command()(study)


def evaluate(
    out: Annotated[Path, typer.Option(help="Run directory to write or continue.")],
    given: SettingsArgument = None,
    env: EnvOption = None,
    tasks: Annotated[
        Path | None, typer.Option(help="Task file with gold answers; else the environment's own.")
    ] = None,
    split: Annotated[str, typer.Option(help="Of the environment's own tasks.")] = "test",
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
    judge: Annotated[
        str, typer.Option(help="openai:NAME@URL, for the reward or the choice 'judge'.")
    ] = "",
    best_of: Annotated[
        str, typer.Option(help="Chooses between samples: double_check, judge or module:attribute.")
    ] = "double_check",
    prices: Annotated[
        str, typer.Option(help="A price table (.toml), or prices per million tokens as 1,0.1,5.")
    ] = "",
    corpus: CorpusOption = "",
    tool_cache: CacheOption = "",
    tool_mode: ModeOption = "live",
    tool_expire: ExpireOption = None,
    code_session: SessionFlag = False,
    unsafe_code: UnsafeFlag = False,
    turns: Annotated[int, typer.Option(help="Most turns of a rollout.")] = 12,
    tokens: Annotated[
        int, typer.Option(help="Most tokens sampled in all; 0: what the context has room for.")
    ] = 0,
    turn_tokens: Annotated[int, typer.Option(help="Most tokens sampled in a turn.")] = 512,
    malformed: Annotated[int, typer.Option(help="Malformed turns that are forgiven.")] = 2,
    context: Annotated[int, typer.Option(help="Most tokens of a whole rollout.")] = 3072,
    concurrency: Annotated[int, typer.Option(help="Rollouts at once.")] = 96,
    memory: Annotated[float | None, typer.Option(help="Most GB for keys and values.")] = None,
    deterministic: Annotated[bool, typer.Option(help="fp32, fixed batch shapes.")] = False,
    seed: SeedOption = 0,
    as_json: JsonFlag = False,
) -> None:
    """Measure a model on tasks; every task counts, answered or not."""
    from coa.evaluation.run import EvalSettings, run_eval

    settings = EvalSettings(
        model=model,
        env=tuple(env or ()),
        settings=only_env_settings(given),
        split=split,
        tasks=str(tasks or ""),
        grammar=grammar,
        k=k,
        observations=observations,
        prompt=prompt,
        temperature=temperature,
        constrain=constrain,
        reward=reward,
        judge=judge,
        best_of=best_of,
        prices=prices,
        corpus=corpus,
        tool_cache=tool_cache,
        tool_mode=tool_mode,
        tool_expire=tool_expire,
        code_session=code_session,
        unsafe_code=unsafe_code,
        turns=turns,
        tokens=tokens,
        turn_tokens=turn_tokens,
        malformed=malformed,
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
        from coa.evaluation.spending import load_latency
        from coa.view.terminal import console, print_summary

        print_summary(console(), summary, str(out), load_latency(out))


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories of `coa eval`.")],
    chains: Annotated[
        int, typer.Option(min=0, help="Show so many wins and losses side by side.")
    ] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Compare runs on the same tasks: paired differences with intervals."""
    from coa.evaluation.compare import compare as compare_runs

    if len(runs) < 2:
        raise UsageError("compare needs at least two run directories.")
    if as_json and chains:
        raise UsageError("--chains is for people: with --json use the ids under won and lost.")
    result = compare_runs(runs)
    if as_json:
        emit(result)
        return
    from coa.view.terminal import console, print_comparison

    out = console()
    print_comparison(out, result)
    if chains:
        from coa.evaluation.compare import print_sides

        print_sides(out, runs, result, chains)


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Runs of eval, sft, rl, distill or speedrun, in any mix.")
    ],
    out: Annotated[Path, typer.Option(help="The HTML file to write.")],
    chains: Annotated[int, typer.Option(min=0, help="Most chains on the page.")] = 200,
    title: Annotated[str, typer.Option(help="What stands at its head.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Write one HTML file on runs: tables, plots and readable chains."""
    from coa.view.report import write_report

    made = write_report(runs, out, chains=chains, title=title)
    if as_json:
        emit({"out": str(out), **made._asdict()})
    else:
        note(made.line(out))


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
    from coa.lab.bench import run_bench

    result, lines = run_bench(name, rollouts, note, overrides or [])
    if as_json:
        emit(result)
    else:
        print("\n".join(lines))


def study(
    name: Annotated[
        str, typer.Argument(help="What to test: cost, mask, react, rl or unseen-tool.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="a.b=value ...; docs/evidence.md has all.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the study's folder is or will be.")] = Path(
        "runs"
    ),
    model: Annotated[str, typer.Option(help="Trained (cost, unseen-tool), or the base.")] = "",
    n: Annotated[int | None, typer.Option(min=1, help="Tasks to measure with.")] = None,
    prices: Annotated[
        str, typer.Option(help="Of cost, per million tokens: input, cached input, output.")
    ] = "",
    seed: Annotated[int | None, typer.Option(help="Of cost: the seed of its tasks.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be run and how long it may take.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Put a claim to the test: an experiment with seeds and intervals; it continues."""
    from coa.lab.studies import (
        as_overrides,
        plan_study,
        run_study,
        study_lines,
        study_plan_lines,
    )

    given = as_overrides(name, model=model, n=n, prices=prices, seed=seed)
    chosen = [*given, *(overrides or [])]
    result = plan_study(name, chosen) if dry_run else run_study(name, out / name, chosen, note)
    if as_json:
        emit(result)
    else:
        print("\n".join(study_plan_lines(result) if dry_run else study_lines(result)))
