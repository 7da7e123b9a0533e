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
import json
import os
import secrets
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

from coa.engines.base import CodecEngine, Completion, OnText, Sampling, TextCodec, most_tokens
from coa.engines.server_apis import (
    ChatContinuation,
    Dialect,
    NativeCompletions,
    TextCompletions,
    TokenCompletions,
    Turn,
)
from coa.engines.transport import ServerRefused, ServerUsage, Transport, offered
from coa.errors import CoaError, EngineError, ModelError, did_you_mean
from coa.io.progress import say
from coa.models.codec import Codec
from coa.models.references import BASE, is_pulled, model_folder, resolve
from coa.models.weights import Adapter, base_hash, check_base, write_adapter


class ServedAdapter:
    """One adapter on the server, and the requests that use it."""

    def __init__(self, name: str, part: tempfile.TemporaryDirectory[str] | None) -> None:
        self.name, self._part = name, part
        self._users: set[asyncio.Future[None]] = set()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._users.add(done)
        try:
            yield
        finally:
            self._users.discard(done)
            if not done.done():
                done.set_result(None)

    async def unload(self, transport: Transport) -> None:
        """Take it off the server once nobody uses it; one that is gone already is no error."""
        try:
            if self._users:
                await asyncio.wait(self._users)
            await transport.tell(f"{transport.api}/unload_lora_adapter", {"lora_name": self.name})
        except ServerRefused as error:
            if error.status != 404:
                raise
        finally:
            if self._part is not None:
                self._part.cleanup()


async def serve_adapter(
    transport: Transport, adapter: Path | Adapter, name: str, base: Path | None
) -> ServedAdapter:
    """Load an adapter into the server; `base` is the folder of its model, where we can read it."""
    part = None
    if isinstance(adapter, Adapter):
        part = tempfile.TemporaryDirectory(prefix="coa-adapter-")
        folder = Path(part.name)
        await asyncio.to_thread(write_adapter, adapter, folder)
    else:
        folder = adapter.resolve()
        if base is not None:
            check_base(folder, await asyncio.to_thread(base_hash, base))
    rank = _rank(folder)
    served = ServedAdapter(f"{name}-{secrets.token_hex(4)}", part)
    body = {"lora_name": served.name, "lora_path": str(folder)}
    try:
        await transport.tell(f"{transport.api}/load_lora_adapter", body)
    except ServerRefused as error:
        # Nobody else has this name: an order came through whose answer was lost, and was repeated.
        if error.status == 400 and "already been loaded" in str(error):
            return served
        if part is not None:
            part.cleanup()
        raise EngineError(
            f"{error} To load adapters while it runs, vLLM must see {str(folder)!r} and be started "
            "with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment and the options "
            f"--enable-lora --max-lora-rank {1 << (max(rank, 8) - 1).bit_length()}."
        ) from error
    return served


def _rank(folder: Path) -> int:
    path = folder / "adapter_config.json"
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["r"])
    except (OSError, ValueError, KeyError) as exc:
        raise ModelError(f"{folder}: not an adapter folder (no rank in {path.name}).") from exc


# ------------------------------------------------------------------------------------------------
# Which tokenizer a server's model has: ours to read, or the server's own to ask.
#
# Token ids mean something only with the right tokenizer, so it is never guessed: it is named by
# the user (`tokenizer=` or COA_TOKENIZER), read from the folder the server says it loaded (when
# that folder is on this machine), or asked of the server. A named tokenizer is compared with the
# server's where that is possible.
# ------------------------------------------------------------------------------------------------


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
        self._pieces: tuple[list[int], list[int], list[int]] | None = None
        self._is_special = lru_cache(maxsize=None)(self._look_up_special)

    @classmethod
    def probe(cls, transport: Transport) -> ServerCodec | None:
        """The codec, if the server has these paths and text survives the way there and back."""
        codec = cls(transport)
        body = {"content": _SAMPLE, "parse_special": False}
        answer = offered(transport, f"{transport.root}/tokenize", body)
        ids = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            return None
        answer = offered(transport, f"{transport.root}/detokenize", {"tokens": ids})
        same = isinstance(answer, dict) and answer.get("content") == _SAMPLE
        return codec if same else None

    def encode(self, text: str) -> list[int]:
        return self._tokenize(text, markup=False)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        raise ModelError("A server's tokenizer gives no offsets; pass tokenizer=.")

    def decode(self, ids: Sequence[int]) -> str:
        plain = [i for i in ids if not self._is_special(i)]
        return self._detokenize(plain) if plain else ""

    def encode_prompt(self, system: str, user: str) -> list[int]:
        if self._pieces is None:
            self._pieces = self._split_template()
        before, between, after = self._pieces
        return [*before, *self.encode(system), *between, *self.encode(user), *after]

    def _split_template(self) -> tuple[list[int], list[int], list[int]]:
        messages = [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": _USER},
        ]
        address = f"{self._transport.root}/apply-template"
        rendered = str(self._transport.ask(address, {"messages": messages}).get("prompt", ""))
        head, found_user, tail = rendered.partition(_USER)
        before, found_system, between = head.partition(_SYSTEM)
        if not found_user or not found_system:
            raise ModelError(
                "The server's chat template does not show the system's and the user's message. "
                "Pass tokenizer= (a model folder)."
            )
        first, second, third = (
            self._tokenize(part, markup=True) for part in (before, between, tail)
        )
        return first, second, third

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
    """The codec, and whether it is the model's own; a stand-in only counts tokens."""
    name = tokenizer or os.environ.get(TOKENIZER_NAME)
    served = ServerCodec.probe(transport)
    if name:
        codec = named_codec(name)
        if served is not None and served.encode(_SAMPLE) != codec.encode(_SAMPLE):
            raise ModelError(f"tokenizer {name!r} is not the one of the model that is served.")
        return codec, True
    root = entry.get("root")
    if isinstance(root, str) and (Path(root) / "tokenizer.json").is_file():
        return Codec.from_folder(Path(root)), True
    if served is not None:
        return served, True
    if is_pulled():
        return named_codec(BASE), False
    raise ModelError(
        f"{transport.api}: the server has no tokenizer to ask. "
        f"Pass tokenizer= or set {TOKENIZER_NAME} (a model folder)."
    )


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
        self._note = note or say
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
    def usage(self) -> ServerUsage:
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
        except ServerRefused as error:
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
