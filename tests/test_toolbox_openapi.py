"""Catalogues out of OpenAPI descriptions: what is taken over, what is refused, what is held out."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa.environments.toolbox import openapi
from coa.environments.toolbox.tasks import ToolboxMaking, make_tasks
from coa.errors import RecordError, Unavailable, UsageError
from coa.tools.arguments import find_problem

PET = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "petName": {"type": "string", "description": "Name of the pet"},
        "status": {"type": "string", "enum": ["available", "pending", "sold"]},
        "weight": {"type": "number"},
        "city": {"type": "string"},
        "ownerEmail": {"type": "string", "format": "email"},
    },
}


def described(extra: dict[str, Any] | None = None) -> dict[str, Any]:
    one = {"name": "petId", "in": "path", "required": True, "schema": {"type": "string"}}
    answer = {"200": {"content": {"application/json": {"schema": {"$ref": "#/components/x/Pet"}}}}}
    body = {"content": {"application/json": {"schema": {"$ref": "#/components/x/Pet"}}}}
    status = {"name": "status", "in": "query", "schema": PET["properties"]["status"]}  # type: ignore[index]
    about = "Find a pet by **its** ID. <script>alert(1)</script> See [the docs](http://x.example)."
    return {
        "components": {"x": {"Pet": PET}},
        "paths": {
            "/pets/{petId}": {
                "parameters": [one],
                "get": {"operationId": "getPetById", "description": about, "responses": answer},
                "patch": {
                    "operationId": "updatePet",
                    "summary": "Change a pet",
                    "requestBody": body,
                },
                "delete": {"summary": "Remove a pet"},
            },
            "/pets": {
                "get": {"operationId": "findPets", "summary": "Lists pets", "parameters": [status]},
                "post": {"operationId": "addPet", "summary": "Adds a pet", "requestBody": body},
            },
            **(extra or {}),
        },
    }


def archive(path: Path, files: dict[str, Any]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            text = content if isinstance(content, bytes) else json.dumps(content).encode()
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text))
    return path


def providers(held_out: bool, n: int) -> list[str]:
    names = (f"shop{k}.example" for k in range(1000))
    return [name for name in names if openapi.is_held_out(name) == held_out][:n]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A registry on this machine, whose archive has providers for both splits."""
    folder = tmp_path / "registry"
    folder.mkdir()
    files = {
        f"api/{name}.json": described() for held in (False, True) for name in providers(held, 3)
    }
    files["src/run.js"] = b"process.exit(1)"
    files["api/broken.example.json"] = b'{"paths": '
    made = archive(folder / "directory.tgz", files)
    answering = partial(SimpleHTTPRequestHandler, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), answering)
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *given: None)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("COA_CACHE", str(tmp_path / "cache"))
    address = f"http://127.0.0.1:{server.server_address[1]}/directory.tgz"
    monkeypatch.setattr(openapi, "ADDRESS", address)
    monkeypatch.setattr(openapi, "SHA512", hashlib.sha512(made.read_bytes()).hexdigest())
    openapi.catalogues.cache_clear()
    yield tmp_path
    openapi.catalogues.cache_clear()
    server.shutdown()
    server.server_close()


def test_operations_of_a_record_are_taken_over_with_what_they_say() -> None:
    (held,) = openapi.catalogues_of(json.dumps(described()).encode())
    by_name = {each["name"]: each for each in held["operations"]}
    assert {each["does"]["does"] for each in by_name.values()} == {
        *("get", "list", "create", "update", "remove")
    }
    get = by_name["get_pet_by_id"]
    assert get["description"] == "Find a pet by its ID. alert(1) See the docs."
    assert get["parameters"]["properties"] == {"petId": {"type": "string"}}
    (thing,) = held["things"]
    assert thing["noun"] == "pet" and thing["fields"]["status"] == "available|pending|sold"
    assert by_name["find_pets"]["does"]["by"] == {"status": "status"}


def test_what_no_service_could_mean_is_left_out() -> None:
    strange = {
        "/pets/{petId}/toys/{toyId}": {"get": {"summary": "A toy"}},
        "/search/{petId}/run": {"post": {"summary": "Runs"}},
        "/owners/{id}": {"get": {"summary": "An owner without fields", "responses": {}}},
        "/odd": ["no", "object"],
    }
    (held,) = openapi.catalogues_of(json.dumps(described(strange)).encode())
    assert [thing["noun"] for thing in held["things"]] == ["pet"]


_PART = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "get",
                    "parameters",
                    "schema",
                    "properties",
                    "$ref",
                    "type",
                    "enum",
                    "content",
                    "name",
                ]
            ),
            inner,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.sampled_from(["/a/{id}", "/a", "/b/{x}"]), _PART), st.binary(max_size=30))
def test_any_description_is_read_or_left_out(paths: Any, rubbish: bytes) -> None:
    list(openapi.catalogues_of(rubbish))
    list(openapi.catalogues_of(json.dumps({"paths": paths}).encode()))
    mixed = described()
    mixed["paths"] |= paths
    list(openapi.catalogues_of(json.dumps(mixed).encode()))


def test_a_reference_to_itself_ends() -> None:
    held = described()
    held["components"]["x"]["Pet"] = {"$ref": "#/components/x/Pet"}
    assert list(openapi.catalogues_of(json.dumps(held).encode())) == []


def test_it_is_fetched_once_and_whole_providers_are_held_out(site: Path) -> None:
    train = make_tasks("train", 25, 0, making=ToolboxMaking(sources=("openapi",)))
    (site / "registry" / "directory.tgz").unlink()
    openapi.catalogues.cache_clear()
    test = make_tasks("test", 25, 0, making=ToolboxMaking(sources=("openapi",)))

    def named(tasks: Any) -> set[str]:
        return {task.meta["provider"].partition("/")[0] for task in tasks}

    assert named(train) <= {*providers(False, 3)} and named(test) <= {*providers(True, 3)}
    for task in train:
        declared = {tool["name"]: tool["parameters"] for tool in task.meta["tools"]}
        for call in task.gold["calls"]:
            assert not find_problem(call["arguments"], declared[call["name"]])
    assert not list((site / "cache").rglob("*.part")) and not list((site / "cache").rglob("*.js"))


def test_both_sources_take_turns(site: Path) -> None:
    tasks = make_tasks("train", 20, 0, making=ToolboxMaking(sources=("generated", "openapi")))
    assert {task.meta["source"] for task in tasks} == {"generated", "openapi"}


def test_a_replaced_archive_is_deleted(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openapi, "SHA512", "0" * 128)
    with pytest.raises(RecordError, match="damaged or was replaced"):
        make_tasks("train", 3, 0, making=ToolboxMaking(sources=("openapi",)))
    assert not [path for path in (site / "cache").rglob("*") if path.suffix in (".part", ".jsonl")]


def test_what_cannot_be_fetched_is_one_line_and_replaced_by_nothing(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openapi, "ADDRESS", openapi.ADDRESS.replace("directory", "nothing"))
    with pytest.raises(Unavailable, match="leave 'openapi' out of sources") as refused:
        make_tasks("train", 3, 0, making=ToolboxMaking(sources=("generated", "openapi")))
    assert "\n" not in str(refused.value)


def test_families_that_cannot_be_made_are_refused(site: Path) -> None:
    with pytest.raises(UsageError, match="source 'openapi' has no tasks of sum; it has read"):
        make_tasks("train", 3, 0, ["sum"], ToolboxMaking(sources=("openapi",)))
