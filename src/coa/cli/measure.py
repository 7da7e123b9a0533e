"""The command line's measurements: evaluate, compare, benchmarks and studies."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coa.cli.options import JsonFlag, Late, emit, env_settings, note, with_settings
from coa.errors import UsageError

if TYPE_CHECKING:
    from coa.evaluation.beside import Beside
    from coa.evaluation.run import EvalSettings


def add_measures(app: typer.Typer) -> None:
    """Put the commands of this module under the main command."""
    app.command("eval", cls=Late)(evaluate)
    app.command()(compare)
    app.command()(report)
    app.command()(bench)
    app.command()(study)


@with_settings(settings="coa.evaluation.run:EvalSettings")
def evaluate(
    out: Annotated[Path, typer.Option(help="Run directory to write or continue.")],
    settings: EvalSettings,
    as_json: JsonFlag = False,
) -> None:
    """Measure a model on tasks; every task counts, answered or not."""
    from coa.evaluation.run import run_eval

    summary = run_eval(settings, out, quiet=as_json)
    if as_json:
        emit(summary)
    else:
        from coa.evaluation.spending import load_latency
        from coa.view.terminal import console, print_summary

        print_summary(console(), summary, str(out), load_latency(out))


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(help="Run directories of `coa eval`; first the episodes of a team, if any."),
    ],
    chains: Annotated[
        int, typer.Option(min=0, help="Show so many wins and losses side by side.")
    ] = 0,
    env: Annotated[
        list[str] | None, typer.Option(help="With episodes: the environment of the runs.")
    ] = None,
    tasks: Annotated[
        Path | None, typer.Option(help="With episodes: the task file of the runs, if it moved.")
    ] = None,
    reward: Annotated[str, typer.Option(help="With episodes: --reward of the runs.")] = "",
    judge: Annotated[str, typer.Option(help="With episodes: --judge of the runs.")] = "",
    prices: Annotated[
        str, typer.Option(help="With episodes: a price table (.toml), or 1,0.1,5 a million tokens.")
    ] = "",
    margin: Annotated[
        float, typer.Option(help="With episodes: points below the team that are still the same.")
    ] = 2.0,
    as_json: JsonFlag = False,
) -> None:
    """Compare runs on the same tasks, or students with their team: paired, with intervals."""
    from coa.evaluation.team import find_episodes

    own, others = env_settings(runs)
    paths = [Path(each) for each in others]
    if len(paths) < 2:
        raise UsageError("compare needs at least two run directories, or episodes and one.")
    if as_json and chains:
        raise UsageError("--chains is for people: with --json use the ids under won and lost.")
    if (episodes := find_episodes(paths[0])) is not None:
        if chains:
            raise UsageError("--chains is for runs: coa view EPISODES --html PAGE shows a team.")
        from coa.evaluation.beside import Beside

        more = env or (), tasks, reward, judge, prices, margin
        _compare_with_team(Beside(episodes, paths[1:], *more, settings=own), as_json)
        return
    if env or tasks or reward or judge or prices or own:
        raise UsageError(
            f"{paths[0]}: holds no episodes; --env, --tasks, --reward, --judge and --prices are "
            "for comparing with a team. A run keeps its own."
        )
    from coa.evaluation.compare import compare as compare_runs

    result = compare_runs(paths)
    if as_json:
        emit(result)
        return
    from coa.view.terminal import console, print_comparison

    out = console()
    print_comparison(out, result)
    if chains:
        from coa.evaluation.compare import print_sides

        print_sides(out, paths, result, chains)


def _compare_with_team(asked: Beside, as_json: bool) -> None:
    from coa.evaluation.beside import compare_with_team, lines

    found = compare_with_team(asked)
    if as_json:
        emit(found)
    else:
        print("\n".join(lines(found)))


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
        str,
        typer.Argument(help="ask, busy, parse, proxy, rl, rollout, sandbox, search or sft."),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Of ask, rl and sft: name=value ...")
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
