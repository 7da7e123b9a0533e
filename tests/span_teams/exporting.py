"""What every team of this folder does first, as the documentation of OpenTelemetry says."""

from __future__ import annotations

import os
from pathlib import Path

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SimpleSpanProcessor,
)


def exporting() -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    if os.environ.get("CONSOLE"):
        shown = Path(os.environ["CONSOLE"]).open("a")  # noqa: SIM115
        provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=shown)))
    trace.set_tracer_provider(provider)
    return provider


def lookup(customer: str) -> str:
    """Look up what a customer owes.

    Args:
        customer: The customer's first name.
    """
    return {"Ada": "120 USD"}[customer]


def convert(amount: float, currency: str) -> float:
    """Convert dollars to another currency.

    Args:
        amount: In dollars.
        currency: Its three letters.
    """
    return round(amount * {"EUR": 0.9}[currency], 2)


QUESTION = "How much does Ada owe, in euros?"
