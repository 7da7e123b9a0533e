"""LoRA adapters on a vLLM server, loaded while it runs.

Every version gets a name of its own. A server keeps the prefixes it has computed by the adapter's
name, so new weights under an old name would be mixed with what the old ones computed; and two
programs that use one server never meet. The server reads the folder itself, so both must see the
same files, and the folder must stay as long as the adapter is used.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coa.engines.lora import Adapter, check_base, write_adapter
from coa.engines.transport import Refused, Transport
from coa.engines.weights import base_hash
from coa.errors import EngineError, ModelError


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
        except Refused as error:
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
    except Refused as error:
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
