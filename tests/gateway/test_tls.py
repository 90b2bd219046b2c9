"""The API over HTTPS, with and without certificates of clients."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import httpx
import pytest

from shared.runtime.settings import BusSettings
from shared.runtime.tls import own_server_tls
from tests.certificates import Authority
from tests.gateway.conftest import running_gateway


async def test_https_with_certificates_of_clients(tmp_path: Path, nats_settings: BusSettings) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    cert, key = map(str, authority.issue("gateway"))
    trusting = ssl.create_default_context(cafile=str(authority.ca))
    known = ssl.create_default_context(cafile=str(authority.ca))
    known.load_cert_chain(*authority.issue("client"))
    unknown = ssl.create_default_context(cafile=str(authority.ca))
    unknown.load_cert_chain(*stranger.issue("other"))
    files = {"tls_cert": cert, "tls_key": key, "tls_client_ca": str(authority.ca)}
    async with running_gateway(nats_settings, **files) as gateway:
        url = f"https://127.0.0.1:{gateway.port}/health"
        async with httpx.AsyncClient(verify=known) as client:
            assert (await client.get(url)).status_code == 200
        async with httpx.AsyncClient(verify=own_server_tls(gateway.context.settings)) as client:
            assert (await client.get(url)).status_code == 200, "as `tideway up` looks whether it is ready"
        for context in (trusting, unknown):
            async with httpx.AsyncClient(verify=context) as client:
                with pytest.raises(httpx.TransportError):
                    await client.get(url)
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.TransportError):
                await client.get(url.replace("https", "http"))


async def test_a_handshake_does_not_take_for_ever(tmp_path: Path, nats_settings: BusSettings) -> None:
    cert, key = map(str, Authority(tmp_path).issue("gateway"))
    async with running_gateway(nats_settings, tls_cert=cert, tls_key=key, head_timeout_s=0.3) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        async with asyncio.timeout(20):  # asyncio's own bound is a minute
            assert await reader.read() == b""
        writer.close()
