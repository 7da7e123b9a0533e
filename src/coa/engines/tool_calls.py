"""ToolCallEngine: a chat model that is asked in its native tool-calling format, as an Engine.

The loop, its grammars and its trajectories are the usual ones. What the model says in messages
becomes the blocks of the grammar (reasoning, or text before a call, is a thought; a tool call is
the block of its tool; text alone is the answer), and what the environment wrote becomes messages of
the tools. So a model of any provider is an engine, a baseline or a teacher without knowing blocks.

Messages are text: there are no token ids of the model's own and no logprobs, so `exact` is False.
Ids here stand for four bytes each; tokens are the server's counts where it counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from coa.engines.base import CodecEngine, Completion, Engine, OnText, Sampling, most_tokens
from coa.engines.chat import ChatModel, ChatReply, ChatSettings
from coa.engines.openai import say_ignored
from coa.errors import ConfigError
from coa.grammar import Block, Grammar, parse
from coa.grammar.grammar import NO_THOUGHT, is_block_name
from coa.io.progress import say
from coa.io.runs import Json

Ask = Callable[[Json], Awaitable[ChatReply]]
CONTEXT = 1 << 15
"""Tokens of a conversation, by estimate, where nobody says how many the server takes."""
_MOST_CALLS = 16
"""Calls of one reply that are made; a model that wants more at once is told so by their absence."""
_LONGEST = 100_000
_ALOUD = re.compile(r"\A\s*<think(?:ing)?>(.*?)(?:</think(?:ing)?>|\Z)", re.S)
"""Thoughts that a server left in the text."""
_UNREAD = re.compile(r"<tool_?call\b")
"""Begins a call that a server could not read and left in the text."""


class FourBytes:
    """Ids of four bytes of text each, about what a token holds; the text comes back whole."""

    BORDER = 0

    def encode(self, text: str) -> list[int]:
        raw = text.encode("utf-8", "replace")
        return [int.from_bytes(b"\1" + raw[at : at + 4]) for at in range(0, len(raw), 4)]

    def encode_prompt(self, system: str, user: str) -> list[int]:
        return [*self.encode(system), self.BORDER, *self.encode(user), self.BORDER]

    def decode(self, ids: Sequence[int]) -> str:
        raw = (i.to_bytes((i.bit_length() + 7) // 8)[1:] for i in ids if i != self.BORDER)
        return b"".join(raw).decode(errors="replace")


class ToolCallEngine(CodecEngine):
    """A model on a server, for rollouts in its native format: each is played on `bound`."""

    exact = False

    def __init__(
        self,
        ref: str,
        *,
        slots: int = 8,
        context: int | None = None,
        timeout_s: float = 600.0,
        retries: int = 5,
        backoff_s: float = 0.5,
        ask: Ask | None = None,
        note: Callable[[str], None] | None = None,
        **ignored: Any,
    ) -> None:
        """`ask` sends a request in the place of the engine's own connection; the rest is as for any
        engine of a server."""
        say_ignored(ref, ignored, note or say)
        settings = ChatSettings(
            ref, slots=slots, timeout_s=timeout_s, retries=retries, backoff_s=backoff_s
        )
        self._model = ChatModel(settings)
        self.name, self.weights, self.slots = f"{ref} (tool calls)", self._model.name, slots
        self.context = context or CONTEXT
        self.codec = FourBytes()
        self.ask = ask or self._model.ask

    def bound(self, grammar: Grammar, declared: Mapping[str, Json]) -> Engine:
        """The engine of one rollout with these tools, by the names of their roles."""
        return _NativeRollout(self, grammar, declared)

    def body(self, messages: Sequence[Json], tools: Sequence[Json], how: Sampling) -> Json:
        """A request."""
        body: Json = {"model": self.weights, "messages": [*messages], "tools": [*tools]}
        body |= {"temperature": how.temperature, "max_tokens": how.max_tokens}
        body |= {"top_p": how.top_p} if how.top_p < 1 else {}
        body |= {"seed": how.key % (1 << 31)} if how.seeded else {}
        return body if tools else {k: v for k, v in body.items() if k != "tools"}

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
    ) -> Completion:
        raise AssertionError("a rollout binds it to its tools first")

    async def close(self) -> None:
        await self._model.close()


class _Turn(NamedTuple):
    """One turn of the model as blocks, and the id of its call, where it is one."""

    text: str
    call_id: str = ""


class _NativeRollout(CodecEngine):
    """The engine of one rollout, which keeps its messages as the model wrote them."""

    exact = False
    dialect = "tools"

    def __init__(
        self, engine: ToolCallEngine, grammar: Grammar, declared: Mapping[str, Json]
    ) -> None:
        if not fits(grammar):
            raise ConfigError(
                f"--dialect tools: the grammar {grammar.name!r} wants more blocks than thoughts, "
                "calls and an answer, which no model writes as messages. Expected one like react: "
                "--grammar react."
            )
        self.name, self.weights, self.context = engine.name, engine.weights, engine.context
        self.codec = engine.codec
        self._engine, self._grammar = engine, grammar
        self._tools = declared
        self._sent = [{"type": "function", "function": each} for each in declared.values()]
        self._messages: list[Json] = []
        self._waiting: list[_Turn] = []
        """Further calls of a reply that made several."""
        self._called = ""
        """The id of the call that the environment is working on."""
        self._known = 0
        """How many of the ids are in the messages."""

    def encode_prompt(self, system: str, user: str) -> list[int]:
        """The blocks of `system` are not the model's to know; it is told what its format needs."""
        answer = self._grammar.by_name[self._grammar.of_kind("answer")[0]]
        told = (
            "Answer the question. Call the tools to find out what you need, one step after the "
            "other, and say briefly why before each call. When you know the answer, reply with "
            f"nothing but it. {answer.about.strip().rstrip('.')}."
        )
        self._messages = [{"role": "system", "content": told}, {"role": "user", "content": user}]
        ids = super().encode_prompt(system, user)
        self._known = len(ids)
        return ids

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
    ) -> Completion:
        if sampling.constraint:
            raise ConfigError(f"{self.name}: native tool calls cannot be constrained to a grammar.")
        most_tokens(prompt_ids, sampling, self.context, "set a larger one")
        self._hear(self.decode(prompt_ids[self._known :]))
        usage: tuple[int, int, int] | None = (0, 0, 0)
        cut = False
        if not self._waiting:
            reply = await self._engine.ask(self._engine.body(self._messages, self._sent, sampling))
            cut = reply.finish == "length"
            self._waiting = self._read(reply)
            counted = reply.prompt_tokens and (reply.sampled_tokens or not reply.text)
            usage = (
                (reply.prompt_tokens, reply.cached_tokens, reply.sampled_tokens)
                if counted
                else None
            )
        said = self._waiting.pop(0)
        self._called = said.call_id
        if on_text is not None and said.text:
            on_text(said.text)
        ids = self.encode(said.text)
        self._known = len(prompt_ids) + len(ids)
        return Completion(ids, [0.0] * len(ids), "length" if cut else "eos", usage=usage)

    async def close(self) -> None:
        """The connections are the engine's."""

    # -- what the model is told --------------------------------------------------------------

    def _hear(self, text: str) -> None:
        """What the environment wrote since the last turn: the result of a call, or a complaint."""
        blocks = parse(self._grammar, text, env=True).blocks
        seen = "\n".join(each.body for each in blocks if each.role == self._grammar.observation)
        if not seen:
            return
        if self._called:
            message = {"role": "tool", "tool_call_id": self._called, "content": seen}
        else:
            message = {"role": "user", "content": seen}
        self._messages.append(message)

    # -- what the model says -----------------------------------------------------------------

    def _read(self, reply: ChatReply) -> list[_Turn]:
        """The turns that a reply holds, one for each of its calls; it joins the messages."""
        said = reply.message
        text, thought = reply.text[:_LONGEST], reply.reasoning[:_LONGEST]
        if aloud := _ALOUD.match(text):
            thought, text = f"{thought}\n{aloud[1]}", text[aloud.end() :]
        calls = [each for each in _calls(said) if each["function"]["name"]][:_MOST_CALLS]
        kept: Json = {"role": "assistant", "content": reply.text[:_LONGEST]}
        self._messages.append(kept | ({"tool_calls": calls} if calls else {}))
        if not calls:
            return [_Turn(self._answered(text, thought))]
        thought = f"{thought}\n{text}"
        turns = []
        for call in calls:
            name, given = call["function"]["name"], call["function"]["arguments"]
            turns.append(_Turn(self._call(name, given, thought), call["id"]))
            thought = ""
        return turns

    def _answered(self, text: str, thought: str) -> str:
        """The last reply; one that is empty, or holds a call that nobody read, is malformed."""
        if not text.strip() or _UNREAD.search(text):
            return self._grammar.escape(text.strip())
        answer = Block(self._grammar.of_kind("answer")[0], self._grammar.escape(text.strip()))
        return self._grammar.render([*self._thought(thought), answer])

    def _call(self, name: str, given: str, thought: str) -> str:
        """A call as its block. One of a tool that is not there is written so that the parser says
        what is wrong with it."""
        before = self._grammar.render([*self._thought(thought)])
        if name not in self._tools:
            tag = is_block_name(name) and name not in self._grammar.tags
            opened = f"<{name}>" if tag else f"{name}: "
            return f"{before}\n{opened}{self._grammar.escape(given)}".strip()
        role = self._grammar.by_name[name]
        if role.body == "json":
            body = self._grammar.escape_json(given.strip() or "{}")
        else:
            body = _only_text(given, next(iter(self._tools[name]["parameters"]["properties"])))
            if role.body == "code":
                body = body if "```" in body or not body.strip() else f"```py\n{body}\n```"
            else:
                body = self._grammar.escape(body)
        return f"{before}\n{self._grammar.render([Block(name, body)])}".strip()

    def _thought(self, text: str) -> Iterator[Block]:
        """A thought, where the grammar has any; without words only where it must be there."""
        role = self._grammar.interleave
        thought = " ".join(self._grammar.escape(text).split())
        if role and (thought or not self._grammar.sparing):
            yield Block(role, thought or NO_THOUGHT)


def fits(grammar: Grammar) -> bool:
    """Whether thoughts, calls and an answer, which is what messages hold, are a whole chain."""
    answers = {*grammar.of_kind("answer")}
    after = [grammar.by_name[name].next for name in grammar.tool_roles]
    return all(answers & {*grammar.expand(names)} for names in (grammar.start, *after))


def _only_text(given: str, name: str) -> str:
    """The text of a call's only argument. A bare text is itself; an object without it is empty,
    which the grammar refuses."""
    try:
        value = json.loads(given, strict=False)
    except (ValueError, RecursionError):
        return given
    if isinstance(value, str):
        return value
    found = value.get(name) if isinstance(value, dict) else None
    if isinstance(found, list) and all(isinstance(each, str) for each in found):
        found = " | ".join(found)
    return found if isinstance(found, str) else ""


def _calls(message: Mapping[str, Any]) -> Iterator[Json]:
    """The calls of a message, made whole: a stranger's server may leave anything out."""
    listed = message.get("tool_calls")
    for number, call in enumerate(listed if isinstance(listed, list) else (), 1):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            continue
        given = function.get("arguments")
        given = given if isinstance(given, str) else json.dumps(given if given is not None else {})
        function = {"name": str(function.get("name") or "")[:200], "arguments": given[:_LONGEST]}
        yield {"id": str(call.get("id") or f"call-{number}"), "type": "function"} | {
            "function": function
        }
