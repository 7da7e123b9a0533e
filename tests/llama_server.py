"""A real llama.cpp server on loopback, for the tests of the openai engine.

Runs in an environment of its own (`make test-servers`): python llama_server.py MODEL.gguf PORT.
It prints one line when it listens, and ends when its standard input is closed, so it cannot outlive
the test that started it. One thread: two cores are shared with the tests.
"""

from __future__ import annotations

import sys


def main() -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.model_alias = {"smollm2"}
    params.hostnames = ["127.0.0.1"]
    params.port = int(sys.argv[2])
    params.n_ctx, params.n_parallel, params.n_threads_http = 4096, 2, 4
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup, params.ui, params.verbosity = False, False, 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
