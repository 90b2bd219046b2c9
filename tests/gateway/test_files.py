"""The Files API, driven by the openai package and by hand."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import openai
import pytest

from services.gateway.batch.output import outputs_of
from shared.messages.catalogue import FILE_CONTENTS, FILES
from shared.messages.cluster import ModelSpec
from shared.runtime.settings import BusSettings
from tests.gateway.batching import echo, ended, line, reach, read, start
from tests.gateway.conftest import MODEL, Stack, running_stack


async def upload(client: openai.AsyncOpenAI, content: bytes = b"{}\n", name: str = "input.jsonl", **fields):
    return await client.files.create(file=(name, content), purpose=fields.pop("purpose", "batch"), **fields)


async def test_a_file_comes_back_as_it_was(stack: Stack) -> None:
    client = stack.openai()
    content = bytes(range(256)) * 5000 + b"\r\n--not a boundary\r\n"
    file = await upload(client, content, name='ein "Name".jsonl')
    assert (file.object, file.bytes, file.purpose, file.status) == ("file", len(content), "batch", "processed")
    assert file.expires_at - file.created_at == 30 * 86400
    assert await client.files.retrieve(file.id) == file
    assert (await client.files.content(file.id)).content == content
    deleted = await client.files.delete(file.id)
    assert deleted.deleted and deleted.id == file.id
    for gone in (client.files.retrieve(file.id), client.files.content(file.id), client.files.delete(file.id)):
        with pytest.raises(openai.NotFoundError) as raised:
            await gone
        assert raised.value.body["code"] == "file_not_found"
    assert [each async for each in await client.files.list()] == []


async def test_an_empty_file_is_a_file(stack: Stack) -> None:
    client = stack.openai()
    file = await upload(client, b"")
    assert file.bytes == 0
    assert (await client.files.content(file.id)).content == b""


async def test_listing_in_pages(stack: Stack) -> None:
    client = stack.openai()
    ids = [(await upload(client, name=f"{i}.jsonl", purpose="batch" if i % 2 else "user_data")).id for i in range(5)]
    assert [file.id async for file in client.files.list()] == ids[::-1]
    assert [file.id async for file in client.files.list(limit=2)] == ids[::-1]
    assert [file.id async for file in client.files.list(limit=2, order="asc", after=ids[0])] == ids[1:]
    assert [file.id async for file in client.files.list(purpose="batch")] == [ids[3], ids[1]]
    page = (await stack.client.get("/v1/files?limit=2")).json()
    assert page["has_more"] and page["first_id"] == ids[4] and page["last_id"] == ids[3]
    for query in ("limit=0", "limit=10001", "limit=x", "order=up", "after=file-none"):
        answer = await stack.client.get(f"/v1/files?{query}")
        assert answer.status_code == 400 and answer.json()["error"]["param"] == query.partition("=")[0]


@pytest.mark.parametrize(
    ("written", "filename"),
    [(b"filename*=UTF-8''na%C3%AFve%0A.txt", "naïve\ufffd.txt"), (b'filename="a\x07b"', "a\ufffdb")],
)
async def test_names_in_any_alphabet_but_without_control_characters(
    stack: Stack, written: bytes, filename: str
) -> None:
    body = (
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; ' + written + b"\r\n\r\ncontent\r\n--x--\r\n"
    )
    headers = {"content-type": "multipart/form-data; boundary=x"}
    answer = await stack.client.post("/v1/files", content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["filename"], answer.json()["bytes"]) == (filename, 7)


async def test_expiry_is_the_uploaders(stack: Stack) -> None:
    client = stack.openai()
    file = await upload(client, expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at - file.created_at == 3600
    assert (await upload(client, purpose="user_data")).expires_at is None
    with pytest.raises(openai.BadRequestError) as raised:
        await upload(client, expires_after={"anchor": "created_at", "seconds": 60})
    assert raised.value.body["param"] == "expires_after.seconds" and "3600" in raised.value.body["message"]


async def test_expired_and_deleted_files_are_swept_away(stack: Stack) -> None:
    client, bus, files = stack.openai(), stack.peer.bus, stack.gateway.context.files
    expired, deleted, read, kept = [(await upload(client, name=f"{i}")).id for i in range(4)]
    await client.files.delete(deleted)
    await client.files.delete(read)
    records = await bus.key_value(FILES)
    entry = await records.get(expired)
    assert entry is not None
    await records.put(expired, msgspec.structs.replace(entry.value, expires_s=time.time() - 1))
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(expired)
    contents = await bus.object_store(FILE_CONTENTS)
    await contents.put("file-orphan", b"x")
    await contents.put("batch_1.7", b"x")
    await files.sweep(lambda: {read, "batch_1"}, time.time())
    assert len(await contents.names()) == 6, "a batch may just be created on any of them"
    await files.sweep(lambda: {read, "batch_1"}, time.time())
    assert await contents.names() == sorted(["batch_1.7", kept, read])
    await files.sweep(lambda: {"batch_1"}, time.time())
    assert await contents.names() == sorted(["batch_1.7", kept])
    assert sorted(await records.entries()) == [kept]


@pytest.mark.parametrize(
    ("fields", "files", "param"),
    [
        ({"purpose": "batch"}, {}, "file"),
        ({}, {"file": ("a", b"x")}, "purpose"),
        ({"purpose": "mischief"}, {"file": ("a", b"x")}, "purpose"),
        ({"purpose": "x" * 5000}, {"file": ("a", b"x")}, "purpose"),
        ({"purpose": "batch", "expires_after[seconds]": "7200"}, {"file": ("a", b"x")}, "expires_after.anchor"),
    ],
)
async def test_what_is_wrong_with_a_form_is_named(stack: Stack, fields, files, param) -> None:
    answer = await stack.client.post("/v1/files", data=fields, files=files or {"other": ("a", b"x")})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert await (await stack.peer.bus.object_store(FILE_CONTENTS)).names() == []


async def test_forms_that_are_none(stack: Stack) -> None:
    answer = await stack.client.post("/v1/files", json={"purpose": "batch"})
    assert answer.status_code == 415
    headers = {"content-type": "multipart/form-data; boundary=x"}
    for body in (b"", b"nonsense", b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc'):
        answer = await stack.client.post("/v1/files", content=body, headers=headers)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_form"


async def test_a_file_over_the_limit_is_refused(nats_settings: BusSettings, checkpoint: Path) -> None:
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))], max_file_bytes=300_000) as stack:
        await upload(stack.openai(), b"x" * 300_000)
        for content in (b"x" * 300_001, b"x" * 1_000_000):
            with pytest.raises(openai.APIStatusError) as raised:
                await upload(stack.openai(), content)
            assert raised.value.status_code == 413 and raised.value.body["code"] == "file_too_large"
            assert "300000" in raised.value.body["message"]
        assert len(await (await stack.peer.bus.object_store(FILE_CONTENTS)).names()) == 1


async def test_a_tenant_sees_its_own_files_only(nats_settings: BusSettings, checkpoint: Path) -> None:
    async with running_stack(nats_settings, [ModelSpec(MODEL, str(checkpoint))], api_keys="alice,bob") as stack:
        alice, bob = stack.openai("alice"), stack.openai("bob")
        file = await upload(alice)
        assert [each.id async for each in alice.files.list()] == [file.id]
        assert [each.id async for each in bob.files.list()] == []
        for attempt in (bob.files.retrieve(file.id), bob.files.content(file.id), bob.files.delete(file.id)):
            with pytest.raises(openai.NotFoundError):
                await attempt
        with pytest.raises(openai.NotFoundError) as raised:
            await bob.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        assert raised.value.body["param"] == "input_file_id"
        with pytest.raises(openai.AuthenticationError):
            await upload(stack.openai("mallory"))


async def test_an_upload_that_breaks_off_leaves_nothing(stack: Stack) -> None:

    _, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"y" * 400_000
    writer.write(
        b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=x\r\n"
        b"content-length: 900000\r\n\r\n" + head
    )
    await writer.drain()
    streams = stack.gateway.context.bus._streams.context

    async def num_chunks() -> int:
        info = await streams.stream_info(f"OBJ_{FILE_CONTENTS.name}", f"$O.{FILE_CONTENTS.name}.C.>")
        # One is the gateway's own check of the storage.
        return sum(number for subject, number in (info.state.subjects or {}).items() if not subject.endswith(".check"))

    while await num_chunks() == 0:
        await asyncio.sleep(0.01)
    writer.close()
    async with asyncio.timeout(10):
        while await num_chunks():
            await asyncio.sleep(0.01)


async def test_a_content_that_is_lost_is_told_of_as_the_server_s_fault(stack: Stack) -> None:
    client = stack.openai()
    file = await upload(client)
    contents = await stack.gateway.context.bus.object_store(FILE_CONTENTS)
    await contents.delete(file.id)
    assert (await client.files.retrieve(file.id)).id == file.id
    answer = await stack.client.get(f"/v1/files/{file.id}/content")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "file_lost")
    assert (await client.files.delete(file.id)).deleted


async def test_a_sweep_tells_what_is_lost_and_writes_lost_records_of_outputs_again(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    client, files = stack.openai(), stack.gateway.context.files
    echo(stack)
    lost, batch = (await upload(client)).id, await start(client, [line(0), line(1)])
    output_id = (await reach(client, batch.id, ended)).output_file_id
    before = await client.files.retrieve(output_id)
    await (await stack.peer.bus.object_store(FILE_CONTENTS)).delete(lost)
    await (await stack.peer.bus.key_value(FILES)).purge(output_id)
    record = await stack.gateway.context.batches.record(batch.id)
    assert record is not None
    await files.sweep(set, time.time(), outputs_of(record))
    assert files.lost == {lost} and f"{lost}: its content was stored and is lost" in caplog.text
    again = await client.files.retrieve(output_id)
    assert (again.filename, again.bytes, again.purpose) == (before.filename, before.bytes, before.purpose)
    assert len(await read(client, output_id)) == 2
