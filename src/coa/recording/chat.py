"""The chat client of a team of agents: each model call is paid for once and within a budget.

A request goes to POST /v1/chat/completions of any OpenAI-compatible server. What comes back is
appended to a journal before anything else is done with it, under a key that is made of everything
the answer depends on; a run that is continued takes from the journal what was paid for already. A
request in flight is finished and kept even when the work that wanted it has been given up.

Messages of the same role in a row are sent as one, since the templates of many models insist on
turns (`in_turns`). Tokens are counted by the server; where it does not, a token is taken for every
four bytes of text, and four more for each message (`count_tokens`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coa.engines.chat import ChatModel, ChatReply, ChatSettings
from coa.errors import CoaError, ConfigError, UsageError
from coa.grammar import ChatMessage
from coa.io.files import lock_output
from coa.io.progress import say
from coa.io.runs import Appender, Json, read_records
from coa.io.settings import check_ranges
from coa.recording.budget import Amount, Purse, find_price
from coa.recording.episode import ModelCall

BYTES_PER_TOKEN, TOKENS_PER_MESSAGE = 4, 4
HOTTER, HOTTEST = 0.4, 1.2
"""Added to the temperature for each attempt, up to so much."""
REFUSALS = (400, 413, 422)
"""What servers answer to a conversation that is too long, or that they do not want to continue."""
_UNPAID = re.compile(r"\b(?:credits?|billing|balance|quota|payment)\b", re.I)
"""Said by a server that wants money: that concerns all conversations, whatever its status."""


JSON_SCHEMA, JSON_OBJECT, NO_SCHEMA = "json_schema", "json_object", "off"
ALONE = "solver"
"""The only agent of an episode in native tool calls."""
STRUCTURED = "structured outputs"
"""Who asks for a server's way with schemas, in the journal."""
_SAID = {
    JSON_SCHEMA: "replies follow a JSON schema (response_format)",
    JSON_OBJECT: "replies follow a JSON schema (json_object)",
    NO_SCHEMA: "the server follows no JSON schema; replies are asked for in words and checked",
}
_WORD = "coa"
_FORCED = {
    "type": "object",
    "properties": {"word": {"enum": [_WORD]}, "why": {"type": "string", "maxLength": 8}},
    "required": ["word", "why"],
    "additionalProperties": False,
}
"""Holds a word that nobody says by himself, and the keywords that our schemas have."""


def as_sent(way: str, name: str, schema: Json | None) -> Json:
    """The fields of a request that make a server follow a schema."""
    if schema is None or way not in (JSON_SCHEMA, JSON_OBJECT):
        return {}
    if way == JSON_OBJECT:  # llama.cpp before it knew the other; elsewhere the schema is ignored
        return {"response_format": {"type": way, "schema": schema}}
    form = {"name": re.sub(r"\W+", "_", name), "strict": True, "schema": schema}
    return {"response_format": {"type": way, way: form}}


class EpisodeOver(Exception):
    """This episode cannot go on, for a reason that does not concern the others."""


@dataclass(frozen=True)
class LLMSettings(ChatSettings):
    """How a team of language models works; see docs/teachers.md. Among the `extra` fields,
    `max_completion_tokens` is sent instead of `max_tokens`."""

    temperature: float = 0.7
    without: list[str] = field(default_factory=list)
    """Fields that are not sent, as `seed` or `temperature` to a server that refuses them."""
    prices: str = ""
    """A price table in TOML; empty: costs are not known."""
    budget_tokens: int | None = None
    budget_money: float | None = None
    """Of the whole run, over all its parts."""
    task_tokens: int | None = None
    task_money: float | None = None
    """Of one task, which ends with an error when it needs more."""
    rounds: int = 3
    """Calls that one step may take before it is given up."""
    replans: int = 2
    """How often a failed check may send the team back to the planner."""
    structured: str = "auto"
    """How the server is made to follow the schema of a reply: json_schema, json_object (with the
    schema beside it), off; auto: the first of them that it obeys."""
    dialect: str = "team"
    """team, or tools: the model alone, in its native tool-calling format."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, self.table, {"at least 1": "rounds", "0 or more": "replans"})
        for name, known in (("structured", ("auto", *_SAID)), ("dialect", ("team", "tools"))):
            if getattr(self, name) not in known:
                found = getattr(self, name)
                raise ConfigError(f"{name} is {found!r}, expected {', '.join(known)}.")
        if not isinstance(longest := self.extra.get("max_completion_tokens", 1), int | None):
            raise ConfigError(f"max_completion_tokens is {longest!r}, expected an integer.")
        if (self.budget_money or self.task_money) and not self.prices:
            raise ConfigError("a budget of money needs a table of prices (prices=FILE.toml).")

    @property
    def longest(self) -> int:
        """Tokens that a reply may have."""
        longest = self.extra.get("max_completion_tokens")
        return self.max_tokens if longest is None else int(longest)


@dataclass(frozen=True)
class Request:
    """What an agent's model is asked, and for whom."""

    task_id: str
    agent: str
    messages: list[ChatMessage]
    seed: int = 0
    branch: str = ""
    schema: Json | None = None
    """Of the JSON object that is asked for, for a server that can follow it."""
    attempt: int = 0
    """How many replies were no good before; every further one is sampled hotter."""
    body: Json | None = None
    """All of the request, where it is not made of the messages."""

    @property
    def prompt_tokens(self) -> int:
        """By estimate."""
        return sum(count_tokens(message.text) for message in self.messages)


@dataclass(frozen=True)
class Paid:
    """A model call that was answered."""

    call: ModelCall
    cut: bool = False
    """The reply ended because it was too long."""
    estimated: bool = False
    """The server did not count the tokens."""
    response: Any = None
    """All that the server answered, for who reads more than its text."""

    @property
    def amount(self) -> Amount:
        """What it cost."""
        tokens = (self.call.prompt_tokens or 0) + (self.call.sampled_tokens or 0)
        return Amount(tokens, self.call.cost or 0.0)


def count_tokens(text: str) -> int:
    """An estimate, for one message: a token for every four bytes, and four for its frame."""
    return -(-len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN) + TOKENS_PER_MESSAGE


def in_turns(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages as they are sent: those of the same role in a row are one."""
    turns: list[ChatMessage] = []
    for message in messages:
        if turns and turns[-1].role == message.role:
            turns[-1] = ChatMessage(message.role, f"{turns[-1].text}\n\n{message.text}")
        else:
            turns.append(message)
    return turns


# -- the journal -----------------------------------------------------------------------------


class Journal:
    """Every answer that was paid for, by the key of its request; without a file only their sum.

    One process at a time has the file open: two would pay for the same answers.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.spent = Amount()
        self.answers = 0
        """Given to agents."""
        self._paid: dict[str, Paid] = {}
        self._file: Appender | None = None
        self._opened = ExitStack()
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(lock_output(path))
            self._file = stack.enter_context(Appender(path))
            read_records(path, self._note)
            self._opened = stack.pop_all()

    def find(self, key: str) -> Paid | None:
        return self._paid.get(key)

    def keep(self, key: str, request: Request, paid: Paid, response: Any) -> None:
        """Write an answer down and count what it cost."""
        call = {name: value for name, value in asdict(paid.call).items() if name != "given"}
        record: Json = {"key": key, "task_id": request.task_id, "agent": request.agent, **call}
        record |= {"cut": paid.cut, "estimated": paid.estimated, "response": response}
        if self._file is not None:
            self._file.write(record)
        self._note(record)

    def _note(self, record: Json) -> None:
        names = ("model", "text", "prompt_tokens", "cached_tokens", "sampled_tokens", "cost")
        call = ModelCall(**{name: record[name] for name in names})
        response = record.get("response") if record["agent"] == ALONE else None
        paid = Paid(call, record["cut"], record["estimated"], response)
        if self._file is not None:  # without a file nothing can be continued
            self._paid[record["key"]] = paid
        self.spent += paid.amount
        self.answers += record["agent"] != STRUCTURED

    def close(self) -> None:
        self._opened.close()


def journal_of(out: Path) -> Path:
    """Where the model calls of an episodes file are kept."""
    return out.with_name(f"{out.name}.calls.jsonl")


# -- a server --------------------------------------------------------------------------------


class ChatClient:
    """A model behind an OpenAI-compatible server, called within the budget of a run."""

    def __init__(self, settings: LLMSettings, journal: Path | None = None) -> None:
        self.settings, self._model = settings, ChatModel(settings)
        self._price = find_price(settings.prices, self._model.name)
        self._purse = Purse(settings.budget_tokens, settings.budget_money)
        self._flying: set[asyncio.Task[Paid]] = set()
        self._slots = asyncio.Semaphore(settings.slots)
        self._structured = "" if settings.structured == "auto" else settings.structured
        """How the server is made to follow a schema; empty: it was not asked yet."""
        self._asking = asyncio.Lock()
        self._stopped: CoaError | None = None
        """Why no further call is made."""
        self._journal = Journal(journal)
        self._purse.spent = self._journal.spent

    def body(self, request: Request) -> Json:
        """What is sent."""
        if request.body is not None:
            body = {**request.body, **self.settings.extra}
        else:
            form = as_sent(self._structured, request.agent, request.schema)
            usual = self.settings.temperature
            heat = max(usual, min(HOTTEST, usual + HOTTER * request.attempt))
            messages = in_turns(request.messages)
            body = self._model.body(messages, seed=request.seed, **{"temperature": heat, **form})
        return self._without(body)

    def _without(self, body: Json) -> Json:
        left_out = list(self.settings.without)
        if "max_completion_tokens" in self.settings.extra:  # servers refuse to be given both
            left_out.append("max_tokens")
        return {name: value for name, value in body.items() if name not in left_out}

    async def answer(self, request: Request, purse: Purse) -> Paid:
        """The reply to a request, from the journal or else from the server, paid from `purse`."""
        longest = self.settings.longest
        most = Amount(request.prompt_tokens + longest)
        if self._price is not None:
            most = Amount(most.tokens, self._price.of(request.prompt_tokens, 0, longest))
        if lacking := purse.lacks(most):
            tokens, money = self.settings.task_tokens, self.settings.task_money
            whole = f"{tokens} tokens" if "tokens" in lacking else f"{money:g} in money"
            raise EpisodeOver(f"over the task's budget of {whole}")
        if request.schema is not None:
            await self._find_structured()
        body = self.body(request)
        key = _key(body, request)
        paid = self._journal.find(key)
        if paid is None:
            async with self._slots:  # who still waits here when the run is given up pays nothing
                try:
                    paid = await self._ask(key, body, request, most)
                except CoaError as trouble:
                    self._stopped = self._stopped or trouble
                    raise
        purse.spent += paid.amount
        return paid

    async def _find_structured(self) -> None:
        """Ask the server once in which way it follows a schema, if in any, and say it in a line;
        what was found stands in the journal, so that a run that is continued asks nobody."""
        async with self._asking:
            if self._structured:
                return
            request = Request("", STRUCTURED, [], body={})
            key = _key({"model": self._model.name}, request)
            found = self._journal.find(key)
            if found is None:
                found = await self._probe()
                self._journal.keep(key, request, found, None)
                self._purse.settle(Amount(), found.amount)
                say(f"coa: {self.settings.model}: {_SAID[found.call.text]}")
            self._structured = found.call.text

    async def _probe(self) -> Paid:
        """The first way in which a model says what it would not say by itself."""
        from coa.engines.transport import ServerRefused

        spent, answered = ModelCall(self._model.name, NO_SCHEMA, 0, 0, 0), False
        for way in (JSON_SCHEMA, JSON_OBJECT, NO_SCHEMA):
            if way == NO_SCHEMA and answered:  # otherwise something else may be wrong
                break
            told = [("user", "Say hello. Reply with a JSON object.")]
            body = self._without(self._model.body(told, **as_sent(way, "probe", _FORCED)))
            try:
                reply = await self._model.ask(body)
            except ServerRefused as refusal:
                given_up = way == NO_SCHEMA or refusal.status in (401, 403, 429)
                if given_up or _UNPAID.search(str(refusal)):
                    raise
                continue
            answered = True
            paid = self._read(reply, Request("", STRUCTURED, []))
            prompt = (spent.prompt_tokens or 0) + (paid.call.prompt_tokens or 0)
            sampled = (spent.sampled_tokens or 0) + (paid.call.sampled_tokens or 0)
            cost = None if paid.call.cost is None else (spent.cost or 0.0) + paid.call.cost
            follows = way != NO_SCHEMA and _WORD in reply.text
            text = way if follows else NO_SCHEMA
            spent = ModelCall(self._model.name, text, prompt, 0, sampled, cost)
            if follows:
                break
        return Paid(spent)

    async def _ask(self, key: str, body: Json, request: Request, most: Amount) -> Paid:
        await self._purse.reserve(most)
        if self._stopped is not None:  # what ends the run for one ends it for all
            self._purse.settle(most, Amount())
            raise self._stopped
        flight = asyncio.create_task(self._send(key, body, request, most))
        self._flying.add(flight)
        flight.add_done_callback(self._landed)
        return await asyncio.shield(flight)

    async def _send(self, key: str, body: Json, request: Request, most: Amount) -> Paid:
        from coa.engines.transport import ServerRefused

        spent = Amount()
        try:
            reply = await self._model.ask(body)
            paid = self._read(reply, request)
            spent = paid.amount
            self._journal.keep(key, request, paid, reply.response)
            return paid
        except ServerRefused as refusal:
            ours = not self._journal.answers or _UNPAID.search(str(refusal))
            if refusal.status in REFUSALS and not ours:
                raise EpisodeOver(str(refusal)) from refusal
            raise  # something is wrong with all requests, not with this one
        finally:
            self._purse.settle(most, spent)

    def _landed(self, flight: asyncio.Task[Paid]) -> None:
        self._flying.discard(flight)
        if not flight.cancelled():
            flight.exception()  # whoever waited for it may be gone

    def _read(self, reply: ChatReply, request: Request) -> Paid:
        text, prompt, sampled = reply.text, reply.prompt_tokens, reply.sampled_tokens
        estimated = not prompt or (not sampled and bool(text))
        if estimated:
            prompt, sampled = request.prompt_tokens, count_tokens(text)
        cached = min(prompt, reply.cached_tokens)
        cost = None if self._price is None else self._price.of(prompt, cached, sampled)
        call = ModelCall(self._model.name, text, prompt, cached, sampled, cost)
        return Paid(call, reply.finish == "length", estimated, reply.response)

    async def close(self) -> None:
        """Let requests in flight arrive, since they are paid for, and close the connections."""
        self._stopped = self._stopped or UsageError("the teacher is closed.")
        await asyncio.gather(*self._flying, return_exceptions=True)
        await self._model.close()
        self._journal.close()


def _key(body: Json, request: Request) -> str:
    """Of everything that an answer depends on, and of who asks for it."""
    # The 0 was once a count; journals that are continued have it in their keys.
    asker = [request.task_id, request.seed, request.agent, request.branch, 0]
    text = json.dumps([body, asker], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
