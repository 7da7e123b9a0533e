"""Tool and Toolbox: a named function the model may call, and the set it is given.

A tool takes the text of its block and returns text. Whatever goes wrong becomes an Observation the
model can read; the kind of failure is kept, so that the runtime can tell a broken environment from
a broken query. Arguments in JSON are repaired when that is unambiguous, and checked against the
tool's schema, before the tool sees them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
)
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

from coa.errors import CoaError, ConfigError, ToolError, ToolMistake, ToolTimeout, boundary
from coa.grammar.grammar import Body, Grammar, Role
from coa.tools.arguments import plausible, read_arguments, signature_of, unwrap

__all__ = ["Observation", "Tool", "ToolCall", "ToolMistake", "ToolUsage", "Toolbox"]

Failure = Literal["failed", "timeout", "mistake"]
RunTool = Callable[[str], Awaitable[str]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What the model asked for."""

    tool: str
    argument: str


@dataclass(frozen=True, slots=True)
class Observation:
    """What the model is shown back."""

    text: str
    failure: Failure | None = None


@dataclass(slots=True)
class ToolUsage:
    """What the calls of one tool came to, over all rollouts that share the toolbox."""

    calls: int = 0
    failed: int = 0
    timeouts: int = 0
    mistakes: int = 0
    characters: int = 0
    """Shown to models."""
    seconds: float = 0.0
    """Of work, waiting for a place not counted."""

    def count(self, seen: Observation, seconds: float) -> None:
        self.calls += 1
        self.failed += seen.failure == "failed"
        self.timeouts += seen.failure == "timeout"
        self.mistakes += seen.failure == "mistake"
        self.characters += len(seen.text)
        self.seconds += seconds


@dataclass(frozen=True)
class Tool:
    """A named function from text to text, with its limits. `coa.tool` makes one of a function."""

    name: str
    run: RunTool
    about: str = ""
    """One sentence for the prompt."""
    body: Body = "text"
    timeout_s: float = 30.0
    max_chars: int = 4000
    """Longer results keep their head and tail, and say what was left out."""
    concurrency: int = 0
    """Most calls at a time, over all rollouts; further ones wait. 0: any number."""
    schema: str = ""
    """JSON schema of the argument as JSON text, for a body of JSON; constrained decoding obeys."""
    fingerprint: str = ""
    """What results depend on besides the argument (a corpus, settings): part of a cache's key."""
    origin: str = ""
    """What it answers from, where the fingerprint also names the task; empty: the fingerprint."""
    session: Callable[[], AbstractAsyncContextManager[RunTool]] | None = None
    """For a tool that remembers: opened once for each rollout, gives the function to call."""
    block: str = ""
    """What its blocks are called, where the tool's name is none of a block."""
    pure: bool = False
    """The same argument always gets the same answer, so a repeated call is answered from memory."""
    parameter: str = ""
    """Name of the only argument of a text tool: `{"name": "text"}` then reaches it as the text."""
    with_state: Callable[[Any], RunTool] | None = None
    """For a tool that works on the state of its rollout: gives the function to call, given it."""
    checked: bool = True
    """Whether arguments in JSON are repaired and checked before the tool sees them."""
    server: str = ""
    """The server that lists it, whose name goes before its own where another one has that."""
    signature: str = ""
    """A line for the compact prompt, where the grammar does not know the tool; of JSON arguments it
    is made of their schema."""

    def __post_init__(self) -> None:
        if self.timeout_s <= 0 or self.max_chars < 1 or self.concurrency < 0:
            raise ConfigError(
                f"tool {self.name!r}: timeout_s is {self.timeout_s!r}, max_chars "
                f"{self.max_chars!r} and concurrency {self.concurrency!r}; expected more than 0, "
                "at least 1 and at least 0."
            )

    def show(self, text: str, failure: Failure | None = None) -> Observation:
        """What the model is shown of `text`: storable characters only, and not too many."""
        return Observation(shorten(clean(text), self.max_chars), failure)

    def role(self) -> Role:
        """The role that this tool becomes in a grammar that does not know it."""
        name, tool = (self.block, self.name) if self.block else (self.name, "")
        made = Role(name=name, kind="tool", about=self.about, body=self.body, tool=tool)
        made = replace(made, signature=self.signature)
        if self.body != "json":
            return replace(made, argument=self.parameter or ("code" if self.body == "code" else ""))
        schema = json.loads(self.schema or "{}")
        if self.schema and not self.signature:
            made = replace(made, signature=signature_of(self.about, schema))
        return replace(made, example=json.dumps(plausible(schema), ensure_ascii=False))

    def argument(self, text: str) -> str:
        """The argument as the tool gets it: JSON repaired and checked, other text as it is."""
        if self.body == "text" and self.parameter:
            return unwrap(text, self.parameter)
        if self.body != "json" or not self.schema or not self.checked:
            return text
        return json.dumps(read_arguments(text, json.loads(self.schema)), ensure_ascii=False)


class Turns:
    """Semaphores by name, each of the event loop that runs: a program may have many. One is kept
    while anybody holds it or waits for it."""

    def __init__(self) -> None:
        self._held: WeakValueDictionary[tuple[int, Hashable], asyncio.Semaphore]
        self._held = WeakValueDictionary()

    def of(self, name: Hashable, at_once: int = 1) -> asyncio.Semaphore:
        key = (id(asyncio.get_running_loop()), name)
        turn = self._held.get(key)
        if turn is None:
            turn = self._held[key] = asyncio.Semaphore(at_once)
        return turn


class Toolbox(Mapping[str, Tool]):
    """The tools of one rollout, by name."""

    def __init__(self, tools: Iterable[Tool] = (), *, beside: Toolbox | None = None) -> None:
        """`beside`: another toolbox with which limits and counts are shared."""
        self._tools: dict[str, Tool] = {}
        self.usage: dict[str, ToolUsage] = {} if beside is None else beside.usage
        """What was called so far, by tool."""
        self._turns: Turns = Turns() if beside is None else beside._turns
        for each in tools:
            if each.name in self._tools:
                raise ConfigError(f"two tools are named {each.name!r}; give one another name.")
            self._tools[each.name] = each

    def __getitem__(self, name: str) -> Tool:
        return self._tools[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    def bind(self, grammar: Grammar) -> Grammar:
        """The grammar with exactly these tools as its tool roles.

        Roles that the grammar knows keep their place and wording; tools it has never seen are
        added; roles whose tool is absent are left out.
        """
        known = [role for role in grammar.roles if role.kind == "tool"]
        roles = [role for role in known if (role.tool or role.name) in self._tools]
        served = {role.tool or role.name for role in roles}
        roles += [each.role() for each in self._tools.values() if each.name not in served]
        return grammar if roles == known else grammar.with_tools(roles)

    def schemas(self, grammar: Grammar) -> tuple[tuple[str, str], ...]:
        """(role, schema) of the tools that have one, by the names they have in a bound grammar."""
        roles = [grammar.by_name[name] for name in grammar.tool_roles]
        tools = [(role.name, self._tools.get(role.tool or role.name)) for role in roles]
        return tuple((name, each.schema) for name, each in tools if each and each.schema)

    def declarations(self, grammar: Grammar) -> dict[str, dict[str, Any]]:
        """The tools as chat models are told of them, by the names they have in a bound grammar. A
        text or a program is the only argument of its tool."""
        found: dict[str, dict[str, Any]] = {}
        for name in grammar.tool_roles:
            role = grammar.by_name[name]
            each = self._tools[role.tool or name]
            if role.body == "json":
                schema = json.loads(each.schema) if each.schema else {"type": "object"}
            else:
                what = role.hint or ("program" if role.body == "code" else "text")
                holds = {"type": "string", "description": f"the {what}"}
                only = each.parameter or ("code" if role.body == "code" else "input")
                schema = {"type": "object", "properties": {only: holds}, "required": [only]}
            found[name] = {"name": name, "description": role.about or each.about}
            found[name]["parameters"] = schema
        return found

    def with_state(self, state: Any) -> Toolbox:
        """The toolbox whose tools work on this state of a rollout, where they work on any."""
        if all(each.with_state is None for each in self._tools.values()):
            return self
        bound = (
            replace(each, run=each.with_state(state), with_state=None) if each.with_state else each
            for each in self._tools.values()
        )
        return Toolbox(bound, beside=self)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Toolbox]:
        """The toolbox of one rollout: tools that remember have a session of their own in it."""
        async with AsyncExitStack() as stack:
            tools = []
            for each in self._tools.values():
                if each.session is not None:
                    with boundary(ToolError, each.name):
                        run = await stack.enter_async_context(each.session())
                    each = replace(each, run=run, session=None)
                tools.append(each)
            yield Toolbox(tools, beside=self)

    async def call(self, call: ToolCall, limit_s: float | None = None) -> Observation:
        """Run a call within its limits; every failure is an Observation."""
        chosen = self._tools.get(call.tool)
        if chosen is None:
            return Observation(f"Error: there is no tool {call.tool!r}.", "mistake")
        started = time.monotonic()
        async with AsyncExitStack() as stack:
            if chosen.concurrency:
                try:
                    async with asyncio.timeout(limit_s):
                        await stack.enter_async_context(
                            self._turns.of(chosen.name, chosen.concurrency)
                        )
                except TimeoutError:
                    return chosen.show(f"Error: {chosen.name} gave no answer in time.", "timeout")
            begun = time.monotonic()
            left = None if limit_s is None else max(0.0, limit_s - (begun - started))
            seen = await _observe(chosen, call.argument, left)
            usage = self.usage.setdefault(chosen.name, ToolUsage())
            usage.count(seen, time.monotonic() - begun)
            return seen


async def _observe(tool: Tool, argument: str, limit_s: float | None) -> Observation:
    """What a call of the tool comes to; never raises but when this task itself is cancelled."""
    seconds = tool.timeout_s if limit_s is None else min(tool.timeout_s, limit_s)
    try:
        with boundary(ToolError, tool.name):
            given = tool.argument(argument)
            async with asyncio.timeout(seconds):
                text = await tool.run(given)
            if not isinstance(text, str):
                raise TypeError(f"it returned {type(text).__name__}, expected str")
    except ToolMistake as mistake:
        return tool.show(f"Error: {mistake}", "mistake")
    except ToolTimeout as late:
        return tool.show(f"Error: {late}", "timeout")
    except CoaError as error:
        if isinstance(error.__cause__, TimeoutError):
            return tool.show(f"Error: {tool.name} gave no answer in time.", "timeout")
        return tool.show(f"Error: {error}", "failed")
    except SystemExit as stop:
        return tool.show(f"Error: {tool.name} failed: SystemExit: {stop}", "failed")
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return tool.show(f"Error: {tool.name} failed: it was cancelled.", "failed")
    return tool.show(text)


async def in_thread(function: Callable[..., T], *args: Any, **arguments: Any) -> T:
    """Run a plain function in a thread of its own, which dies with the process: one that hangs
    takes no place in a shared pool and does not keep the program from ending."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # nobody who stops waiting takes it away from the thread

    def work() -> None:
        try:
            future.set_result(function(*args, **arguments))
        except StopIteration:  # asyncio cannot carry it: the caller would wait for ever
            future.set_exception(RuntimeError("StopIteration"))
        except BaseException as error:
            future.set_exception(error)

    called = getattr(function, "__name__", "")
    threading.Thread(target=work, name=f"tool {called}", daemon=True).start()
    return await asyncio.wrap_future(future)


def fingerprint_of(*settings: Any) -> str:
    """A short name for everything besides the argument that decides what a tool answers."""
    return hashlib.sha256(json.dumps(settings, default=str).encode()).hexdigest()[:16]


def clean(text: str) -> str:
    """Plain line ends, and no characters that could not be stored or shown."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\x00", "")
    return text.encode("utf-8", "replace").decode("utf-8").strip()


def shorten(text: str, max_chars: int) -> str:
    """Keep head and tail of a long text, with a mark that says what is missing."""
    if len(text) <= max_chars:
        return text
    head = max_chars * 2 // 3
    tail = len(text) - (max_chars - head)
    return f"{text[:head]}\n[... {tail - head} characters left out ...]\n{text[tail:]}"
