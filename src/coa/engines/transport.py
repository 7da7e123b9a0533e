"""Requests to a model server: bounded retries, one line per failure, and no secret in any of them.

What may pass by itself is tried again: 429, 5xx, a timeout, a connection that was refused or cut.
The wait doubles, with jitter, so that hundreds of rollouts that were refused together do not come
back together; a server that names its own wait (Retry-After) is obeyed. Everything else is the
final word of the server and becomes an error.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from coa.errors import CoaError, EngineError, ModelError, Unavailable

KEY_NAMES = ("COA_API_KEY", "OPENAI_API_KEY")
LONGEST_WAIT_S = 60.0
"""A server that asks for a longer wait is treated as one that refuses."""
_SAID = 300
"""Characters of the server's own words in a message."""


class ServerRefused(EngineError):
    """The server answered, and said no; `status` is its HTTP code."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[type, tuple[str, int]]:
        return type(self), (str(self), self.status)


@dataclass
class ServerUsage:
    """What the server counted so far; `retries` are requests that had to be made again."""

    requests: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Transport:
    """JSON in, JSON out, over one base address.

    Clients and the limit on requests at once belong to an event loop, so one engine can be used
    from several `asyncio.run` calls in a row. Loading and encoding happen outside of any loop and
    use a client of their own.
    """

    def __init__(
        self, url: str, *, at_once: int, timeout_s: float, retries: int, backoff_s: float
    ) -> None:
        self.api, self.root = _addresses(url)
        self.usage = ServerUsage()
        self._key = next((k for name in KEY_NAMES if (k := os.environ.get(name, "").strip())), "")
        if not (self._key.isascii() and self._key.isprintable()):
            named = " or ".join(KEY_NAMES)
            raise ModelError(f"the key in {named} has characters that no key has. Copy it again.")
        self._headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._timeout = httpx.Timeout(timeout_s, connect=min(10.0, timeout_s))
        self._timeout_s, self._at_once = timeout_s, at_once
        self._retries, self._backoff_s = retries, backoff_s
        self._blocking = httpx.Client(headers=self._headers, timeout=self._timeout)
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Loop] = (
            weakref.WeakKeyDictionary()
        )

    def ask(
        self, address: str, body: Mapping[str, Any] | None = None, *, probe: bool = False
    ) -> Any:
        """GET, or POST with a body; blocks. For loading and for short calls only.

        A 500 is an answer to a `probe`: the server cannot do it. Somebody waits for it, often with
        a mistyped address, so it gives up sooner than a rollout does.
        """
        self._check_open()
        attempt, limit = 0, min(self._retries, 2)
        while True:
            try:
                response = self._blocking.request(_verb(body), address, json=body)
                if response.is_success:
                    return self._parse(response.content)
                last = attempt >= limit or (probe and response.status_code == 500)
                wait = self._judge_status(attempt, last, response)
            except httpx.HTTPError as exc:
                wait = self._judge_failure(attempt, attempt >= limit, exc)
            attempt += 1
            time.sleep(wait)

    async def post(self, address: str, body: Mapping[str, Any]) -> Any:
        """POST and return the parsed answer."""
        return self._parse(await self._send(address, body))

    async def tell(self, address: str, body: Mapping[str, Any]) -> None:
        """POST an order: all that counts is that it was obeyed; a 500 is the server's no."""
        await self._send(address, body, order=True)

    async def _send(self, address: str, body: Mapping[str, Any], *, order: bool = False) -> bytes:
        async with self._slot() as client:
            attempt = 0
            while True:
                try:
                    response = await client.post(address, json=body)
                    if response.is_success:
                        return response.content
                    last = attempt >= self._retries or (order and response.status_code == 500)
                    wait = self._judge_status(attempt, last, response)
                except httpx.HTTPError as exc:
                    wait = self._judge_failure(attempt, attempt >= self._retries, exc)
                attempt += 1
                await asyncio.sleep(wait)

    async def events(self, address: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """POST and yield the parsed server-sent events; None means: forget them, it starts anew."""
        async with self._slot() as client:
            attempt = 0
            while True:
                try:
                    async with client.stream("POST", address, json=body) as response:
                        if response.is_success:
                            async for line in response.aiter_lines():
                                if line.startswith("data:") and line[5:].strip() != "[DONE]":
                                    yield self._parse(line[5:].encode())
                            return
                        await response.aread()
                        wait = self._judge_status(attempt, attempt >= self._retries, response)
                except httpx.HTTPError as exc:
                    wait = self._judge_failure(attempt, attempt >= self._retries, exc)
                attempt += 1
                yield None
                await asyncio.sleep(wait)

    async def close(self) -> None:
        """Close the connections of this event loop; those of a loop that has ended are gone."""
        self._blocking.close()
        held = self._loops.pop(asyncio.get_running_loop(), None)
        if held is not None:
            await held.client.aclose()

    def _check_open(self) -> None:
        if self._blocking.is_closed:
            raise EngineError("The engine is closed.")

    def clean(self, text: str) -> str:
        """One line of the server's words, without the key, should it repeat it."""
        text = " ".join(text.replace(self._key, "***").split() if self._key else text.split())
        return text[:_SAID] + "..." if len(text) > _SAID else text

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[httpx.AsyncClient]:
        self._check_open()
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            limits = httpx.Limits(max_connections=self._at_once)
            client = httpx.AsyncClient(headers=self._headers, timeout=self._timeout, limits=limits)
            self._loops[loop] = _Loop(client, asyncio.Semaphore(self._at_once))
        held = self._loops[loop]
        async with held.limit:
            self.usage.requests += 1
            yield held.client

    def _judge_status(self, attempt: int, last: bool, response: httpx.Response) -> float:
        """Seconds to wait before the next attempt, or the error that ends it."""
        status, said = response.status_code, self.clean(_words(response))
        if status in (401, 403):
            named = " or ".join(KEY_NAMES)
            found = "the key it was given" if self._key else "a request without a key"
            raise ServerRefused(
                f"{self.api}: the server refuses {found} ({status}). Set {named}.", status
            )
        if status != 429 and status < 500:
            raise ServerRefused(
                f"{self.api}: the server refused the request ({status}): {said}", status
            )
        asked = _retry_after(response.headers.get("retry-after", ""))
        if status == 501 or last or asked > LONGEST_WAIT_S:
            tries = f" after {attempt + 1} attempts" if attempt else ""
            raise ServerRefused(f"{self.api}: the server answered {status}{tries}: {said}", status)
        return max(asked, self._pause(attempt))

    def _judge_failure(self, attempt: int, last: bool, exc: httpx.HTTPError) -> float:
        if not last:
            return self._pause(attempt)
        if isinstance(exc, httpx.TimeoutException):
            what = f"no answer within {self._timeout_s:g} s"
        else:
            what = self.clean(str(exc)) or type(exc).__name__
        raise Unavailable(
            f"{self.api}: the server cannot be reached ({what}, {attempt + 1} attempts). "
            "Check that it runs and that the address is right."
        ) from exc

    def _pause(self, attempt: int) -> float:
        """Doubling, with jitter from the system: it must not be the same for all of them."""
        self.usage.retries += 1
        longest = min(LONGEST_WAIT_S / 2, self._backoff_s * 2.0**attempt)
        return longest * random.uniform(0.5, 1.0)

    def _parse(self, content: bytes) -> Any:
        try:
            found = json.loads(content)
        except ValueError:
            said = self.clean(content.decode(errors="replace"))[:80]
            raise EngineError(f"{self.api}: found {said!r}, expected JSON.") from None
        if isinstance(found, dict) and isinstance(found.get("error"), dict):
            raise EngineError(f"{self.api}: {self.clean(str(found['error'].get('message', '')))}")
        return found


@dataclass
class _Loop:
    client: httpx.AsyncClient
    limit: asyncio.Semaphore


def _addresses(url: str) -> tuple[str, str]:
    """Where the OpenAI paths are, and where a server keeps its own (without the `/v1`)."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as exc:
        raise ModelError(f"{url!r} is not an address of a server: {exc}.") from exc
    path = parsed.path.rstrip("/") or "/v1"
    api = str(parsed.copy_with(path=path))
    return api, api.removesuffix("/v1")


def _verb(body: Mapping[str, Any] | None) -> str:
    return "GET" if body is None else "POST"


def _words(response: httpx.Response) -> str:
    """The message inside an error answer: {"error": {"message"}}, {"message"}, {"detail"}."""
    try:
        found = response.json()
    except ValueError:
        return response.text
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    return found if isinstance(found, str) else json.dumps(found)


def _retry_after(value: str) -> float:
    """Seconds; the form with a date is rare among model servers and is ignored."""
    try:
        return max(0.0, float(value))
    except ValueError:
        return 0.0


def offered(transport: Transport, address: str, body: Mapping[str, Any]) -> Any:
    """The answer to a probe, or None when the server does not offer what it asks for.

    A wrong key and a server that is not there are not an answer to the question: they are raised.
    """
    try:
        return transport.ask(address, body, probe=True)
    except Unavailable:
        raise
    except CoaError as error:
        if isinstance(error, ServerRefused) and error.status in (401, 403, 429, 503):
            raise
        return None
