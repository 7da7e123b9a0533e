"""The command line: parse, call, print.

Results go to stdout, progress and notes to stderr; `--json` prints one JSON object on stdout and
nothing else there. A mistake of the user is one line and exit code 2.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coa.cli.datasets import add_datasets
from coa.cli.measure import add_measures
from coa.cli.options import (
    JsonFlag,
    Late,
    SettingsArgument,
    emit,
    note,
    only_env_settings,
    with_settings,
)
from coa.cli.things import add_things
from coa.errors import CoaError, UsageError

if TYPE_CHECKING:
    from coa.rollouts import AgentSettings
    from coa.serving.session import Serving

app = typer.Typer(
    name="coa",
    help="Turn a multi-agent system into one model: record, distil, train, measure, ask.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
mcp_app = typer.Typer(help="Offer an agent, or tools, to MCP clients.", no_args_is_help=True)
app.add_typer(mcp_app, name="mcp")
add_things(app)
add_datasets(app)
add_measures(app)


def _say_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"coa {version('chain-of-agents')}")
        raise typer.Exit


@app.callback()
def every_command(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Options of the command itself; what it is for stands above."""


def main() -> None:
    """Entry point of the `coa` command."""
    terminated = _heed_sigterm()
    try:
        app()
    except CoaError as error:
        print(f"coa: {' '.join(str(error).splitlines())}", file=sys.stderr)
        raise SystemExit(2) from None
    except SystemExit as ended:
        if ended.code == 130:  # what typer makes of Ctrl-C
            from coa.io.runs import standing

            why = "SIGTERM" if terminated else "Ctrl-C"
            print(f"coa: {standing.line(why)}.", file=sys.stderr)
            raise SystemExit(143 if terminated else 130) from None
        raise
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(141) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"coa: {where}{error.strerror or error}.", file=sys.stderr)
        raise SystemExit(2) from None


def _heed_sigterm() -> list[int]:
    """Let SIGTERM do what Ctrl-C does, once; the second ends the process as it always would. The
    list is empty until one comes.

    Shells start a script's background jobs with SIGINT ignored, and asyncio has no use for one that
    is. There SIGINT waits, blocked, until SIGTERM lets it through.
    """
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        return came

    def as_interrupt(number: int, frame: object) -> None:
        came.append(number)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, as_interrupt)
    return came


@app.command(cls=Late)
@with_settings("observations", how="coa.rollouts:AgentSettings")
def ask(
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    how: AgentSettings,
    out: Annotated[Path | None, typer.Option(help="Append the trajectory to this file.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Answer a question, showing the chain of agents as it is written."""
    import asyncio

    from coa.asking import ask_once

    if not question.strip():
        raise UsageError('the question is empty. Example: coa ask "What is the capital of Peru?"')
    trajectory = asyncio.run(ask_once(question, how, out, quiet=as_json))
    if as_json:
        emit({**trajectory.to_json(), "seconds": trajectory.seconds})
    if trajectory.failed_outside:
        raise SystemExit(1)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A folder that is new or empty.")],
    episodes: Annotated[
        Path | None, typer.Option("--from", help="Episodes of a team: an environment of its work.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="With --from: a model that names the agents (openai:NAME@URL).")
    ] = "",
    as_json: JsonFlag = False,
) -> None:
    """Write an environment that runs: a small one to begin with, or that of a recorded team."""
    if episodes is None:
        from coa.checking import write_starter

        if model:
            raise UsageError("--model names the agents of a team: give its episodes with --from.")
        made = write_starter(folder)
        if as_json:
            emit({"folder": str(folder), "files": [path.name for path in made]})
        else:
            for path in made:
                print(path)
    else:
        from coa.distillation.derive import sound_episodes, words_of_model
        from coa.distillation.home import write_home

        words = words_of_model(model, note) if model else None
        home = write_home(folder, sound_episodes(episodes, note), words)
        if as_json:
            emit(home.to_json())
        else:
            print("\n".join(home.lines()))
    note(f"next: coa check {folder}")


@app.command()
def check(
    what: Annotated[
        str,
        typer.Argument(
            help="Episodes (.jsonl, or a folder with one), or an environment: a folder, file, "
            "module:attribute or shipped name."
        ),
    ],
    settings: SettingsArgument = None,
    env: Annotated[
        list[str] | None, typer.Option(help="Of episodes: whose reward and grammar they have.")
    ] = None,
    tasks: Annotated[
        Path | None, typer.Option(help="Of episodes: task file with gold answers.")
    ] = None,
    grammar: Annotated[
        str, typer.Option(help="Of episodes: preset name or a .toml file for their chains.")
    ] = "",
    model: Annotated[
        str, typer.Option(help="Of episodes: the student, whose tokenizer counts.")
    ] = "smollm2-135m",
    prices: Annotated[
        str, typer.Option(help="Of episodes: a price table (.toml), or 1,0.1,5 a million tokens.")
    ] = "",
    as_json: JsonFlag = False,
) -> None:
    """Look at episodes before training on them, or try an environment before using it."""
    from coa.evaluation.team import find_episodes

    own = only_env_settings(settings)
    episodes = find_episodes(Path(what))
    if episodes is None:
        from coa.checking import check_environment
        from coa.environment import load_environment

        if env or tasks or grammar or prices:
            raise UsageError(
                f"{what}: is no file of episodes; --env, --tasks, --grammar and --prices are for "
                "these."
            )
        found: Any = check_environment(load_environment(what, **own))
    else:
        from coa.evaluation.look import Looking, look_at

        found = look_at(
            Looking(episodes, env or (), tasks, grammar, model, prices=prices, settings=own)
        )
    if as_json:
        emit(found.to_json())
    else:
        print("\n".join(found.lines()))


@app.command(cls=Late)
@with_settings("observations", "unsafe_code", settings="coa.serving.session:Serving")
def serve(
    settings: Serving,
    key_file: Annotated[
        Path | None, typer.Option(help="File with the key of clients; else COA_SERVE_KEY.")
    ] = None,
) -> None:
    """Answer OpenAI-compatible clients, streaming the chain; Ctrl-C ends it."""
    from coa.serving.server import read_key
    from coa.serving.server import serve as serve_until_stopped

    serve_until_stopped(replace(settings, key=read_key(key_file)), note)


@mcp_app.command("serve", cls=Late)
@with_settings(
    *("observations", "unsafe_code", "name", "stall_s"), settings="coa.serving.session:Serving"
)
def mcp_serve(
    settings: Serving,
    tools_only: Annotated[
        bool, typer.Option("--tools-only", help="The environment's tools, and no model.")
    ] = False,
    http: Annotated[
        bool, typer.Option("--http", help="Streamable HTTP on --host and --port; else stdio.")
    ] = False,
    key_file: Annotated[
        Path | None, typer.Option(help="With --http: the key of clients; else COA_SERVE_KEY.")
    ] = None,
) -> None:
    """Offer an environment's agent, or its tools, to MCP clients."""
    from coa.serving.mcp import serve_mcp
    from coa.serving.server import read_key

    settings = replace(settings, key=read_key(key_file) if http else "")
    serve_mcp(settings, note, tools_only=tools_only, http=http)


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
    recipe: Annotated[str, typer.Argument(help="A TOML recipe, or the name of a shipped one.")],
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
    from coa.io.settings import find_recipe
    from coa.train.sft import plan_from_recipe, preview_from_recipe, sft_from_recipe
    from coa.view.terminal import console

    path = find_recipe(recipe)
    if preview:
        report = preview_from_recipe(path, overrides or [], None if as_json else console())
        if as_json:
            emit(report.to_json())
    elif dry_run:
        plan = plan_from_recipe(path, overrides or [], note)
        if as_json:
            emit(plan.to_json())
        else:
            print("\n".join(plan.lines()))
    else:
        _say_adapter(sft_from_recipe(path, overrides or [], note), as_json)


@app.command()
def rl(
    recipe: Annotated[str, typer.Argument(help="A TOML recipe, or the name of a shipped one.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="a.b=value ...")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Improve a model on tasks by what its own rollouts earn; the same command again continues."""
    from coa.io.settings import find_recipe
    from coa.train.rl_stage import rl_from_recipe

    _say_adapter(rl_from_recipe(find_recipe(recipe), overrides or [], note), as_json)


@app.command()
def improve(
    recipe: Annotated[str, typer.Argument(help="A TOML recipe, or the name of a shipped one.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="a.b=value ...")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Try a few tasks, say what all takes; write nothing.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Fine-tune a model on its own right attempts, in rounds; the same command again continues."""
    from coa.io.settings import find_recipe
    from coa.train.improve import improve_from_recipe, plan_from_recipe

    if dry_run:
        plan = plan_from_recipe(find_recipe(recipe), overrides or [], note)
        if as_json:
            emit(asdict(plan))
        else:
            print("\n".join(plan.lines()))
        return
    result = improve_from_recipe(find_recipe(recipe), overrides or [], note)
    if as_json:
        rounds = result.records
        emit({"adapter": str(result.adapter), "round": result.round, "rounds": rounds})
    else:
        note(result.line)
        print(result.adapter)


def _say_adapter(adapter: Path, as_json: bool) -> None:
    """Print where the result is; of several processes only the first does."""
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        emit({"adapter": str(adapter)})
    else:
        print(adapter)


@app.command()
def speedrun(
    out: Annotated[
        Path | None, typer.Option(help="Run directory; runs/speedrun, or runs/full.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="A TOML recipe of one's own.")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="The recipe of AFM-135M: all three sets, hours.")
    ] = False,
    overrides: Annotated[list[str] | None, typer.Argument(help="a.b=value ...")] = None,
    as_json: JsonFlag = False,
) -> None:
    """The whole way: record, distil, fine-tune, RL, measure, report; continues if interrupted."""
    from coa.lab.speedrun import print_speedrun, run_speedrun
    from coa.view.terminal import console

    out = out or Path("runs", "full" if full else "speedrun")
    result = run_speedrun(out, recipe, overrides or [], note, full=full, questions=not as_json)
    if as_json:
        emit(result)
    else:
        print_speedrun(console(), result)
