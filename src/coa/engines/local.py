"""LocalEngine: a model in this process, computed in a thread of its own.

Coroutines put requests in a queue and wait on a future; the thread steps the batch and answers
through the coroutine's own event loop. A slow tool never stalls the others' decoding, because only
the thread computes. Whatever fails in the thread reaches every waiting caller as an `EngineError`.

bfloat16 where the CPU multiplies it natively, float32 elsewhere or on request.
`deterministic=True` means float32 and fixed shapes: results depend neither on who shares the batch
nor on `slots`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coa.engines.base import CodecEngine, Completion, OnText, Sampling, TextCodec, most_tokens
from coa.engines.batch import Batch, BatchRequest, Guesses
from coa.engines.kernels import release_threads, slot_bytes
from coa.engines.llama import EXACT_ROWS, Chunk, LlamaForward
from coa.engines.sampling import Matchers
from coa.engines.threads import adapt_threads, use_threads
from coa.errors import CoaError, ConfigError, EngineError, MissingExtra, ModelError
from coa.io.machine import keep_freed_memory, native_bfloat16, processes_here
from coa.io.machine import memory_gb as memory_gb_of_machine
from coa.io.progress import say
from coa.models.codec import Codec
from coa.models.references import model_folder, resolve
from coa.models.weights import (
    Adapter,
    Shape,
    adapter_hash,
    base_hash,
    read_adapter,
    read_config,
    unsupported,
)


class PlainForward:
    """A transformers model and one cache per slot."""

    int8 = False

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        slots: int,
        adapter: Adapter | None = None,
    ) -> None:
        self._folder, self._dtype, self.slots = folder, dtype, slots
        self.load(adapter)

    def load(self, adapter: Adapter | None) -> None:
        try:
            from transformers import AutoModelForCausalLM
            from transformers.cache_utils import DynamicCache, DynamicLayer
        except ImportError as exc:
            raise MissingExtra(f"Model {str(self._folder)!r}", "train") from exc
        model = AutoModelForCausalLM.from_pretrained(
            self._folder, dtype=torch.float32, local_files_only=True
        ).eval()
        if adapter is not None:
            _merge(adapter, model)
        # Weights only: rounded rotary frequencies (buffers) would not be those of training.
        buffers = dict(model.named_buffers())
        model.to(self._dtype)
        for name, buffer in buffers.items():
            place, _, own = name.rpartition(".")
            setattr(model.get_submodule(place), own, buffer)
        self._model, self.vocabulary = model, vocabulary_of(model)
        self._caches: list[Any] = [None] * self.slots
        # Sliding windows and recurrent layers forget: only where all is kept, an end can be cut.
        layers = DynamicCache(config=model.config).layers
        self.can_rewind = all(type(layer) is DynamicLayer for layer in layers)

    def step(self, chunks: list[Chunk]) -> Tensor:
        return torch.cat([self._extend(chunk) for chunk in chunks])

    def _extend(self, chunk: Chunk) -> Tensor:
        from transformers import DynamicCache

        cache = self._caches[chunk.slot]
        if chunk.start == 0 or cache is None:
            cache = self._caches[chunk.slot] = DynamicCache(config=self._model.config)
        elif (beyond := cache.get_seq_length() - chunk.start) > 0:
            cache.crop(-beyond)
        positions = torch.arange(chunk.start, chunk.start + len(chunk.ids))[None]
        output = self._model(
            input_ids=torch.tensor([chunk.ids]),
            position_ids=positions,
            past_key_values=cache,
            logits_to_keep=max(chunk.tail, 1),
        )
        logits: Tensor = output.logits[0].float()
        return logits[len(logits) - chunk.tail :]

    def copy(self, source: int, target: int, length: int) -> None:
        self._caches[target] = copy.deepcopy(self._caches[source])


def _merge(adapter: Adapter, model: Any) -> None:
    """Add an adapter's factors, or put its whole weights in place."""
    for name, (down, up) in adapter.pairs.items():
        try:
            weight = model.get_submodule(name).weight
        except AttributeError as exc:
            raise ModelError(f"The adapter trains {name!r}, which the model lacks.") from exc
        with torch.no_grad():
            weight += adapter.scale * (up.float() @ down.float())
    unknown = model.load_state_dict(adapter.whole, strict=False).unexpected_keys
    if unknown:
        raise ModelError(f"The trained weights have {unknown[0]!r}, which the model lacks.")


def vocabulary_of(model: Any) -> int:
    """How many logits a transformers model gives; not all configurations say it in one place."""
    return int(model.get_output_embeddings().weight.shape[0])


DEFAULT_CONTEXT = 4096
DEFAULT_SLOTS = 64
ROUNDED = "+int8"
PATIENCE = 0.05
"""Seconds without a request after which the engine lets go of its threads."""
MEMORY_SHARE = 0.25
"""Of the machine's memory, at most for keys and values; more requests than fit wait. Processes of
one program divide it, as they divide the cores."""


def choose_dtype(dtype: str, deterministic: bool) -> torch.dtype:
    if dtype not in ("auto", "bfloat16", "float32"):
        raise ConfigError(f"Found dtype {dtype!r}, expected 'auto', 'bfloat16' or 'float32'.")
    if deterministic and dtype == "bfloat16":
        raise ConfigError("deterministic needs float32, found dtype 'bfloat16'.")
    narrow = dtype == "bfloat16" or (dtype == "auto" and native_bfloat16() and not deterministic)
    return torch.bfloat16 if narrow else torch.float32


def check_weights(weights: str, deterministic: bool) -> None:
    if weights not in ("auto", "full", "int8"):
        raise ConfigError(f"Found weights {weights!r}, expected 'auto', 'full' or 'int8'.")
    if deterministic and weights == "int8":
        raise ConfigError("deterministic needs full weights, found weights 'int8'.")


def positions_of(config: dict[str, Any]) -> int | None:
    """Most tokens of a sequence that a model was made for, where its configuration says so."""
    found = config.get("max_position_embeddings") or config.get("n_positions")
    return found or (positions_of(config["text_config"]) if config.get("text_config") else None)


class LocalEngine(CodecEngine):
    """The Engine protocol over a model folder, with an optional LoRA adapter merged in."""

    def __init__(
        self,
        ref: str,
        *,
        dtype: str = "auto",
        deterministic: bool = False,
        slots: int = DEFAULT_SLOTS,
        context: int | None = None,
        threads: int | None = None,
        memory_gb: float | None = None,
        guess: bool = True,
        weights: str = "full",
        note: Callable[[str], None] | None = None,
    ) -> None:
        source = resolve(ref)
        if source.kind != "local":
            raise ModelError(f"{ref!r} is not a model that runs in this process.")
        self._folder = model_folder(source)
        config = read_config(self._folder)
        self.name, self._config = ref, config
        self._dtype = choose_dtype(dtype, deterministic)
        check_weights(weights, deterministic)
        self.codec = Codec.from_folder(self._folder)
        longest = positions_of(config) or DEFAULT_CONTEXT
        self.context = min(context or DEFAULT_CONTEXT, longest)
        use_threads(threads, fixed=deterministic)
        keep_freed_memory()
        slots = min(slots, EXACT_ROWS) if deterministic else slots  # more requests wait their turn
        base = base_hash(self._folder)
        self.weights, adapter = base[:8], None
        """Beginnings of the hashes of base and adapter, or the version that `load` was given, and
        whether they are rounded."""
        if source.adapter is not None:
            adapter = read_adapter(source.adapter, base)
            self.weights += f"+{adapter_hash(source.adapter)[:8]}"
        self._forward = self._make_forward(
            slots, memory_gb, adapter, deterministic, weights, note or say
        )
        self._rounded = ROUNDED if self._forward.int8 else ""
        self.weights += self._rounded
        self.slots = self._forward.slots
        """Rollouts that keep their keys and values at a time; of more, the oldest lose theirs."""
        eos = _eos_ids(self._folder, config, self.codec)
        guess = guess and self._forward.can_rewind and not deterministic  # a wrong one is undone
        guesses = Guesses() if guess else None
        self._batch = Batch(self._forward, self.codec, eos, deterministic, guesses)
        self._matchers = Matchers(self.codec, self._forward.vocabulary, eos)
        self._wake = threading.Condition()
        self._queue: deque[BatchRequest | _NewWeights] = deque()
        self._closing = False
        release_threads()
        self._thread = threading.Thread(target=self._serve, name="coa-engine", daemon=True)
        self._thread.start()

    def _make_forward(
        self,
        slots: int,
        memory_gb: float | None,
        adapter: Adapter | None,
        exact: bool,
        weights: str,
        note: Callable[[str], None],
    ) -> LlamaForward | PlainForward:
        reason = unsupported(self._config)
        if reason is not None:
            if weights == "int8":
                raise ConfigError(f"{self.name}: weights 'int8': {reason} has no fast path here.")
            note(f"{self.name}: {reason} has no fast path here; using transformers, row by row")
            return PlainForward(self._folder, self._dtype, slots, adapter)
        each = slot_bytes(Shape.read(self._config), self.context, self._dtype) / 1e9
        fair = (memory_gb_of_machine() or 8.0) * MEMORY_SHARE / processes_here()
        bound = fair if memory_gb is None else memory_gb
        if each > bound:
            raise ConfigError(
                f"{self.name}: keys and values of one rollout of {self.context} tokens take "
                f"{each:.2g} GB, and memory_gb allows {bound:.2g}. "
                "Lower context or raise memory_gb."
            )
        if (fitting := int(bound / each)) < slots:
            note(f"{self.name}: {fitting} rollouts fit into {bound:.2g} GB; others wait")
        slots = min(slots, fitting)
        int8 = weights != "full" and not exact
        forward = LlamaForward(self._folder, self._dtype, slots, self.context, exact, adapter, int8)
        if forward.slow and weights == "int8":
            raise ConfigError(
                f"{self.name}: weights 'int8' needs the compiled kernels: {forward.slow}."
            )
        if forward.slow:
            note(f"{self.name}: no compiled kernels ({forward.slow}); using torch, slower")
        return forward

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_text: OnText | None = None
    ) -> Completion:
        limit = most_tokens(prompt_ids, sampling, self.context, "load the engine")
        request = BatchRequest(list(prompt_ids), sampling, limit)
        if on_text is not None:
            loop = asyncio.get_running_loop()
            request.on_text = lambda text: _post(loop, on_text, text)
        completion: Completion = await self._submit(request)
        return completion

    async def load(self, adapter: Adapter | None, version: str) -> None:
        """Merge another adapter (None: the base) once running requests have finished."""
        release_threads()  # the caller's, who trained it
        await self._submit(_NewWeights(adapter, version))

    async def _submit(self, job: BatchRequest | _NewWeights) -> Any:
        with self._wake:
            if self._closing:
                raise EngineError("The engine is closed.")
            self._queue.append(job)
            self._wake.notify()
        return await asyncio.wrap_future(job.answer)

    async def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def _serve(self) -> None:
        """What the thread does: take jobs in, step the batch, and answer who finished."""
        with torch.inference_mode():
            while (joined := self._take_in()) is not None:
                held = [*self._batch.running, *joined]
                try:
                    for job in joined:
                        self._start(job)
                    adapt_threads()
                    done = self._batch.step()
                    _show_text(self.codec, [*self._batch.running, *done])
                    for request in done:
                        _settle(request.answer, _result(request))
                except Exception as exc:
                    self._batch.forget()
                    self._fail(held, f"The local engine failed: {type(exc).__name__}: {exc}")
        self._fail(self._batch.running, "The engine was closed.")

    def _take_in(self) -> Sequence[BatchRequest | _NewWeights] | None:
        """Jobs that can start now; waits when there is nothing to do. None: the engine closes."""
        with self._wake:
            patience: float | None = PATIENCE
            while not self._queue and not self._batch.running and not self._closing:
                if not self._wake.wait(patience):
                    release_threads()  # whoever took the answers may compute by now
                    patience = None
            if self._closing:
                return None
            if self._queue and isinstance(self._queue[0], _NewWeights):
                # They wait until the batch is drained, and nobody joins meanwhile.
                return [] if self._batch.running else [self._queue.popleft()]
            joined: list[BatchRequest] = []
            room = self.slots - len(self._batch.running)
            while self._queue and len(joined) < room:
                job = self._queue[0]
                if isinstance(job, _NewWeights):
                    break
                joined.append(job)
                self._queue.popleft()
            return joined

    def _start(self, job: BatchRequest | _NewWeights) -> None:
        try:
            if isinstance(job, _NewWeights):
                self._forward.load(job.adapter)
                self._batch.forget()
                self.weights = job.version + self._rounded
                _settle(job.answer, None)
            elif not job.answer.cancelled():
                if job.sampling.constraint:
                    job.matcher = self._matchers.start(job.sampling.constraint)
                self._batch.join(job)
        except CoaError as exc:
            _settle(job.answer, exc)

    def _fail(self, held: Sequence[BatchRequest | _NewWeights], message: str) -> None:
        """Answer everybody who waits with an error."""
        with self._wake:
            waiting = [*held, *self._queue]
            self._queue.clear()
        for job in waiting:
            _settle(job.answer, EngineError(message))


@dataclass(eq=False)
class _NewWeights:
    """An adapter to merge, in the queue among the requests."""

    adapter: Adapter | None
    version: str
    answer: Future[None] = field(default_factory=Future)


def _settle(answer: Future[Any], result: Any) -> None:
    """Pass a result or an error on, unless the caller has gone or was answered already."""
    if answer.done() or not answer.set_running_or_notify_cancel():
        return
    if isinstance(result, CoaError):
        answer.set_exception(result)
    else:
        answer.set_result(result)


def _result(request: BatchRequest) -> Completion | EngineError:
    assert request.finish is not None
    if request.failure:
        return EngineError(request.failure)
    masses = request.masses if request.matcher is not None else None
    return Completion(request.ids, request.logprobs, request.finish, masses)


def _post(loop: asyncio.AbstractEventLoop, on_text: OnText, text: str) -> None:
    with contextlib.suppress(RuntimeError):  # the caller's loop has ended; nobody looks any more
        loop.call_soon_threadsafe(on_text, text)


def _show_text(codec: TextCodec, requests: Sequence[BatchRequest]) -> None:
    """Pass on new text, holding back a character whose bytes are not complete yet.

    Decoding starts one piece back, because some tokenizers drop a leading space.
    """
    for request in requests:
        if request.on_text is None or request.shown == len(request.ids):
            continue
        before = codec.decode(request.ids[request.anchor : request.shown])
        now = codec.decode(request.ids[request.anchor :])
        if request.finish or not now.endswith("\ufffd"):
            if len(now) > len(before):  # an end of sequence has no text
                request.on_text(now[len(before) :])
            request.anchor, request.shown = request.shown, len(request.ids)


def _eos_ids(folder: Path, config: dict[str, Any], codec: Codec) -> frozenset[int]:
    """End-of-sequence ids from the configuration, the generation settings and the template."""
    found = set(codec.end_ids())
    settings = [config, config.get("text_config") or {}]
    if (folder / "generation_config.json").is_file():
        settings.append(json.loads((folder / "generation_config.json").read_text("utf-8")))
    for setting in settings:
        value = setting.get("eos_token_id")
        found.update(value if isinstance(value, list) else [value] if value is not None else [])
    return frozenset(found)
