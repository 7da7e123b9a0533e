"""OpenAIEngine: a model behind an OpenAI-compatible server, as the same Engine.

What a server can do is found out when the engine is loaded, by asking it for one token. A server
that takes and returns token ids (vLLM, llama.cpp) is as good as a model in this process:
`exact` is True. One that speaks only text still works, for evaluation and for `coa ask`; one line
says that token exactness is lost, and such trajectories must not be used for RL. vLLM also samples
under a grammar (`Sampling.constraint`) and takes adapters while it runs (`load`).

The key comes from COA_API_KEY or OPENAI_API_KEY and is written nowhere.
"""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from coa.engines.base import CodecEngine, Completion, OnText, Sampling, most_tokens
from coa.engines.codec import Codec
from coa.engines.dialects import Dialect, TokenCompletions, Turn
from coa.engines.lora import Adapter
from coa.engines.native import NativeCompletions
from coa.engines.served_lora import ServedAdapter, serve_adapter
from coa.engines.server_codec import TOKENIZER_NAME, choose_codec
from coa.engines.store import resolve
from coa.engines.text_dialects import ChatContinuation, TextCompletions
from coa.engines.transport import Refused, Transport, Usage
from coa.errors import CoaError, EngineError, ModelError, did_you_mean

DEFAULT_CONTEXT = 4096
_REMEMBERED = 4096
"""Prompts kept for a server that wants text or messages instead of ids."""


class OpenAIEngine(CodecEngine):
    """The Engine protocol over a server.

    `slots` limits the requests at once, `context` the tokens of one (the server's own limit counts
    too), `retries` the further attempts after a failure that may pass. `tokenizer` is a model
    folder or a reference like `smollm2-135m`; COA_TOKENIZER is its default. `note` gets the lines
    that a user must see.
    """

    def __init__(
        self,
        ref: str,
        *,
        tokenizer: str | None = None,
        slots: int = 64,
        context: int | None = None,
        timeout_s: float = 600.0,
        retries: int = 5,
        backoff_s: float = 0.5,
        note: Callable[[str], None] | None = None,
        **ignored: Any,
    ) -> None:
        source = resolve(ref)
        if source.kind != "openai" or source.model is None or source.url is None:
            raise ModelError(f"{ref!r} is not a model on a server (openai:MODEL@URL).")
        self._name, self._model, self._weights = ref, source.model, source.model
        self._note = note or _say
        self._prompts: OrderedDict[tuple[int, ...], tuple[str, str]] = OrderedDict()
        self._transport = Transport(
            source.url, at_once=slots, timeout_s=timeout_s, retries=retries, backoff_s=backoff_s
        )
        entry = self._find_model()
        self._root = _folder(entry)
        self._served: ServedAdapter | None = None
        self.codec, own = choose_codec(self._transport, entry, tokenizer)
        self._context = self._find_context(entry, context)
        self._dialect = self._find_dialect(own)
        self._said_raw = False
        self._say_what_is_ignored(ignored)

    @property
    def name(self) -> str:
        return self._name

    @property
    def weights(self) -> str:
        """The model's name on the server, or the version that `load` was given.

        A server does not tell the version of its weights.
        """
        return self._weights

    @property
    def context(self) -> int:
        return self._context

    @property
    def exact(self) -> bool:
        """Whether ids and logprobs are those the server sampled; if not, do not train on them."""
        return self._dialect.exact

    @property
    def tempered(self) -> bool:
        """Whether logprobs are of the distribution sampled from at every temperature."""
        return self._dialect.tempered

    @property
    def takes_adapters(self) -> bool:
        """Whether the server can be given new weights while it runs, as vLLM can."""
        return isinstance(self._dialect, TokenCompletions)

    @property
    def usage(self) -> Usage:
        """What the server counted since the engine was loaded."""
        return self._transport.usage

    def encode_prompt(self, system: str, user: str) -> list[int]:
        ids = super().encode_prompt(system, user)
        if not self.exact:
            self._prompts[tuple(ids)] = (system, user)
            self._prompts.move_to_end(tuple(ids))
            if len(self._prompts) > _REMEMBERED:
                self._prompts.popitem(last=False)
        return ids

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
    ) -> Completion:
        limit = most_tokens(prompt_ids, sampling, self._context, "start the server")
        if sampling.constraint and not await asyncio.to_thread(self._dialect.constrains):
            raise EngineError(
                f"{self._transport.api}: the server does not sample under a grammar. Start vLLM "
                """with --structured-outputs-config '{"backend": "guidance"}', turn constrained """
                "decoding off, or use a model in this process."
            )
        self._say_when_raw(sampling)
        turn = Turn(list(prompt_ids), sampling, limit, on_text)
        with self._served.in_use() if self._served else nullcontext():
            return await self._dialect.complete(turn)

    async def load(self, adapter: Path | Adapter | None, version: str) -> None:
        """Use another adapter (None: the base) from now on; what runs already keeps the old one.

        The server reads the adapter's folder itself. The old adapter is taken off the server when
        its last request has ended, which this waits for.
        """
        dialect = self._dialect
        if not isinstance(dialect, TokenCompletions):
            raise EngineError(
                f"{self._transport.api}: the server takes no adapters while it runs; expected vLLM "
                "(docs/engines.md)."
            )
        served = None
        if adapter is not None:
            name = f"{self._model}-{version}"
            served = await serve_adapter(self._transport, adapter, name, self._root)
        old, self._served, self._weights = self._served, served, version
        dialect.model = served.name if served else self._model
        await self._unload(old)

    async def close(self) -> None:
        """Take what was loaded off the server, and close the connections."""
        served, self._served = self._served, None
        await self._unload(served)
        await self._transport.close()

    async def _unload(self, served: ServedAdapter | None) -> None:
        """An adapter that stays on the server changes no result, so it is only said."""
        if served is None:
            return
        try:
            await served.unload(self._transport)
        except CoaError as error:
            self._note(f"{self._name}: adapter {served.name!r} is still on the server. {error}")

    def _find_model(self) -> dict[str, Any]:
        """The server's own record of the model; a model it does not list is refused."""
        address = f"{self._transport.api}/models"
        try:
            answer = self._transport.ask(address)
        except Refused as error:
            if error.status in (404, 405):  # no list: the probe will tell
                return {}
            raise
        listed = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(listed, list):
            raise EngineError(f"{address}: found no list of models, expected an OpenAI server.")
        models = {str(entry.get("id")): entry for entry in listed if isinstance(entry, dict)}
        if self._model not in models:
            raise ModelError(
                f"{self._transport.api} has no model {self._model!r}."
                f"{did_you_mean(self._model, models)}"
            )
        found: dict[str, Any] = models[self._model]
        return models.get(str(found.get("parent")), found)  # an adapter is described by its base

    def _find_context(self, entry: dict[str, Any], wanted: int | None) -> int:
        served = entry.get("max_model_len")
        if served is None:
            try:
                props = self._transport.ask(f"{self._transport.root}/props", probe=True)
                served = props["default_generation_settings"]["n_ctx"]
            except (EngineError, KeyError, TypeError):
                served = None
        limits = [int(limit) for limit in (served, wanted) if limit]
        return min(limits, default=DEFAULT_CONTEXT)

    def _find_dialect(self, own: bool) -> Dialect:
        """The most exact way that the server offers."""
        http, model, codec = self._transport, self._model, self.codec
        found: Dialect | None = None
        if own:
            found = TokenCompletions.probe(http, model, codec)
            found = found or NativeCompletions.probe(http, model, codec)
        if found is not None:
            return found
        if own and isinstance(codec, Codec):
            found = TextCompletions.probe(http, model, codec, self._recall)
        found = found or ChatContinuation.probe(http, model, codec, self._recall)
        if found is None:
            raise ModelError(
                f"{http.api}: the server completes neither token ids nor text nor a message that "
                f"has begun (continue_final_message) for {model!r}."
            )
        why = "" if own else f"; no tokenizer of the model is known (set {TOKENIZER_NAME})"
        self._note(
            f"{self._name}: the server exchanges text, not token ids{why}. Token exactness is "
            "lost: good for evaluation, not for RL"
        )
        return found

    def _recall(self, ids: Sequence[int]) -> tuple[str, str, str]:
        """The messages behind a prompt's ids: the longest remembered prompt it begins with."""
        prompt = tuple(ids)
        begun = [known for known in self._prompts if prompt[: len(known)] == known]
        if not begun:
            raise EngineError("A server that wants messages needs a prompt made by encode_prompt.")
        known = max(begun, key=len)
        return *self._prompts[known], self.codec.decode(prompt[len(known) :])

    def _say_when_raw(self, sampling: Sampling) -> None:
        """Once: logprobs before temperature are not those of the distribution sampled from."""
        cut = sampling.top_p < 1 or sampling.top_k or sampling.min_p
        plain = sampling.temperature in (0.0, 1.0) and not cut
        if self._said_raw or plain or self.tempered or not self.exact:
            return
        self._said_raw = True
        self._note(
            f"{self._name}: the server's logprobs are those before temperature, top-p and top-k. "
            "For RL sample at temperature 1, or start vLLM with --logprobs-mode processed_logprobs"
        )

    def _say_what_is_ignored(self, options: dict[str, Any]) -> None:
        known = {"dtype": "auto", "deterministic": False, "threads": None}
        known |= {"memory_gb": None, "guess": True}
        for name, value in options.items():
            if name not in known:
                raise EngineError(f"Unknown option {name!r} of a server's model.")
            if value != known[name]:
                self._note(f"{self._name}: {name} is the server's to decide and is ignored")


def _folder(entry: dict[str, Any]) -> Path | None:
    """The folder that the server says it loaded, when it is on this machine."""
    root = entry.get("root")
    found = Path(root) if isinstance(root, str) else None
    return found if found is not None and found.is_dir() else None


def _say(line: str) -> None:
    print(line, file=sys.stderr)
