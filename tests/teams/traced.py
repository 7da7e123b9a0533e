"""Runs a program of a framework with its instrumentation on, as `coa record --otel` wants it.

    python traced.py FRAMEWORK PROGRAM ARGUMENT...

FRAMEWORK is smolagents, agents_sdk (both by OpenInference) or pydantic_ai (by itself). Where the
spans go, and that they hold what was said, is in the environment.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor


def instrument(framework: str, provider: TracerProvider) -> None:
    if framework.startswith("smolagents"):
        from openinference.instrumentation.smolagents import SmolagentsInstrumentor

        SmolagentsInstrumentor().instrument(tracer_provider=provider)
    elif framework == "agents_sdk":
        # The SDK is kept from telling OpenAI what it does, by the tests and by the program; spans
        # are made of just that.
        os.environ.pop("OPENAI_AGENTS_DISABLE_TRACING", None)
        import agents
        from openinference.instrumentation.openai_agents import OpenAIAgentsInstrumentor

        agents.set_trace_processors([])
        agents.set_tracing_disabled = lambda disabled: None
        OpenAIAgentsInstrumentor().instrument(tracer_provider=provider)
    else:
        from pydantic_ai import Agent
        from pydantic_ai.models.instrumented import InstrumentationSettings

        Agent.instrument_all(InstrumentationSettings(tracer_provider=provider))


def main() -> None:
    framework, program, *given = sys.argv[1:]
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    instrument(framework, provider)
    sys.argv = [program, *given]
    sys.path[0] = str(Path(program).resolve().parent)
    try:
        runpy.run_path(program, run_name="__main__")
    finally:
        provider.shutdown()


if __name__ == "__main__":
    main()
