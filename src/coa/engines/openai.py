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
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from coa.engines.base import CodecEngine, Completion, OnText, Sampling, TextCodec, most_tokens
from coa.engines.server_apis import (
    LlamaCppCompletions,
    ServerApi,
    TextApi,
    TokenCompletions,
    Turn,
)
from coa.engines.transport import ServerRefused, Transport
from coa.errors import CoaError, EngineError, ModelError, did_you_mean
from coa.io.progress import say
from coa.models.bases import BASE
from coa.models.codec import Codec
from coa.models.references import is_pulled, model_folder, resolve
from coa.models.weights import Adapter, write_adapter


class ServedAdapter:
    """One adapter on the server, the folder it was written to, and how many requests use it."""

    def __init__(self, name: str) -> None:
        self.name = f"{name}-{secrets.token_hex(4)}"
        self._written = tempfile.TemporaryDirectory(prefix="coa-adapter-")
        self._users, self._idle = 0, asyncio.Event()
        self._idle.set()

    async def load(self, transport: Transport, adapter: Adapter) -> None:
        """Write the adapter where the server can read it, and have it loaded."""
        folder = self._written.name
        await asyncio.to_thread(write_adapter, adapter, Path(folder))
        body = {"lora_name": self.name, "lora_path": folder}
        try:
            await transport.tell(f"{transport.api}/load_lora_adapter", body)
        except ServerRefused as error:
            # Nobody else has this name: an order came through whose answer was lost.
            if error.status == 400 and "already been loaded" in str(error):
                return
            self._written.cleanup()
            rank = max(8, *(len(down) for down, _ in adapter.pairs.values()))
            raise EngineError(
                f"{error} To load adapters while it runs, vLLM must see {folder!r} and be started "
                "with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment and the options "
                f"--enable-lora --max-lora-rank {1 << (rank - 1).bit_length()}."
            ) from error

    @contextmanager
    def in_use(self) -> Iterator[None]:
        self._users += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._idle.set()

    async def unload(self, transport: Transport) -> None:
        """Take it off the server once nobody uses it; one that is gone already is no error."""
        try:
            await self._idle.wait()
            await transport.tell(f"{transport.api}/unload_lora_adapter", {"lora_name": self.name})
        except ServerRefused as error:
            if error.status != 404:
                raise
        finally:
            self._written.cleanup()


TOKENIZER_NAME = "COA_TOKENIZER"
_SAMPLE = "<b>A caf\u00e9 in Z\u00fcrich: 3,141 steps.</b>\n\n<i>yes</i>"
_SYSTEM, _USER = "\ue000system\ue001", "\ue000user\ue001"


class ServerCodec:
    """Text to ids and back by a llama.cpp server's /tokenize, /detokenize and /apply-template.

    It can leave special tokens unread (`parse_special`), which the rest of coa depends on: a page
    must not be able to close the model's turn. Calls block for about a millisecond each.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._is_special = lru_cache(maxsize=None)(self._look_up_special)

    def probe(self) -> bool:
        """Whether the server has these paths and text survives the way there and back."""
        root = self._transport.root
        body = {"content": _SAMPLE, "parse_special": False}
        match self._transport.probe(f"{root}/tokenize", body):
            case {"tokens": [int(), *_] as ids}:
                answer = self._transport.probe(f"{root}/detokenize", {"tokens": ids})
                return isinstance(answer, dict) and answer.get("content") == _SAMPLE
        return False

    def encode(self, text: str) -> list[int]:
        return self._tokenize(text, markup=False)

    def decode(self, ids: Sequence[int]) -> str:
        plain = [i for i in ids if not self._is_special(i)]
        return self._detokenize(plain) if plain else ""

    def encode_prompt(self, system: str, user: str) -> list[int]:
        before, between, after = self._template
        return [*before, *self.encode(system), *between, *self.encode(user), *after]

    @cached_property
    def _template(self) -> list[list[int]]:
        """What the chat template writes before, between and after the two messages."""
        contents = {"system": _SYSTEM, "user": _USER}
        messages = [{"role": role, "content": text} for role, text in contents.items()]
        address = f"{self._transport.root}/apply-template"
        rendered = str(self._transport.ask(address, {"messages": messages}).get("prompt", ""))
        head, found_user, after = rendered.partition(_USER)
        before, found_system, between = head.partition(_SYSTEM)
        if not found_user or not found_system:
            raise ModelError(
                "The server's chat template does not show the system's and the user's message. "
                "Pass tokenizer= (a model folder)."
            )
        return [self._tokenize(part, markup=True) for part in (before, between, after)]

    def _tokenize(self, text: str, *, markup: bool) -> list[int]:
        if not text:
            return []
        body = {"content": text, "add_special": False, "parse_special": markup}
        ids: list[int] = self._transport.ask(f"{self._transport.root}/tokenize", body)["tokens"]
        return ids

    def _detokenize(self, ids: Sequence[int]) -> str:
        body = {"tokens": list(ids)}
        return str(self._transport.ask(f"{self._transport.root}/detokenize", body)["content"])

    def _look_up_special(self, token: int) -> bool:
        """An id is special when its text, read as plain text, is other ids."""
        text = self._detokenize([token])
        marked = len(text) > 2 and text[0] in "<[" and text[-1] in ">]"
        return (not text) or (marked and self._tokenize(text, markup=False) != [token])


def named_codec(name: str) -> Codec:
    """The codec of `tokenizer=`: a folder, or a reference to a model of ours."""
    folder = Path(name)
    if folder.is_dir():
        return Codec.from_folder(folder)
    try:
        source = resolve(name)
    except ModelError as exc:
        raise ModelError(f"tokenizer {name!r} is no folder and no model: {exc}") from exc
    if source.kind != "local":
        raise ModelError(f"tokenizer {name!r}: expected a model folder, or {BASE!r}, or hf:...")
    return Codec.from_folder(model_folder(source))


def choose_codec(
    transport: Transport, entry: dict[str, Any], tokenizer: str | None
) -> tuple[TextCodec, bool]:
    """The codec, and whether it is the model's own; a stand-in only counts tokens.

    Token ids mean something only with the right tokenizer, so it is never guessed: it is named by
    the user (`tokenizer=` or COA_TOKENIZER), read from the folder the server says it loaded (when
    that folder is on this machine), or asked of the server. A named tokenizer is compared with the
    server's where that is possible.
    """
    name = tokenizer or os.environ.get(TOKENIZER_NAME)
    asked = ServerCodec(transport)
    answers = asked.probe()
    if name:
        codec = named_codec(name)
        if answers and asked.encode(_SAMPLE) != codec.encode(_SAMPLE):
            raise ModelError(f"tokenizer {name!r} is not the one of the model that is served.")
        return codec, True
    root = entry.get("root")
    if isinstance(root, str) and (Path(root) / "tokenizer.json").is_file():
        return Codec.from_folder(Path(root)), True
    if answers:
        return asked, True
    if is_pulled():
        return named_codec(BASE), False
    raise ModelError(
        f"{transport.api}: the server has no tokenizer to ask. "
        f"Pass tokenizer= or set {TOKENIZER_NAME} (a model folder)."
    )


DEFAULT_CONTEXT = 4096
_LOCAL_ONLY = {
    "dtype": "auto",
    "deterministic": False,
    "threads": None,
    "memory_gb": None,
    "guess": True,
    "weights": "full",
}
"""Options of a local model that a server decides by itself, and their defaults."""


def say_ignored(ref: str, options: Mapping[str, Any], note: Callable[[str], None]) -> None:
    """Say which options of a local model a server decides by itself; others are refused."""
    for name, value in options.items():
        if name not in _LOCAL_ONLY:
            raise EngineError(f"Unknown option {name!r} of a server's model.")
        if value not in (_LOCAL_ONLY[name], "auto"):
            note(f"{ref}: {name} is the server's to decide and is ignored")


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
        self.name, self._model = ref, source.model
        self.weights = source.model
        """The model's name on the server, or the version that `load` was given: a server does not
        tell the version of its weights."""
        self._note = note or say
        self._transport = Transport(
            source.url, at_once=slots, timeout_s=timeout_s, retries=retries, backoff_s=backoff_s
        )
        entry = self._find_model()
        self._served: ServedAdapter | None = None
        self.codec, own = choose_codec(self._transport, entry, tokenizer)
        self.context = self._find_context(entry, context)
        self._api = self._find_api(own)
        say_ignored(ref, ignored, self._note)

    @property
    def exact(self) -> bool:
        """Whether ids and logprobs are those the server sampled; if not, do not train on them."""
        return self._api.exact

    @property
    def tempered(self) -> bool:
        """Whether logprobs are of the distribution sampled from at every temperature."""
        return self._api.tempered

    def constrains(self) -> bool:
        """Whether the server samples under a grammar; asks it once, and blocks for that."""
        return self._api.constrains()

    @property
    def takes_adapters(self) -> bool:
        """Whether the server can be given new weights while it runs, as vLLM can."""
        return isinstance(self._api, TokenCompletions)

    def encode_prompt(self, system: str, user: str) -> list[int]:
        ids = super().encode_prompt(system, user)
        self._api.remember(ids, system, user)
        return ids

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
    ) -> Completion:
        limit = most_tokens(prompt_ids, sampling, self.context, "start the server")
        if sampling.constraint and not await asyncio.to_thread(self.constrains):
            raise EngineError(
                f"{self._transport.api}: the server does not sample under a grammar. Start vLLM "
                """with --structured-outputs-config '{"backend": "guidance"}', turn constrained """
                "decoding off, or use a model in this process."
            )
        turn = Turn(list(prompt_ids), sampling, limit, on_text)
        with self._served.in_use() if self._served else nullcontext():
            return await self._api.complete(turn)

    async def load(self, adapter: Adapter | None, version: str) -> None:
        """Use another adapter (None: the base) from now on; what runs already keeps the old one.

        The server reads the adapter from a folder that it must see. The old adapter is taken off
        the server when its last request has ended, which this waits for.
        """
        if not self.takes_adapters:
            raise EngineError(
                f"{self._transport.api}: the server takes no adapters while it runs; expected vLLM "
                "(docs/engines.md)."
            )
        served = None
        if adapter is not None:
            served = ServedAdapter(f"{self._model}-{version}")
            await served.load(self._transport, adapter)
        old, self._served, self.weights = self._served, served, version
        self._api.model = served.name if served else self._model
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
            self._note(f"{self.name}: adapter {served.name!r} is still on the server. {error}")

    def _find_model(self) -> dict[str, Any]:
        """The server's own record of the model; a model it does not list is refused."""
        address = f"{self._transport.api}/models"
        try:
            answer = self._transport.ask(address)
        except ServerRefused as error:
            if error.status in (404, 405):  # no list: the probe will tell
                return {}
            raise
        listed = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(listed, list):
            raise EngineError(f"{address}: found no list of models, expected an OpenAI server.")
        models = {str(entry.get("id")): entry for entry in listed if isinstance(entry, dict)}
        if self._model not in models:
            hint = did_you_mean(self._model, models)
            raise ModelError(f"{self._transport.api} has no model {self._model!r}.{hint}")
        found: dict[str, Any] = models[self._model]
        return models.get(str(found.get("parent")), found)  # an adapter is described by its base

    def _find_context(self, entry: dict[str, Any], wanted: int | None) -> int:
        served = entry.get("max_model_len")
        if served is None:
            match self._transport.probe(f"{self._transport.root}/props"):
                case {"default_generation_settings": {"n_ctx": served}}:
                    pass
        limits = [int(limit) for limit in (served, wanted) if limit]
        return min(limits, default=DEFAULT_CONTEXT)

    def _find_api(self, own: bool) -> ServerApi:
        """The most exact way that the server offers."""
        asked = self._transport, self._model, self.codec
        ways: list[ServerApi] = [TextApi(*asked, chat=True)]
        if own:
            text = [TextApi(*asked, chat=False)] if isinstance(self.codec, Codec) else []
            ways = [TokenCompletions(*asked), LlamaCppCompletions(*asked), *text, *ways]
        found = next((way for way in ways if way.probe()), None)
        if found is None:
            raise ModelError(
                f"{self._transport.api}: the server completes neither token ids nor text nor a "
                f"message that has begun (continue_final_message) for {self._model!r}."
            )
        if not found.exact:
            why = "" if own else f"; no tokenizer of the model is known (set {TOKENIZER_NAME})"
            self._note(
                f"{self.name}: the server exchanges text, not token ids{why}. Token exactness is "
                "lost: good for evaluation, not for RL"
            )
        return found
