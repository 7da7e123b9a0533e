"""Requests to a model server: bounded retries, one line per failure, and no secret in any of them.

A failure that may pass by itself is tried again: 429, 5xx, a timeout, a connection that was refused
or cut. The wait doubles, with jitter, so that hundreds of rollouts that were refused together do
not come back together; a server that names its own wait (Retry-After) is obeyed. Any other refusal
is final and becomes an error.
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
from itertools import count
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
        self._key = next((k for name in KEY_NAMES if (k := os.environ.get(name, "").strip())), "")
        if not (self._key.isascii() and self._key.isprintable()):
            named = " or ".join(KEY_NAMES)
            raise ModelError(f"the key in {named} has characters that no key has. Copy it again.")
        self._settings: dict[str, Any] = {
            "headers": {"Authorization": f"Bearer {self._key}"} if self._key else {},
            "timeout": httpx.Timeout(timeout_s, connect=min(10.0, timeout_s)),
        }
        self._timeout_s, self._at_once = timeout_s, at_once
        self._retries, self._backoff_s = retries, backoff_s
        self._blocking = httpx.Client(**self._settings)
        self._loops: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[httpx.AsyncClient, asyncio.Semaphore]
        ] = weakref.WeakKeyDictionary()

    def ask(self, address: str, body: Mapping[str, Any] | None = None, once: bool = False) -> Any:
        """GET, or POST with a body; blocks. For loading and for short calls only.

        Somebody waits for it, often with a mistyped address, so it gives up sooner than a rollout
        does. `once`: a 500 is the server's final word.
        """
        self._check_open()
        for attempt in count():
            found: httpx.Response | httpx.HTTPError
            try:
                found = self._blocking.request("POST" if body else "GET", address, json=body)
                if found.is_success:
                    return self._parse(found.content)
            except httpx.HTTPError as exc:
                found = exc
            time.sleep(self._pause(found, attempt, min(self._retries, 2), once))

    def probe(self, address: str, body: Mapping[str, Any] | None = None) -> Any:
        """Ask for something; None when the server does not offer it.

        A wrong key and a server that is not there are no answer to the question: they are raised.
        """
        try:
            return self.ask(address, body, once=True)
        except Unavailable:
            raise
        except CoaError as error:
            if isinstance(error, ServerRefused) and error.status in (401, 403, 429, 503):
                raise
            return None

    async def post(self, address: str, body: Mapping[str, Any]) -> Any:
        """POST and return the parsed answer."""
        return self._parse(await self._send(address, body))

    async def tell(self, address: str, body: Mapping[str, Any]) -> None:
        """POST an order: all that counts is that it was obeyed; a 500 is the server's no."""
        await self._send(address, body, once=True)

    async def _send(self, address: str, body: Mapping[str, Any], once: bool = False) -> bytes:
        async with self._slot() as client:
            for attempt in count():
                found: httpx.Response | httpx.HTTPError
                try:
                    found = await client.post(address, json=body)
                    if found.is_success:
                        return found.content
                except httpx.HTTPError as exc:
                    found = exc
                await asyncio.sleep(self._pause(found, attempt, self._retries, once))
        raise AssertionError

    async def events(self, address: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """POST and yield the parsed server-sent events; None means: forget them, it starts anew."""
        async with self._slot() as client:
            for attempt in count():
                found: httpx.Response | httpx.HTTPError
                try:
                    async with client.stream("POST", address, json=body) as found:
                        if found.is_success:
                            async for line in found.aiter_lines():
                                if line.startswith("data:") and line[5:].strip() != "[DONE]":
                                    yield self._parse(line[5:].encode())
                            return
                        await found.aread()
                except httpx.HTTPError as exc:
                    found = exc
                wait = self._pause(found, attempt, self._retries)
                yield None
                await asyncio.sleep(wait)

    async def close(self) -> None:
        """Close the connections of this event loop; those of a loop that has ended are gone."""
        self._blocking.close()
        client, _ = self._loops.pop(asyncio.get_running_loop(), (None, None))
        if client is not None:
            await client.aclose()

    def _check_open(self) -> None:
        if self._blocking.is_closed:
            raise EngineError("The engine is closed.")

    def _one_line(self, text: str) -> str:
        """The server's words on one line, without the key, should it repeat it."""
        text = " ".join(text.replace(self._key, "***").split() if self._key else text.split())
        return text[:_SAID] + "..." if len(text) > _SAID else text

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[httpx.AsyncClient]:
        self._check_open()
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            limits = httpx.Limits(max_connections=self._at_once)
            client = httpx.AsyncClient(**self._settings, limits=limits)
            self._loops[loop] = client, asyncio.Semaphore(self._at_once)
        client, limit = self._loops[loop]
        async with limit:
            yield client

    def _pause(
        self,
        found: httpx.Response | httpx.HTTPError,
        attempt: int,
        retries: int,
        once: bool = False,
    ) -> float:
        """Seconds to wait before the next attempt, or the error that ends it."""
        asked, last = 0.0, attempt >= retries
        if isinstance(found, httpx.Response):
            last = last or (once and found.status_code == 500)
            asked = self._judge(found, attempt, last)
        elif last:
            if isinstance(found, httpx.TimeoutException):
                what = f"no answer within {self._timeout_s:g} s"
            else:
                what = self._one_line(str(found)) or type(found).__name__
            raise Unavailable(
                f"{self.api}: the server cannot be reached ({what}, {attempt + 1} attempts). "
                "Check that it runs and that the address is right."
            ) from found
        longest = min(LONGEST_WAIT_S / 2, self._backoff_s * 2.0**attempt)
        return max(asked, longest * random.uniform(0.5, 1.0))

    def _judge(self, response: httpx.Response, attempt: int, last: bool) -> float:
        """The wait that a refusal asks for, or the error if it is final."""
        status, said = response.status_code, self._one_line(_words(response))
        if status in (401, 403):
            named = " or ".join(KEY_NAMES)
            found = "the key it was given" if self._key else "a request without a key"
            problem = f"the server refuses {found} ({status}). Set {named}."
        elif status != 429 and status < 500:
            problem = f"the server refused the request ({status}): {said}"
        else:
            asked = response.headers.get("retry-after", "")
            wait = float(asked) if asked.replace(".", "", 1).isdecimal() else 0.0  # not a date
            if status != 501 and not last and wait <= LONGEST_WAIT_S:
                return wait
            tries = f" after {attempt + 1} attempts" if attempt else ""
            problem = f"the server answered {status}{tries}: {said}"
        raise ServerRefused(f"{self.api}: {problem}", status)

    def _parse(self, content: bytes) -> Any:
        try:
            found = json.loads(content)
        except ValueError:
            said = self._one_line(content.decode(errors="replace"))[:80]
            raise EngineError(f"{self.api}: found {said!r}, expected JSON.") from None
        if isinstance(found, dict) and isinstance(found.get("error"), dict):
            said = self._one_line(str(found["error"].get("message", "")))
            raise EngineError(f"{self.api}: {said}")
        return found


def _addresses(url: str) -> tuple[str, str]:
    """Where the OpenAI paths are, and where a server keeps its own (without the `/v1`)."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as exc:
        raise ModelError(f"{url!r} is not an address of a server: {exc}.") from exc
    path = parsed.path.rstrip("/") or "/v1"
    api = str(parsed.copy_with(path=path))
    return api, api.removesuffix("/v1")


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
