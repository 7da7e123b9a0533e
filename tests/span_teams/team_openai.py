"""A team without a framework: two agents in loops of their own over the OpenAI client.

`v2`: OpenTelemetry's instrumentation; `traceloop`: OpenLLMetry's; `openinference`: OpenInference's.
"""

from __future__ import annotations

import json
import os
import sys

import openai
from exporting import QUESTION, convert, exporting, lookup
from opentelemetry import trace

provider = exporting()
if "v2" in sys.argv:
    from opentelemetry._logs import set_logger_provider
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    from opentelemetry.instrumentation.openai_v2 import OpenAIInstrumentor
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

    logs = LoggerProvider()
    logs.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter()))
    set_logger_provider(logs)
    if "events" in sys.argv:  # before version 1.37 of the conventions
        from opentelemetry._events import set_event_logger_provider
        from opentelemetry.sdk._events import EventLoggerProvider

        set_event_logger_provider(EventLoggerProvider(logs))
elif "traceloop" in sys.argv:
    from opentelemetry.instrumentation.openai import OpenAIInstrumentor
else:
    from openinference.instrumentation.openai import OpenAIInstrumentor
OpenAIInstrumentor().instrument(tracer_provider=provider)
client = openai.OpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key="not-a-key")


def declared(name: str, about: str, **kinds: str) -> dict:
    properties = {each: {"type": kind} for each, kind in kinds.items()}
    schema = {"type": "object", "properties": properties, "required": list(kinds)}
    called = {"name": name, "description": about, "parameters": schema}
    return {"type": "function", "function": called}


def work(system: str, job: str, tools: list, run: dict) -> str:
    messages: list = [{"role": "system", "content": system}, {"role": "user", "content": job}]
    while True:
        reply = client.chat.completions.create(model="gpt-4o", messages=messages, tools=tools)
        said = reply.choices[0].message
        if not said.tool_calls:
            return said.content or ""
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            result = run[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


def ask_researcher(input: str) -> str:
    tools = [declared("lookup", "Look up what a customer owes.", customer="string")]
    return work("You find what customers owe.", input, tools, {"lookup": lookup})


asked = [
    declared("convert", "Convert dollars.", amount="number", currency="string"),
    declared("ask_researcher", "Ask what a customer owes.", input="string"),
]
with trace.get_tracer("own").start_as_current_span("run"):
    run = {"convert": convert, "ask_researcher": ask_researcher}
    print(work("You answer questions about money.", QUESTION, asked, run))
provider.shutdown()
if "v2" in sys.argv:
    logs.shutdown()
