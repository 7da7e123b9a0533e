"""Tools of MCP servers: programs that are started, or addresses, whose tools join an environment's.

    Environment("notes", tools=[mcp("uvx mcp-server-git", tools=["git_log"]), mcp(URL), convert])

A server is a stranger. It is asked for its tools once, when the environment is opened; names,
descriptions and schemas are brought down to what a prompt can hold, and what it lists later is
noticed, said and not used. It gets no environment variable but those that are named, and can ask
for nothing: sampling, elicitation and roots are refused. What it sends has a most in size and in
time. One that ends, or hangs, is started again by the next call.

The protocol is the official SDK's (the extra `mcp`), which falls back to older versions of it by
itself. Its transport for programs reads lines of any length, so that ours stands in for it.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

from coa.errors import ConfigError, ToolError, ToolMistake
from coa.io.progress import say
from coa.io.runs import Json
from coa.tasks import Task
from coa.tools.arguments import described, known_schema, only_text, plain_words, without_words
from coa.tools.base import RunTool, Tool, fingerprint_of
from coa.tools.functions import Blames
from coa.tools.servers import FOLDER, SERVERS, VARIABLE, Lease, McpConnection, McpServer, Pool
from coa.tools.sources import Opening, ToolsOf, withheld

MAX_TOOLS = 128
MAX_ABOUT = 2000
"""Characters that a prompt says of one tool, its arguments included."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,63}")
_OWN_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")
_LITERAL_KEY = re.compile(
    r"(?<![a-z])(?:api_?key|key|token|secret|passw\w*|bearer|authorization)"
    r"(?:\s*[=:]\s*|\s+)(?:bearer\s+)?(?!bearer\b|\$\{)[^\s&]{6,}",
    re.I,
)
_RUNNER = re.compile(r"(?:python[\d.]*|node|npx|uvx?|bunx?|deno|pipx|docker|run|tool|env|exec|sh)")
_AROUND = re.compile(r"^(?:mcp[-_])?(?:server[-_])?|(?:[-_]mcp)?(?:[-_]server)?(?:\.\w+)?(?:@.*)?$")


def mcp(server: str, **how: Any) -> McpTools:
    """The tools of an MCP server: a command line, or the URL of one that speaks streamable HTTP.
    `how` is what `McpTools` takes: tools, env, headers, per_rollout, timeout_s, name ..."""
    place = "url" if re.match(r"https?://", server.strip()) else "command"
    given: dict[str, Any] = {place: server.strip(), **how}
    for key in {"tools", "env", "headers"} & how.keys():
        given[key] = (how[key],) if isinstance(how[key], str) else tuple(how[key])
    try:
        return McpTools(**given)
    except TypeError as wrong:
        raise ConfigError(f"mcp(...): {wrong}.") from None


@dataclass(frozen=True)
class McpTools:
    """A source of tools: an MCP server. Making one opens nothing."""

    command: str = ""
    """A command line, without a shell. `${NAME}` is the environment variable of that name."""
    url: str = ""
    """Of a server that speaks streamable HTTP; `${NAME}` as in a command."""
    name: str = ""
    """Goes before the name of a tool that is called like another one; of the command by default."""
    tools: tuple[str, ...] = ()
    """Those that are used; empty: all that it lists."""
    env: tuple[str, ...] = ()
    """Names of environment variables that the program gets."""
    headers: tuple[str, ...] = ()
    """Sent to a URL, as `Authorization: Bearer ${TOKEN}`."""
    per_rollout: bool = False
    """Each rollout has a server of its own, which ends with it."""
    files: str = ""
    """A folder of which the `{folder}` of each rollout is a copy."""
    timeout_s: float = 30.0
    """For one call."""
    start_s: float = 60.0
    """For its start, until it has listed its tools."""
    max_chars: int = 4000
    errors: Blames = "model"
    """Whose fault it is when a tool reports an error: the model's, or the world's (`outside`)."""
    folder: str = field(default="", repr=False)
    """Where its command is started; that of an `environment.toml` which names it."""

    def __post_init__(self) -> None:
        if found := _LITERAL_KEY.search(" ".join((self.command, self.url, *self.headers))):
            kind = re.split(r"[\s=:]", found[0])[0]
            raise ConfigError(
                f"mcp server {self.label!r}: a {kind} is written out; write ${{NAME}}, the "
                "environment variable it is in."
            )
        for problem in self._problems():
            raise ConfigError(f"mcp server {self.shown!r}: {problem}")

    def _problems(self) -> Iterator[str]:
        if bool(self.command) == bool(self.url):
            yield "expected a command or a url, one of the two."
        if self.command:
            yield from self._problems_of_command()
        else:
            yield from self._problems_of_url()
        for given in self.env:
            if not re.fullmatch(r"\w+", given):
                yield f"env has {given!r}, expected the name of an environment variable alone."
        if self.errors not in get_args(Blames):
            yield f"errors is {self.errors!r}, expected 'model' or 'outside'."
        if self.name and not _OWN_NAME.fullmatch(self.name):
            yield f"name is {self.name!r}, expected small letters, digits and underscores."
        if not (0 < self.timeout_s < math.inf and 0 < self.start_s < math.inf):
            yield "timeout_s and start_s are seconds, more than 0."
        if self.max_chars < 1:
            yield f"max_chars is {self.max_chars}, expected at least 1."

    def _problems_of_command(self) -> Iterator[str]:
        try:
            if not shlex.split(self.command):
                yield "the command is empty."
        except ValueError as wrong:
            yield f"the command cannot be read ({wrong})."
        if self.headers:
            yield "headers are for a url; a program gets env = [NAMES]."
        if FOLDER in self.command and not self.per_rollout:
            yield f"{FOLDER} is a fresh folder for each rollout; set per_rollout = true."
        if self.files and FOLDER not in self.command:
            yield f"files are copied to {FOLDER}, which the command does not name."

    def _problems_of_url(self) -> Iterator[str]:
        try:
            parts = urlsplit(self.url)
            bad = parts.scheme not in ("http", "https") or not parts.hostname
        except ValueError:
            bad = True
        if bad:
            yield "expected http://HOST:PORT/PATH or https://."
        elif "@" in parts.netloc:
            yield "a URL with a user is no place for a password; write headers = [...]."
        if self.env or self.files:
            yield "env and files are for a command; a url takes headers."
        for header in self.headers:
            if not re.fullmatch(r"[\w-]+:[^\r\n]+", header):
                yield f"headers has {header!r}, expected 'Name: value'."

    @property
    def shown(self) -> str:
        """What messages call it: as it was written, with names where secrets belong."""
        return self.command or re.sub(r"//[^/@]*@", "//", self.url.partition("?")[0])

    @property
    def label(self) -> str:
        """Its name, or one made of its command: `npx -y @scope/server-files /x` gives `files`."""
        if self.name:
            return self.name
        if self.url:
            words = [urlsplit(self.url).hostname or ""]
        else:
            words = [w for w in self.command.split() if not w.startswith("-") and "=" not in w]
            words = [Path(w).name for w in words if not _RUNNER.fullmatch(Path(w).name)]
        plain = _AROUND.sub("", words[0]) if words else ""
        plain = re.sub(r"[^a-z0-9]+", "_", plain.lower()).strip("_")[:31]
        return plain if _OWN_NAME.fullmatch(plain) else "mcp"

    def variables(self) -> dict[str, str]:
        """The environment variables that it names, with their values."""
        named = [*self.env]
        for text in (self.command, self.url, *self.headers):
            named += VARIABLE.findall(text)
        for name in named:
            if not os.environ.get(name):
                raise ConfigError(
                    f"mcp server {self.shown!r}: the environment variable {name} is not set."
                )
        return {name: os.environ[name] for name in named}

    @asynccontextmanager
    async def open(self, how: Opening) -> AsyncIterator[ToolsOf]:
        if how.observations == "wrong":
            raise ConfigError(
                f"mcp server {self.shown!r}: observations 'wrong': it has no wrong answers to "
                "give; withheld and closed_book work with it."
            )
        async with AsyncExitStack() as stack:
            first = McpServer(self)
            stack.push_async_callback(first.close)
            listed = self._listed(await first.connection())
            if not how.live or how.observations != "real":  # nobody will call it
                await first.close()
            pool = Pool(self, first, SERVERS) if self.per_rollout else None
            made = [each.tool(self, each.calling(first)) for each in listed]
            if how.observations == "withheld":
                made, pool = [withheld(each) for each in made], None

            def tools(task: Task) -> Sequence[Tool]:
                if pool is None:
                    return made
                lease = Lease(pool)  # these tools are those of one rollout
                pairs = zip(made, listed, strict=True)
                return [
                    replace(tool, run=_unopened, session=each.session(lease))
                    for tool, each in pairs
                ]

            yield tools

    def _listed(self, held: McpConnection) -> list[_Listed]:
        """The tools that are used, as a prompt can have them."""
        found = {str(each.name): each for each in held.tools}
        for name in self.tools:
            if name not in found:
                known = ", ".join(sorted(each for each in found if _NAME.fullmatch(each))[:40])
                raise ConfigError(
                    f"mcp server {self.shown!r}: has no tool {name!r}. It has {known or 'none'}."
                )
        chosen = [found[name] for name in self.tools] or list(found.values())
        if len(chosen) > MAX_TOOLS:
            raise ConfigError(
                f"mcp server {self.shown!r}: lists {len(chosen)} tools, at most {MAX_TOOLS} can be "
                "used. Name those that are needed: tools = [...]."
            )
        made: list[_Listed] = []
        for each in chosen:
            try:
                made.append(_Listed.read(each, f"{held.about} {self.shown}"))
            except ToolMistake as odd:
                said = f"mcp server {self.shown!r}: a tool cannot be used: {odd}"
                if self.tools:
                    raise ConfigError(said) from None
                say(f"coa: {said}")
        if not made:
            raise ConfigError(f"mcp server {self.shown!r}: has no tool that can be used.")
        return made


# -- what a server lists -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Listed:
    """A tool as a server listed it, brought down to what a prompt can hold."""

    name: str
    about: str
    schema: str
    only: str
    """Its only argument, where a call is that text alone."""
    fingerprint: str

    @classmethod
    def read(cls, listed: Any, server: str) -> _Listed:
        """The tool that a server lists; `ToolMistake` says why there can be none."""
        name = str(listed.name)
        if not _NAME.fullmatch(name):
            raise ToolMistake(f"its name is {plain_words(name, 60)!r}.")
        schema = known_schema(listed.input_schema)
        about = plain_words(listed.description or "", 600).rstrip(".")
        if only := only_text(schema):
            meaning = schema["properties"][only].get("description") or f"the {only}"
            said = f"he content is {meaning}"
            whole = f"{about}; t{said}" if about else f"T{said}"
        else:
            whole = described(about, schema)
            whole = whole if len(whole) <= MAX_ABOUT else described(about, without_words(schema))
        if len(whole) > MAX_ABOUT:
            raise ToolMistake(f"{name}: its arguments take more than {MAX_ABOUT} characters.")
        plain = json.dumps(without_words(schema))
        return cls(name, whole, plain, only, fingerprint_of("mcp", server, name, plain))

    def tool(self, source: McpTools, run: RunTool) -> Tool:
        return Tool(
            self.name,
            run,
            about=self.about,
            body="text" if self.only else "json",
            schema="" if self.only else self.schema,
            parameter=self.only,
            timeout_s=source.timeout_s,
            max_chars=source.max_chars,
            fingerprint=self.fingerprint,
            server=source.label,
        )

    def calling(self, server: McpServer) -> RunTool:
        async def run(argument: str) -> str:
            given: Json = {self.only: argument} if self.only else json.loads(argument)
            return await server.call(self.name, given)

        return run

    def session(self, lease: Lease) -> Callable[[], AbstractAsyncContextManager[RunTool]]:
        @asynccontextmanager
        async def session() -> AsyncIterator[RunTool]:
            async with lease.server() as server:
                yield self.calling(server)

        return session


async def _unopened(argument: str) -> str:
    raise ToolError("the server of a rollout answers within that rollout only.")


def mcp_of(given: str | McpTools, folder: Path) -> McpTools:
    """A server as a file has it, whose command is started in the folder of that file."""
    made = mcp(given) if isinstance(given, str) else given
    return replace(made, folder=str(Path(folder, made.folder))) if made.command else made
