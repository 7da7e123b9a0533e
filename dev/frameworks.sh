#!/bin/sh
# Make the environments with the agent frameworks that we record, or do nothing when that is done.
#
#   sh dev/frameworks.sh FOLDER
#
#     teams      smolagents, LangGraph, OpenAI Agents SDK, pydantic-ai, what they make spans with, and
#                Anthropic's client (0.3 GB)
#     spans      the same one, by the name that tests/test_span_teams.py knows
#     crewai     CrewAI, which wants an older pydantic, openai and mcp than the others (1.0 GB)
#     spans-old  instrumentations of before the conventions of 2025 (0.1 GB)
#
# They are apart from .venv, because frameworks pin their own versions of nearly everything.
set -u

PARENT=${1:?the folder of the environments}
PYTHON=${PYTHON:-.venv/bin/python}
TEAMS=${TEAMS:-smolagents[openai]==1.26.0 langgraph==1.2.22 langchain==1.4.7 langchain-openai==1.7.3
    langchain-core==1.7.2 openai-agents==0.24.0 pydantic-ai-slim[openai]==2.66.0
    openinference-instrumentation-smolagents==0.1.43 openinference-instrumentation-openai==0.1.66
    openinference-instrumentation-openai-agents==2.6.0 openinference-instrumentation-langchain==0.1.80
    opentelemetry-instrumentation-openai==0.62.4 opentelemetry-instrumentation-openai-v2==2.4b0
    opentelemetry-util-genai==1.1b0 opentelemetry-sdk==1.45.2
    opentelemetry-exporter-otlp-proto-http==1.45.1 atif==1.8.0 anthropic==2.10.0}
CREWAI=${CREWAI:-crewai==1.15.30}
OLD=${OLD:-opentelemetry-instrumentation-openai==0.33.12 opentelemetry-instrumentation-openai-v2==2.1b0
    openai==1.109.1 opentelemetry-exporter-otlp-proto-http==1.28.2}

cd "$(dirname "$0")/.." || exit 1
mkdir -p "$PARENT" || exit 1

make() {
    # An environment: its name, its gigabytes, a module that shows that all is there, requirements.
    (
        FOLDER=$PARENT/$1 NEED_GB=$2 NAME=frameworks module=$3
        shift 3
        . dev/environment.sh
        begin "$*"
        pip_install "$@"
        finish "$module"
    ) || exit 1
}

# shellcheck disable=SC2086  # lists of requirements
{
    make teams 1 "smolagents, langgraph, langchain_openai, agents, pydantic_ai, openinference, atif, anthropic" $TEAMS
    make crewai 2 crewai $CREWAI
    make spans-old 1 "openai, opentelemetry.instrumentation.openai" $OLD
}
ln -sfn teams "$PARENT/spans"
