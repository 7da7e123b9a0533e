"""Tool and Toolbox: a named function the model may call, and the set it is given.

A tool takes the text of its block and returns text. Whatever goes wrong becomes an Observation the
model can read; the kind of failure is kept, so that the runtime can tell a broken environment from
a broken query.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from coa.errors import CoaError, ConfigError, ToolError, ToolTimeout, boundary
from coa.protocol.grammar import Body, Grammar, Role

Failure = Literal["failed", "timeout", "mistake"]
_SPACE = {"\r\n": "\n", "\r": "\n"}


class ToolMistake(CoaError, ValueError):
    """The model called a tool wrongly; the message tells it how to do better."""


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


@dataclass(frozen=True)
class Tool:
    """A named function from text to text, with its limits."""

    name: str
    run: Callable[[str], Awaitable[str]]
    about: str = ""
    """One sentence for the prompt."""
    body: Body = "text"
    timeout_s: float = 30.0
    max_chars: int = 4000
    """Longer results keep their head and tail, and say what was left out."""
    schema: str = ""
    """JSON schema of the argument as JSON text, for a body of JSON; constrained decoding obeys."""

    def show(self, text: str, failure: Failure | None = None) -> Observation:
        """What the model is shown of `text`: storable characters only, and not too many."""
        return Observation(shorten(clean(text), self.max_chars), failure)

    def role(self) -> Role:
        """The role that this tool becomes in a grammar that does not know it."""
        return Role(name=self.name, kind="tool", about=self.about, body=self.body)


def tool(function: Callable[[str], Any] | None = None, *, name: str = "", **limits: Any) -> Any:
    """Make a Tool of a function (async, or plain and run in a thread).

    The name is the function's, the description its docstring's first line.
    """

    def build(function: Callable[[str], Any]) -> Tool:
        async def run(argument: str) -> str:
            if inspect.iscoroutinefunction(function):
                return str(await function(argument))
            return str(await _in_thread(function, argument))

        about = (inspect.getdoc(function) or "").partition("\n")[0].rstrip(".")
        return Tool(name=name or function.__name__, run=run, about=about, **limits)

    return build if function is None else build(function)


async def _in_thread(function: Callable[[str], Any], argument: str) -> Any:
    """Run a plain function in a thread of its own, which dies with the process: one that hangs
    takes no place in a shared pool and does not keep the program from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():  # timed out or cancelled meanwhile
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)

    def work() -> None:
        value: Any = None
        error: BaseException | None = None
        try:
            value = function(argument)
        except StopIteration:  # a future cannot carry it: the caller would wait for ever
            error = RuntimeError("StopIteration")
        except BaseException as exc:
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop has ended; nobody waits any more
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=work, name=f"tool {function.__name__}", daemon=True).start()
    return await future


class Toolbox(Mapping[str, Tool]):
    """The tools of one rollout, by name."""

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        self._tools: dict[str, Tool] = {}
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

    async def call(self, call: ToolCall, limit_s: float | None = None) -> Observation:
        """Run a call within its limits; every failure is an Observation."""
        chosen = self._tools.get(call.tool)
        if chosen is None:
            return Observation(f"Error: there is no tool {call.tool!r}.", "mistake")
        seconds = chosen.timeout_s if limit_s is None else min(chosen.timeout_s, limit_s)
        try:
            with boundary(ToolError, chosen.name):
                async with asyncio.timeout(seconds):
                    text = await chosen.run(call.argument)
                if not isinstance(text, str):
                    raise TypeError(f"it returned {type(text).__name__}, expected str")
        except ToolMistake as mistake:
            return chosen.show(f"Error: {mistake}", "mistake")
        except CoaError as error:
            timed_out = isinstance(error, ToolTimeout) or isinstance(error.__cause__, TimeoutError)
            if timed_out:
                return chosen.show(f"Error: {chosen.name} gave no answer in time.", "timeout")
            return chosen.show(f"Error: {error}", "failed")
        except SystemExit as stop:
            return chosen.show(f"Error: {chosen.name} failed: SystemExit: {stop}", "failed")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return chosen.show(f"Error: {chosen.name} failed: it was cancelled.", "failed")
        return chosen.show(text)


def clean(text: str) -> str:
    """Plain line ends, and no characters that could not be stored or shown."""
    for old, new in _SPACE.items():
        text = text.replace(old, new)
    return text.replace("\x00", "").encode("utf-8", "replace").decode("utf-8").strip()


def shorten(text: str, max_chars: int) -> str:
    """Keep head and tail of a long text, with a mark that says what is missing."""
    if len(text) <= max_chars:
        return text
    head = max_chars * 2 // 3
    tail = len(text) - (max_chars - head)
    return f"{text[:head]}\n[... {tail - head} characters left out ...]\n{text[tail:]}"
