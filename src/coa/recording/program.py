"""`coa record --out EPISODES -- COMMAND`: a program at work behind the recording proxy.

Goes in: a command, as one types it. Comes out: an episode for each run of the program that called a
model, in EPISODES, and beside it the log of everything that was seen (`EPISODES.sessions.jsonl`),
of which the episodes can be made again. With tasks the command is started once for each of them,
and the same command again does what is missing.

A session that ended is whole: its end is in the log before its episode is written, and an episode
that is missing is made of the log at the next start. One that was cut, by a signal to the program
or to this process, is marked as such, then or at the next start. Of a task it is no episode, as the
task is done again.

The program gets the address of the proxy in the variables that the clients of both APIs read. Its
output stays where it was: on the terminal when it runs alone, in the log (its end) with tasks.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple

from coa.environment import (
    Environment,
    OpenEnvironment,
    environments_for,
    open_environments,
    tasks_of,
)
from coa.errors import UsageError
from coa.io.files import make_private
from coa.io.machine import signal_name
from coa.io.plugins import load_object
from coa.io.progress import counted, say
from coa.io.runs import (
    Appender,
    Json,
    check_growing,
    claim,
    manifest_beside,
    reached,
    read_jsonl,
    read_records,
    write_jsonl,
)
from coa.io.settings import Option
from coa.io.workers import shortened
from coa.recording.calls import (
    KILLED,
    CallLog,
    LoggedSession,
    Redact,
    cleaned,
    read_sessions,
)
from coa.recording.episode import Episode
from coa.recording.graph import episode_of
from coa.recording.proxy import UNTOLD, Providers, RecordingProxy, Secrets
from coa.recording.receiver import Receiver, after_kill
from coa.rewards import RewardSettings, lacking, open_reward
from coa.rewards.reward import Reward
from coa.rollouts import ENV, SETTINGS, References
from coa.tasks import Task, TaskSet, history_json
from coa.trajectory import Author, Segment, StopReason, Trajectory

GRACE_S = 5.0
"""For a program to end by itself when it is told to."""
_LOOK_MS = 100
"""How often it is looked whether a program has ended, while nothing comes of it: what it left
running may hold the pipe for ever."""
_HELD = 1 << 20
"""Most of the output of a program that is searched for an answer: its end."""
_NOTED = 4000
"""Characters of it that the log keeps."""
_FRUITLESS = 3
"""So many programs in a row that call no model, the first ones, and the others are not started."""
_QUESTION, _ID = "{question}", "{id}"
_PLACE = re.compile(r"(?:[\w-]+=)?\{\s*([A-Za-z_][\w-]*)\s*\}")
"""A whole argument, or the value of an option, that looks like a place for something."""
_MEANT = {"question": _QUESTION, "id": _ID, "task_id": _ID}
_NEAR = 0.85
"""How alike a name has to be to one of these: so are two letters that were swapped, and `uid` is
not."""


@dataclass(frozen=True)
class ProgramRecording:
    """What is recorded: which program, on which tasks, and what counts as its answer."""

    command: tuple[str, ...] = ()
    env: Annotated[References, ENV] = ()
    tasks: Annotated[
        str | Path | TaskSet, Option("Task file (JSONL or CSV): the command is run for each.")
    ] = ""
    split: Annotated[str, Option("Of the environment's own tasks.")] = "train"
    settings: Annotated[Mapping[str, Any], SETTINGS] = field(default_factory=dict)
    workers: Annotated[int, Option("Programs at once.", least=1)] = 1
    answer: Annotated[
        str, Option("last (what the team said last), stdout, or a regular expression on stdout.")
    ] = "last"
    timeout: Annotated[float | None, Option("Most seconds for one run of the program.")] = None
    upstream: Annotated[
        str, Option("The provider's address; else what OPENAI_BASE_URL ... say, or the public one.")
    ] = ""
    redact: Annotated[
        str, Option("module:function that is given each text and returns what is kept of it.")
    ] = ""
    one_process: Annotated[
        bool, Option("The command works on all tasks itself; a session's name is a task's id.")
    ] = False
    again: Annotated[bool, Option("Run nothing: make the episodes of the log again.")] = False
    otel: Annotated[
        bool, Option("Read the spans that the program sends (OpenTelemetry), instead of its calls.")
    ] = False
    port: Annotated[int, Option("Of the proxy; any free one by default.", least=0)] = 0


@dataclass(frozen=True)
class RecordedProgram:
    """What a recording came to."""

    path: Path
    episodes: int
    answered: int
    right: float | None
    """Mean success of the judged ones; None: nobody judged."""
    judged: int
    new: int
    """Episodes of this time."""
    calls: int = 0
    """Answered calls of models in these."""
    failed: int = 0
    """Calls in these that a server refused, or that broke off."""
    silent: int = 0
    """Programs that called no model."""
    code: int = 0
    """What the command line exits with."""

    def to_json(self) -> Json:
        return {**asdict(self), "path": str(self.path)}

    def lines(self) -> list[str]:
        said = f"{self.episodes} episodes in {self.path}, {self.answered} with an answer"
        if self.right is not None:
            said += f"; success {self.right:.0%} of {self.judged} judged"
        elif self.episodes:
            said += "; success unverified"
        lines = [said]
        if self.new:
            failed = f", {self.failed} that failed" if self.failed else ""
            lines.append(f"recorded now: {self.new} episodes, {self.calls} model calls{failed}")
        return lines


def sessions_beside(out: Path) -> Path:
    """Where the log of an episodes file is."""
    return out.with_name(f"{out.name}.sessions.jsonl")


def spans_beside(out: Path) -> Path:
    """Where the spans are that a program sent, as they came; `coa import` reads them, too."""
    return out.with_name(f"{out.name}.spans.jsonl")


def record_program(asked: ProgramRecording, out: Path, *, quiet: bool = False) -> RecordedProgram:
    """Record a program, or go on with its tasks. `quiet`: what it prints is no part of our
    stdout."""
    job = _prepared(asked, out)
    with claim(out, job.claim):
        for path in (out, manifest_beside(out), _timings_beside(out)):
            make_private(path)
        with Appender(out), Appender(_timings_beside(out)):
            pass  # a line that a kill has torn is taken off
        return asyncio.run(_Recording(job, out, quiet).run())


# -- before anything is started -----------------------------------------------------------------


class _Prepared(NamedTuple):
    asked: ProgramRecording
    environments: tuple[Environment, ...]
    tasks: tuple[Task, ...] | None
    """None: the program runs once, for nobody's question."""
    providers: Providers
    secrets: Secrets
    pattern: re.Pattern[str] | None
    claim: Json


def _prepared(asked: ProgramRecording, out: Path) -> _Prepared:
    if not asked.command and not asked.again:
        raise UsageError(
            "no command: write it behind two dashes, as in "
            "coa record --out episodes.jsonl -- python team.py"
        )
    if isinstance(asked.tasks, str | Path) and str(asked.tasks):
        for path in (out, sessions_beside(out)):
            if path.resolve() == Path(asked.tasks).resolve():
                raise UsageError(f"{out}: holds the tasks. Name another file for the episodes.")
    check_growing(out)
    if asked.again and not sessions_beside(out).is_file():
        raise UsageError(f"{sessions_beside(out)}: no such file, so there is no log to read again.")
    pattern = None
    if asked.answer not in ("last", "stdout"):
        try:
            pattern = re.compile(asked.answer, re.MULTILINE)
        except re.error as wrong:
            raise UsageError(
                f"--answer: expected last, stdout or a regular expression, found {wrong}."
            ) from None
    environments, tasks = _work(asked)
    if tasks is None and asked.one_process:
        raise UsageError("--one-process: give the tasks, with --tasks or --env.")
    if not asked.again:
        _check_places(asked, tasks is not None)
    redact: Redact | None = None
    if asked.redact:
        redact = load_object(asked.redact, "--redact")
        if not callable(redact):
            raise UsageError(f"--redact {asked.redact!r}: is no function.")
    if asked.otel and asked.upstream:
        raise UsageError("--upstream: with --otel no call passes here; leave one of them out.")
    claimed: Json = {"source": "otel" if asked.otel else "proxy"}
    if tasks is not None:
        digest = hashlib.sha256("\0".join(asked.command).encode("utf-8", "surrogateescape"))
        claimed["tasks"] = TaskSet(tasks).fingerprint()
        if not asked.again:
            claimed["program"] = digest.hexdigest()[:16]
    if asked.again and manifest_beside(out).is_file():
        claimed = json.loads(manifest_beside(out).read_text(encoding="utf-8"))
    return _Prepared(
        asked,
        environments,
        tasks,
        Providers() if asked.again or asked.otel else Providers.of(os.environ, asked.upstream),
        Secrets(os.environ, redact),
        pattern,
        claimed,
    )


def _check_places(asked: ProgramRecording, has_tasks: bool) -> None:
    """Refuse what would go to the program as it stands, though it was meant for a task.

    Braces mean much else (JSON, a shell's variables, a program after -c), so only an argument that
    is nothing but a name in braces is looked at. Where another argument has a place for the task,
    that name may be the program's own, unless it is near to one of ours.
    """
    if not has_tasks or asked.one_process:
        if not has_tasks and _QUESTION in asked.command:
            raise UsageError(f"{_QUESTION}: there is no question; give them with --tasks or --env.")
        return
    placed = any(each in word for word in asked.command for each in (_QUESTION, _ID))
    for word in asked.command:
        found = _PLACE.fullmatch(word)
        if found is None or any(each in word for each in (_QUESTION, _ID)):
            continue
        near = get_close_matches(found[1].lower(), _MEANT, n=1, cutoff=_NEAR)
        if near or not placed:
            hint = f" Did you mean {_MEANT[near[0]]}?" if near else ""
            raise UsageError(
                f"{word!r} in the command: nothing of a task has that name.{hint} There are "
                f"{_QUESTION} and {_ID}; without {_QUESTION} the question is on stdin."
            )


def _work(asked: ProgramRecording) -> tuple[tuple[Environment, ...], tuple[Task, ...] | None]:
    """The environments, which judge, and the tasks."""
    given = asked.env
    references = [given] if isinstance(given, str | Path | Environment) else [*given]
    references = [each for each in references if each]
    environments = environments_for(references, **asked.settings) if references else ()
    if isinstance(asked.tasks, TaskSet):
        tasks: TaskSet | None = asked.tasks
    elif str(asked.tasks):
        tasks = TaskSet.load(Path(asked.tasks))
    else:
        tasks = tasks_of(environments, asked.split, say) if environments else None
    if tasks is None:
        return environments, None
    if not environments:
        return environments, tuple(tasks)
    known = {env.name for env in environments}
    home = environments[0].name
    return environments, tuple(
        task
        if task.meta.get("environment") in known
        else replace(task, meta={**task.meta, "environment": home})
        for task in tasks
    )


# -- one run of the program ---------------------------------------------------------------------


class _Ran(NamedTuple):
    code: int
    """Of the program; negative: the signal that ended it."""
    stdout: str
    stderr: str
    seconds: float
    stopped: str
    """Why we ended it; empty: it ended by itself, or was late."""
    late: bool = False
    """It took longer than it may."""


class _Program:
    """A process; `run` returns when it has ended."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        alone: bool,
        given: str | None = None,
        show: IO[bytes] | None = None,
        timeout: float | None = None,
    ) -> None:
        self._command, self._environment = command, environment
        self._alone = alone
        """It has the terminal to itself; else its errors are kept back."""
        self._given, self._show, self._timeout = given, show, timeout
        self._process: asyncio.subprocess.Process | None = None
        self._own_group = not (alone and sys.stdin is not None and os.isatty(0))
        """A program that reads from a terminal has to stay in the group that may."""
        self._stopped: str | None = None

    async def run(self) -> _Ran:
        begun, late = time.monotonic(), False
        out, errors = _Tail(self._show), _Tail(None)
        with ExitStack() as ends:
            process = self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=dict(self._environment),
                stdin=ends.enter_context(self._input()),
                stdout=ends.enter_context(out.opened(like=self._show)),
                stderr=None if self._alone else ends.enter_context(errors.opened()),
                start_new_session=self._own_group,
            )
        if self._stopped is not None:  # while it was started
            self._end(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), self._timeout)
        except TimeoutError:
            late = True
            self.stop("")
        code = await process.wait()
        for tail in (out, errors):
            await asyncio.to_thread(tail.finish)
        seconds = time.monotonic() - begun
        return _Ran(code, out.text, errors.text, seconds, self._stopped or "", late)

    @contextmanager
    def _input(self) -> Iterator[Any]:
        """What the program reads: what it is given, what we have ourselves, or nothing."""
        if self._alone:
            yield None
        elif self._given is None:
            yield subprocess.DEVNULL
        else:
            with tempfile.TemporaryFile() as file:
                file.write(self._given.encode("utf-8", "surrogateescape"))
                file.seek(0)
                yield file

    @property
    def shares_terminal(self) -> bool:
        """Whether Ctrl-C reaches it as it reaches us, and means what the program makes of it."""
        return not self._own_group

    def stop(self, why: str, number: int = signal.SIGTERM) -> None:
        """Tell the program to end, once; it is killed if it does not."""
        first = self._stopped is None
        self._stopped = self._stopped or why
        if self._process is not None:
            self._end(number if first else signal.SIGKILL)

    def _end(self, number: int) -> None:
        self._signal(number)
        asyncio.get_running_loop().call_later(GRACE_S, self._signal, signal.SIGKILL)

    def _signal(self, number: int) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError, PermissionError):
            if self._own_group:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)


class _Tail:
    """Reads the output of a program, shows it, and keeps its end."""

    def __init__(self, show: IO[bytes] | None) -> None:
        self._show = show
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._thread: threading.Thread | None = None
        self._over = False
        """Its program has ended: what can be read now is all."""

    @contextmanager
    def opened(self, like: IO[bytes] | None = None) -> Iterator[int]:
        """Where the program writes to, until it was started: a terminal where ours is one, as
        programs show less, and later, to a pipe."""
        if like is not None and like.isatty():
            source, end = _terminal(like)
        else:
            source, end = os.pipe()
        try:
            yield end
        finally:
            os.close(end)
            self._thread = threading.Thread(target=self._read, args=(source,), daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Read all that the program wrote before it ended."""
        self._over = True
        if self._thread is not None:
            self._thread.join()

    def _read(self, source: int) -> None:
        ready = select.poll()
        ready.register(source, select.POLLIN)
        with suppress(OSError):  # how a terminal says that nobody writes any more
            while True:
                over = self._over  # before we look: what it wrote last can be read after that
                if not ready.poll(_LOOK_MS):
                    if over:
                        break
                    continue
                if not (piece := os.read(source, 1 << 16)):
                    break
                self._pieces.append(piece)
                self._size += len(piece)
                while self._size - len(self._pieces[0]) > _HELD:
                    self._size -= len(self._pieces.popleft())
                if self._show is not None:
                    with suppress(OSError, ValueError):  # nobody looks
                        self._show.write(piece)
                        self._show.flush()
        os.close(source)

    @property
    def text(self) -> str:
        return b"".join([*self._pieces]).decode("utf-8", "replace").replace("\r\n", "\n")


def _terminal(like: IO[bytes]) -> tuple[int, int]:
    """Two ends of a terminal as wide as one that there is; what it is given, it leaves as it is."""
    import fcntl
    import pty
    import termios
    import tty

    source, end = pty.openpty()
    tty.setraw(end)
    with suppress(OSError):
        size = fcntl.ioctl(like.fileno(), termios.TIOCGWINSZ, bytes(8))
        fcntl.ioctl(end, termios.TIOCSWINSZ, size)
    return source, end


# -- all of them --------------------------------------------------------------------------------


class _Recording:
    """The programs of a recording, its proxy, its files."""

    def __init__(self, job: _Prepared, out: Path, quiet: bool) -> None:
        self.job, self.asked, self.out, self.quiet = job, job.asked, out, quiet
        self.running: list[_Program] = []
        self.stopping = ""
        """Why no more is started."""
        self.error: BaseException | None = None
        self.signal = 0
        self.code = 0
        self.new = self.calls = self.failed = 0
        """Episodes of this time, the answered calls in them, and those that failed."""
        self.silent: list[_Ran] = []
        self.strange = 0
        """Calls of no task, by a program that works on all tasks itself."""
        self.capture: RecordingProxy | Receiver
        self.judge: _Judge

    async def run(self) -> RecordedProgram:
        log_path = sessions_beside(self.out)
        known = read_sessions(log_path) if log_path.is_file() else []
        async with AsyncExitStack() as stack:
            self.judge = await stack.enter_async_context(_judging(self.job))
            log = stack.enter_context(CallLog(log_path, self.job.secrets))
            known += after_kill(spans_beside(self.out), log, known)
            for session in known:
                if session.end is None:
                    session.end = log.end(session.name, cut=KILLED)
            done = await self._made_again(known)
            if not self.asked.again:
                taken = {session.name for session in known}
                self.capture = await stack.enter_async_context(self._opened(log, taken))
                stack.enter_context(self._heeding_signals())
                watch = asyncio.create_task(self._watch())
                stack.callback(watch.cancel)
                await self._work(done)
        self._in_order()
        result = self._result()
        self._say(result)
        return result

    def _opened(self, log: CallLog, taken: set[str]) -> RecordingProxy | Receiver:
        """What sees the calls: the proxy, or with --otel the receiver of spans."""
        job, port = self.job, self.asked.port
        if self.asked.otel:
            return Receiver(spans_beside(self.out), log, job.secrets, taken, port)
        return RecordingProxy(job.providers, log, job.secrets, taken, port)

    def _in_order(self) -> None:
        """When all tasks are done their episodes stand in the order of the tasks."""
        if self.job.tasks is None:
            return
        order = {task.id: place for place, task in enumerate(self.job.tasks)}
        records = [record for _, record in read_jsonl(self.out)]
        if len(records) == len(order) and all(each["task_id"] in order for each in records):
            placed = sorted(records, key=lambda record: order[record["task_id"]])
            if placed != records:
                write_jsonl(self.out, placed)

    # -- what an earlier part of the recording left -----------------------------------------

    async def _made_again(self, known: Sequence[LoggedSession]) -> set[str]:
        """Make the episodes that are missing; the tasks that are done."""
        tasks = {task.id: task for task in self.job.tasks or ()}
        if self.asked.again:
            for path in (self.out, _timings_beside(self.out)):
                path.write_bytes(b"")
        held = {e.meta.get("session"): e.task_id for e in read_records(self.out, Episode.from_json)}
        done = set(held.values())
        for session in known:
            task_id = str(session.about.get("task_id") or session.about.get("named") or "")
            if not session.calls or session.name in held or session.name == UNTOLD:
                continue
            if self.job.tasks is not None and (task_id not in tasks or task_id in done):
                continue
            if session.cut and (self.job.tasks is not None or session.about.get("task_id")):
                continue  # the task is done again
            await self._keep(session, tasks.get(task_id))
            done.add(task_id)
        return done & tasks.keys()

    async def _add(self, session: LoggedSession, task: Task | None) -> None:
        """A session that has ended just now."""
        await self._keep(session, task)
        self.new += 1
        self.calls += sum(call.answered for call in session.calls)
        self.failed += sum(call.exchange.reply is None for call in session.calls)
        reached(f"{self.new} episodes of this time")

    async def _keep(self, session: LoggedSession, task: Task | None) -> None:
        """Write the episode of a session that has ended."""
        redact = self.job.secrets
        told = task and replace(
            task,
            question=redact(task.question),
            meta=cleaned(dict(task.meta), redact),
            history=tuple(each._replace(text=redact(each.text)) for each in task.history),
        )
        # In a thread: the calls of other programs pass here meanwhile.
        episode = await asyncio.to_thread(episode_of, session, told)
        _complete(episode, session, told)
        success = await self.judge.success(task, episode)
        if success is not None:
            episode.meta["success"] = success
        with Appender(self.out) as file:
            file.write(episode.to_json())
        with Appender(_timings_beside(self.out)) as timings:
            total = (session.end or {}).get("seconds")
            seconds = {**episode.seconds, **({"total": total} if total is not None else {})}
            seconds = {name: round(value, 4) for name, value in seconds.items()}
            timings.write({"task_id": episode.task_id, **seconds})

    # -- programs ---------------------------------------------------------------------------

    async def _work(self, done: set[str]) -> None:
        tasks = self.job.tasks
        if tasks is None or self.asked.one_process:
            await self._alone({task.id: task for task in tasks or ()}, done)
        else:
            waiting = deque(task for task in tasks if task.id not in done)
            workers = min(self.asked.workers, max(1, len(waiting)))
            with counted("record", len(tasks)) as on_done:
                if done:
                    on_done(len(done), len(tasks))

                async def work() -> None:
                    while waiting and not self.stopping:
                        try:
                            await self._on(waiting.popleft())
                        except Exception as error:  # the other programs have to be ended, too
                            self._give_up(error)
                        on_done(len(done) + self.new + len(self.silent), len(tasks))

                async with asyncio.TaskGroup() as group:
                    for _ in range(workers):
                        group.create_task(work())
        if self.error is not None:
            raise self.error

    async def _alone(self, tasks: Mapping[str, Task], done: set[str]) -> None:
        """The program runs once. Every session that it names is an episode of its own."""
        name = f"run-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}"
        await self.capture.begin(name, source="proxy")
        shown = sys.stderr if self.quiet else sys.stdout
        program = _Program(
            self.asked.command,
            self._environment(name),
            alone=True,
            show=getattr(shown, "buffer", None),
            timeout=self.asked.timeout,
        )
        ran = await self._ran(program)
        self.code = ran.code if ran.code >= 0 else 128 - ran.code
        ended: list[tuple[LoggedSession, Task | None]] = []
        for each in [name, *self.capture.named]:
            about = self._end(ran) if each == name else _cut(ran)
            session = await self.capture.end(each, **about)
            if each in tasks and session.about.get("task_id") is None:
                session.about = {**session.about, "task_id": each}
            ended.append((session, tasks.get(each)))
        for session, task in ended:
            again = task is not None and (task.id in done or session.cut)
            strange = self.job.tasks is not None and task is None
            if session.calls and not again and not strange:
                await self._add(session, task)
            self.strange += len(session.calls) if strange else 0
        if not any(session.calls for session, _ in ended):
            self.silent.append(ran)
        if self.strange and not self.new:
            self.code = self.code or 1

    async def _on(self, task: Task) -> None:
        """The program works on one task."""
        await self.capture.begin(task.id, source="proxy", task_id=task.id, question=task.question)
        words = self.asked.command
        placed = any(_QUESTION in word or _ID in word for word in words)
        command = [w.replace(_ID, task.id).replace(_QUESTION, task.question) for w in words]
        environment = self._environment(task.id)
        environment |= {"COA_TASK": task.question, "COA_TASK_ID": task.id}
        if task.history:
            environment["COA_TASK_HISTORY"] = json.dumps(history_json(task.history)["history"])
        given = None if any(_QUESTION in word for word in words) else task.question
        program = _Program(
            command,
            environment,
            alone=False,
            given=given,
            timeout=self.asked.timeout,
        )
        assert placed or given is not None
        ran = await self._ran(program)
        session = await self.capture.end(task.id, **self._end(ran))
        if session.calls and not session.cut:
            await self._add(session, task)
        if not session.calls and not ran.stopped:
            self.silent.append(ran)
            if not self.new and len(self.silent) == _FRUITLESS:
                self.stopping = "no model call"
        elif ran.code and not self.stopping:
            why = "it took longer than --timeout" if ran.late else _ended(ran)
            say(f"coa: task {shortened(task.id, 40)}: {why}{self._last_line(ran)}")

    async def _ran(self, program: _Program) -> _Ran:
        """A program, run to its end; if we have to stop it is told, and waited for."""
        if self.stopping:
            return _Ran(0, "", "", 0.0, self.stopping)
        self.running.append(program)
        try:
            return await program.run()
        except FileNotFoundError:
            self._give_up(UsageError(f"{self.asked.command[0]!r}: no such command."))
        except PermissionError:
            self._give_up(UsageError(f"{self.asked.command[0]!r}: cannot be executed."))
        except (OSError, ValueError) as wrong:
            reason = (
                wrong.strerror if isinstance(wrong, OSError) else "a question holds a zero byte"
            )
            self._give_up(
                UsageError(
                    f"{self.asked.command[0]!r}: cannot be started ({reason}). A question that is "
                    "too long for a command line can be read from stdin: leave out {question}."
                )
            )
        finally:
            self.running.remove(program)
        return _Ran(0, "", "", 0.0, "it could not be started")

    def _environment(self, name: str) -> dict[str, str]:
        """The program's environment: ours, with what makes it seen."""
        return {**os.environ, **self.capture.variables(os.environ, name)}

    def _end(self, ran: _Ran) -> Json:
        """What is noted when a program has ended."""
        noted: Json = {"exit_code": ran.code, "seconds": round(ran.seconds, 3), **_cut(ran)}
        if ran.stdout:  # cleaned before it is cut: of a key that is cut in two half would stay
            noted["stdout"] = self.job.secrets(ran.stdout)[-_NOTED:]
        if self.asked.answer == "stdout":
            noted["answer"] = ran.stdout.strip() or None
        elif self.job.pattern is not None:
            found = [*self.job.pattern.finditer(ran.stdout)]
            said = (found[-1][1] if self.job.pattern.groups else found[-1][0]) if found else ""
            noted["answer"] = (said or "").strip() or None
        return noted

    def _last_line(self, ran: _Ran) -> str:
        """The last line that a program that failed wrote on stderr, for the terminal only."""
        lines = self.job.secrets(ran.stderr).strip().splitlines()
        return f": {shortened(lines[-1], 200)}" if lines else ""

    # -- stopping ---------------------------------------------------------------------------

    @contextmanager
    def _heeding_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        names = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
        before = {number: signal.getsignal(number) for number in names}
        heeded = [number for number, what in before.items() if what is not signal.SIG_IGN]
        for number in heeded:  # what is ignored stays so: `nohup` means it
            loop.add_signal_handler(number, self._stop, names[number], number)
        try:
            yield
        finally:
            for number in heeded:
                loop.remove_signal_handler(number)
                signal.signal(number, before[number])

    def _stop(self, why: str, number: int) -> None:
        if number == signal.SIGINT and any(each.shares_terminal for each in self.running):
            return
        self.stopping, self.signal = self.stopping or why, number
        for program in list(self.running):
            program.stop(why, number)

    def _give_up(self, error: BaseException) -> None:
        self.error = self.error or error
        self.stopping = self.stopping or "the recording failed"
        for program in list(self.running):
            program.stop(self.stopping)

    async def _watch(self) -> None:
        self._give_up(await self.capture.failed)

    # -- the end ----------------------------------------------------------------------------

    def _result(self) -> RecordedProgram:
        records = [record for _, record in read_jsonl(self.out)]
        marks = [record["meta"].get("success") for record in records]
        judged = [float(mark) for mark in marks if mark is not None]
        fruitless = self.silent and not self.new and not self.asked.again
        code = 128 + self.signal if self.signal else self.code or int(bool(fruitless))
        return RecordedProgram(
            self.out,
            len(records),
            sum(record["answer"] is not None for record in records),
            sum(judged) / len(judged) if judged else None,
            len(judged),
            self.new,
            self.calls,
            self.failed,
            len(self.silent),
            code,
        )

    def _say(self, result: RecordedProgram) -> None:
        """What a person should know besides the counts."""
        if self.asked.again:
            return
        for line in self.capture.lines():
            say(f"coa: {line}")
        if self.strange:
            advice = (
                ""
                if self.asked.otel
                else ". Name each session after the task's id: OPENAI_BASE_URL with /s/ID/v1 for "
                "its path, or x-coa-session: ID"
            )
            say(f"coa: {self.strange} model calls name no task and are in no episode{advice}")
        if self.silent and not result.new:
            say(self._why_silent(self.silent[-1]))
        elif self.silent:
            say(
                f"coa: {len(self.silent)} programs called no model; they are run again with the "
                "same command"
            )
        if self.signal and self.job.tasks is not None:
            say(f"coa: stopped ({self.stopping}); give the same command again to go on")

    def _why_silent(self, ran: _Ran) -> str:
        """Why no model call was seen, as far as one can tell."""
        if ran.stopped:
            return f"coa: no model call was seen before the end ({ran.stopped})"
        if ran.code:
            last = self._last_line(ran)
            return f"coa: no model call was seen: {_ended(ran)}{last}. {self._advice(last)}"
        return f"coa: {self.capture.why_silent()}"

    def _advice(self, last: str) -> str:
        """What to look at where the program fails; `last` is what it said. A bare `python` is
        whichever comes first on the path, and a program's packages are in its own."""
        name = self.asked.command[0]
        found = shutil.which(name)
        if found is None or Path(name).name != name or not name.startswith("python"):
            return "Does it run without coa?"
        which = f"{name!r} was {found}"
        ours = Path(found).parent == Path(sys.executable).parent
        if ours and ("No module named" in last or "ImportError" in last):
            return f"{which}, which is coa's own: give the full path of the program's own python."
        return f"{which}. Does it run without coa?"


def _cut(ran: _Ran) -> Json:
    """Whether a program was kept from finishing."""
    if ran.late:
        return {"error": "the program took longer than it may (--timeout)"}
    if ran.stopped:
        return {"cut": f"the program was stopped: {ran.stopped}"}
    return {"cut": f"the program {_by_signal(ran)}"} if ran.code < 0 else {}


def _by_signal(ran: _Ran) -> str:
    return f"was killed by {signal_name(-ran.code)}"


def _ended(ran: _Ran) -> str:
    how = _by_signal(ran) if ran.code < 0 else f"ended with exit code {ran.code}"
    return f"the program {how}"


def _timings_beside(out: Path) -> Path:
    return out.with_name(f"{out.name}.timings.jsonl")


def _complete(episode: Episode, session: LoggedSession, task: Task | None) -> None:
    """What a session says of itself, and its task, stand above what was read in its calls."""
    end = session.end or {}
    if task is not None:
        episode.meta = {**task.meta, **episode.meta}
    episode.meta["session"] = session.name
    if "answer" in end:
        episode.answer = end["answer"]
        if episode.answer is None:
            gaps = episode.meta.setdefault("gaps", {})
            gaps["answer_not_found"] = gaps.get("answer_not_found", 0) + 1


# -- judging ------------------------------------------------------------------------------------


class _Judge:
    """Says what the answer of an episode is worth: by the reward of its task's environment, or by
    the task's own gold."""

    def __init__(self, opened: OpenEnvironment | None, reward: Reward | None) -> None:
        self._opened, self._reward = opened, reward
        self._told = False

    async def success(self, task: Task | None, episode: Episode) -> float | None:
        """None: nobody can say."""
        reward = self._reward
        if (
            task is not None
            and self._opened is not None
            and _can_judge(self._opened.of(task), task)
        ):
            reward = self._opened.reward_of(task)
        if task is None or reward is None or (self._opened is None and lacking(reward.name, task)):
            return None
        if reward.takes_state:
            if not self._told:
                say("coa: the reward judges with the state of its own tools: success is unverified")
            self._told = True
            return None
        segments = [Segment(Author.MODEL, episode.answer or "")]
        made = Trajectory(task.id, task.question, "", segments=segments, answer=episode.answer)
        made.stop = StopReason.TURNS if episode.answer is None else StopReason.ANSWERED
        return (await reward.score(task, made)).score


def _can_judge(env: Environment, task: Task) -> bool:
    """Whether a task has what the reward of its environment judges by."""
    settings, own = env.judged_by(RewardSettings())
    return own is not None or not any(lacking(name, task) for name in settings.needs())


@asynccontextmanager
async def _judging(job: _Prepared) -> AsyncIterator[_Judge]:
    tasks = job.tasks or ()
    async with AsyncExitStack() as stack:
        if job.environments:
            entered = open_environments(job.environments, dry=True)
            opened = await stack.enter_async_context(entered)
            judged = [task for task in tasks if _can_judge(opened.of(task), task)]
            await opened.open_rewards(RewardSettings(), judged)
            yield _Judge(opened, None)
            return
        judged = [task for task in tasks if not lacking("auto", task)]
        reward = open_reward("auto", tasks=judged) if judged else None
        yield _Judge(None, None if reward is None else await stack.enter_async_context(reward))
