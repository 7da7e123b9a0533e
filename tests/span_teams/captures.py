"""Run the teams of this folder and keep the spans that they send: `span_captures/NAME.jsonl.gz`.

    python tests/span_teams/captures.py VENV [NAME ...]

VENV has the packages of `PACKAGES`; those of `OLD` need one with older versions (`PACKAGES_OLD`).
"""

from __future__ import annotations

import asyncio
import gzip
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent / "src")]

from script import says  # noqa: E402

from coa.recording.calls import CallLog  # noqa: E402
from coa.recording.receiver import CONTENT, Receiver  # noqa: E402
from scripted_provider import ScriptedProvider  # noqa: E402

CAPTURES = HERE.parent / "span_captures"
PACKAGES = (
    "opentelemetry-sdk opentelemetry-exporter-otlp-proto-http opentelemetry-instrumentation-openai "
    "opentelemetry-instrumentation-openai-v2==2.4b0 opentelemetry-util-genai==1.1b0 "
    "openinference-instrumentation-smolagents openinference-instrumentation-openai "
    "openinference-instrumentation-openai-agents openinference-instrumentation-langchain "
    "smolagents[openai] openai-agents langgraph langchain langchain-openai pydantic-ai-slim[openai]"
)
PACKAGES_OLD = (
    "opentelemetry-instrumentation-openai==0.33.12 opentelemetry-instrumentation-openai-v2==2.1b0 "
    "openai<2 opentelemetry-exporter-otlp-proto-http"
)
TEAMS: dict[str, str] = {
    "smolagents": "team_smolagents.py",
    "smolagents-code": "team_smolagents.py code",
    "openai-agents": "team_openai_agents.py",
    "openai-agents-chat": "team_openai_agents.py chat",
    "openai-agents-handoff": "team_openai_agents.py handoff",
    "langgraph": "team_langgraph.py",
    "pydantic-ai-2": "team_pydantic_ai.py 2",
    "pydantic-ai-5": "team_pydantic_ai.py 5",
    "openai-genai": "team_openai.py v2",
    "openai-openllmetry": "team_openai.py traceloop",
    "openai-openinference": "team_openai.py openinference",
}
ALL_FORMS = "pydantic-ai-5"
"""Of this one the requests and the console's output are kept, too."""
OLD: dict[str, str] = {
    "openai-genai-events": "team_openai.py v2 events",
    "openai-openllmetry-legacy": "team_openai.py traceloop",
}


class Keeping(Receiver):
    """Keeps requests as they came, with their lengths, as the collector writes them to files."""

    bodies = b""

    def take(self, path: str, body: bytes, kind: str) -> int:
        if path.endswith("traces"):
            self.bodies += len(body).to_bytes(4, "big") + body
        return super().take(path, body, kind)


def capture(python: Path, team: str, out: Path) -> str:
    """Run a team under a receiver that writes to `out`; what it printed. Beside `out` are its
    console exporter's output, its requests, and the SDK's own traces where it has such."""
    script, *arguments = team.split()
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_", "PYTHON"))}
    if "events" in arguments:
        environ[CONTENT] = "true"
    environ |= {"TRACES": str(out.with_suffix(".traces.jsonl"))}
    environ |= {"CONSOLE": str(out.with_suffix(".console"))}

    async def run() -> str:
        with ScriptedProvider(says) as provider:
            log = CallLog(out.with_suffix(".log"))
            async with Keeping(out, log) as receiver:
                await receiver.begin("run")
                environ.update(
                    receiver.variables(environ, "run"), OPENAI_BASE_URL=f"{provider.url}/v1"
                )
                done = await asyncio.to_thread(  # the receiver listens on this loop
                    subprocess.run,
                    [str(python), str(HERE / script), *arguments],
                    env=environ,
                    capture_output=True,
                    text=True,
                    timeout=300,
                )
                for session in ["run", *receiver.named]:
                    await receiver.end(session)
            out.with_suffix(".pb").write_bytes(receiver.bodies)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.strip()

    return asyncio.run(run())


def main(venv: str, *names: str) -> None:
    CAPTURES.mkdir(exist_ok=True)
    for name in names or TEAMS:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / f"{name}.jsonl"
            print(name, capture(Path(venv) / "bin" / "python", {**TEAMS, **OLD}[name], out))
            for path in Path(folder).iterdir():
                wanted = name == ALL_FORMS or path == out or ".traces." in path.name
                if wanted and path.suffix != ".log":
                    packed = gzip.compress(path.read_bytes(), 9, mtime=0)
                    (CAPTURES / f"{path.name}.gz").write_bytes(packed)


if __name__ == "__main__":
    main(*sys.argv[1:])
