"""ChatModel: a model behind an OpenAI-compatible server that is asked for words, not for tokens.

The judge of a reward, the agents of a team and what summarises web pages send their requests to
POST /v1/chat/completions through it. What is asked, how often, and what is kept of the answers is
theirs to decide.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from coa.errors import ModelError
from coa.io.runs import Json
from coa.io.settings import check_ranges
from coa.models.references import resolve


@dataclass(frozen=True)
class ChatSettings:
    """Which model is asked, and how."""

    table: ClassVar[str] = ""
    """The table of a recipe that it stands in, for messages."""

    model: str = ""
    """openai:NAME@URL."""
    temperature: float = 0.0
    max_tokens: int = 1024
    """The longest reply."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of every request; null leaves one out."""
    attempts: int = 3
    """How often it is asked until its reply can be read."""
    slots: int = 8
    """Requests at once."""
    timeout_s: float = 600.0
    retries: int = 5
    backoff_s: float = 0.5

    def __post_init__(self) -> None:
        ranges = {
            "at least 1": "max_tokens attempts slots",
            "0 or more": "retries temperature backoff_s",
            "more than 0": "timeout_s",
        }
        check_ranges(self, self.table, ranges)


class ChatReply(NamedTuple):
    """What a server answered; a text that is not there is empty, a count is 0."""

    text: str
    finish: str
    """Why the reply ended."""
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt."""
    sampled_tokens: int
    response: Any
    """All of it."""

    @property
    def message(self) -> Json:
        """The message itself, with whatever else the server puts into it."""
        found = _at(self.response, "choices", 0, "message")
        return found if isinstance(found, dict) else {}

    @property
    def reasoning(self) -> str:
        """What the model thought aloud, where the server keeps it apart."""
        named = (self.message.get(name) for name in ("reasoning_content", "reasoning"))
        return next((each for each in named if isinstance(each, str)), "")

    @classmethod
    def read(cls, response: Any) -> ChatReply:
        # Half a letter in a response must not cost the whole answer: it could not be written.
        response = json.loads(json.dumps(response, ensure_ascii=False).encode(errors="replace"))
        content = _at(response, "choices", 0, "message", "content")
        texts = [_at(part, "text") for part in content] if isinstance(content, list) else [content]
        text = "".join(each for each in texts if isinstance(each, str))

        def count(*path: str) -> int:
            found = _at(response, "usage", *path)
            return found if isinstance(found, int) and found > 0 else 0

        return cls(
            text,
            str(_at(response, "choices", 0, "finish_reason") or ""),
            count("prompt_tokens"),
            count("prompt_tokens_details", "cached_tokens"),
            count("completion_tokens"),
            response,
        )


def _at(found: Any, *path: str | int) -> Any:
    """What stands at a place of a response; None where there is no such place."""
    for step in path:
        try:
            found = found[step]
        except (LookupError, TypeError):
            return None
    return found


class ChatModel:
    """A model on a server, with its connections; `close` it."""

    def __init__(self, settings: ChatSettings) -> None:
        from coa.engines.transport import Transport

        source = resolve(settings.model)
        if source.model is None or source.url is None:
            raise ModelError(f"{settings.model!r} is not a model on a server (openai:NAME@URL).")
        self.settings, self.name = settings, source.model
        self._transport = Transport(
            source.url,
            at_once=settings.slots,
            timeout_s=settings.timeout_s,
            retries=settings.retries,
            backoff_s=settings.backoff_s,
        )

    def body(self, messages: Sequence[tuple[str, str]], **more: Any) -> Json:
        """What is sent for messages, each a role and a text; `extra` of the settings goes last."""
        body: Json = {
            "model": self.name,
            "messages": [{"role": role, "content": text} for role, text in messages],
            "temperature": self.settings.temperature,
            "max_tokens": self.settings.max_tokens,
            **more,
            **self.settings.extra,
        }
        return {name: value for name, value in body.items() if value is not None}

    async def ask(self, body: Json) -> ChatReply:
        url = f"{self._transport.api}/chat/completions"
        return ChatReply.read(await self._transport.post(url, body))

    async def close(self) -> None:
        await self._transport.close()
