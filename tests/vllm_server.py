"""A real vLLM server on loopback, for the tests of the openai engine.

Runs in an environment of its own (`make test-vllm`): python vllm_server.py FOLDER PORT [OPTIONS].
It prints its address when it answers, and ends the server when its standard input is closed, which
a killed test run does too. The server has a process group of its own: it is several processes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

NAME = "smollm2"
SETTINGS = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GB
    "VLLM_MAX_STOP_STRINGS": "16",  # the afm grammar has 7; 4 are allowed by default
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
OPTIONS = (
    *("--host", "127.0.0.1", "--served-model-name", NAME),
    *("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "32"),
    *("--enforce-eager", "--enable-prefix-caching"),
    # On a CPU, vLLM 0.32 ends when a prompt with a seed of its own is computed in pieces.
    *("--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096"),
    *("--logprobs-mode", "processed_logprobs", "--enable-prompt-tokens-details"),
    *("--structured-outputs-config", '{"backend": "guidance"}'),
    *("--enable-lora", "--max-lora-rank", "32", "--max-loras", "2"),
    "--disable-uvicorn-access-log",
)


def start(folder: str, port: int, more: list[str]) -> subprocess.Popen[bytes]:
    """The server, in a session of its own, told to end should this process be killed."""
    # Not the `vllm` command: in the CPU package it looks for its version under another name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    return subprocess.Popen(
        [*command, "--port", str(port), *OPTIONS, *more],
        env={**os.environ, **SETTINGS},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )


def _end_with_parent() -> None:
    parent_death_signal = 1
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGTERM)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def end(server: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
            server.wait(timeout=10)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def main() -> None:
    folder, port, *more = sys.argv[1:]
    url = f"http://127.0.0.1:{port}"
    server = start(folder, int(port), more)
    closed = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), closed.set()), daemon=True).start()
    try:
        while server.poll() is None and not closed.is_set() and not answers(url):
            time.sleep(0.2)
        if server.poll() is None and not closed.is_set():
            print(url, flush=True)
            while server.poll() is None and not closed.wait(1.0):
                pass
    finally:
        end(server)


if __name__ == "__main__":
    main()
