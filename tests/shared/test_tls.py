"""TLS to a real NATS server, and the settings of both kinds."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from shared.bus import nats_bus
from shared.bus.nats_bus import NatsBus
from shared.messages import catalogue
from shared.messages.requests import HeldRequests, ListHeldRequests
from shared.runtime.settings import BusSettings, GatewaySettings, SettingsError
from shared.runtime.tls import client_tls, server_tls
from tests.certificates import Authority
from tests.conftest import NatsServer
from tests.shared.bus_contract import eventually

HELD = catalogue.INSTANCE_HELD.at(instance_id="a")


async def test_nats_over_tls_with_certificates_of_an_own_ca(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_bus, "COMPLAINT_INTERVAL_S", 0.0)
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    cert, key = authority.issue("server")
    own_cert, own_key = map(str, authority.issue("client"))
    other_cert, other_key = map(str, stranger.issue("other"))
    tls = f'cert_file: "{cert}", key_file: "{key}", ca_file: "{authority.ca}", verify: true'
    server = NatsServer(f"tls {{ {tls} }}")
    plain = NatsServer()
    ca = str(authority.ca)
    refused = {
        "the server's CA is another": BusSettings(nats_url=server.url, nats_tls_ca=str(stranger.ca)),
        "no certificate is shown": BusSettings(nats_url=server.url, nats_tls_ca=ca),
        "the shown one is another CA's": BusSettings(
            nats_url=server.url, nats_tls_ca=ca, nats_tls_cert=other_cert, nats_tls_key=other_key
        ),
        "the server has no TLS": BusSettings(nats_url=plain.url, nats_password="s3cret", nats_tls_ca=ca),
    }
    try:
        settings = BusSettings(nats_url=server.url, nats_tls_ca=ca, nats_tls_cert=own_cert, nats_tls_key=own_key)
        bus = await NatsBus.connect(settings, "test", "one")
        await bus.serve(HELD, lambda _: HeldRequests([]))
        assert (await bus.request(HELD, ListHeldRequests(), timeout_s=10)).requests == []
        server.restart()
        await eventually(lambda: not bus.is_connected)
        await eventually(lambda: bus.is_connected, 30)
        assert (await bus.request(HELD, ListHeldRequests(), timeout_s=10)).requests == []
        await bus.close()
        for reason, wrong in refused.items():
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                connecting = asyncio.create_task(NatsBus.connect(wrong, "test", "two"))
                await eventually(lambda: "waiting for NATS" in caplog.text, 15)
                assert not connecting.done(), reason
                connecting.cancel()
                await asyncio.gather(connecting, return_exceptions=True)
        assert "the server offers no TLS" in caplog.text and "s3cret" not in caplog.text
    finally:
        server.close()
        plain.close()


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = map(str, authority.issue("server"))
    (tmp_path / "none.pem").write_text("nothing")
    nothing = str(tmp_path / "none.pem")
    assert client_tls(BusSettings()) is None and server_tls(GatewaySettings()) is None
    assert server_tls(GatewaySettings(tls_cert=cert, tls_key=key, tls_client_ca=str(authority.ca))) is not None
    for words, settings in {
        "TIDEWAY_NATS_TLS_CA='/none' cannot be read": BusSettings(nats_tls_ca="/none"),
        "TIDEWAY_NATS_TLS_CA=": BusSettings(nats_tls_ca=nothing),
        "TIDEWAY_NATS_TLS_KEY needs TIDEWAY_NATS_TLS_CERT": BusSettings(nats_tls_key=key),
        "TIDEWAY_NATS_TLS_CERT='/none'": BusSettings(nats_tls_cert="/none"),
    }.items():
        with pytest.raises(SettingsError, match=words):
            client_tls(settings)
    for words, gateway in {
        "need TIDEWAY_TLS_CERT": GatewaySettings(tls_client_ca=str(authority.ca)),
        "TIDEWAY_TLS_CERT=.*no certificate with its key": GatewaySettings(tls_cert=cert, tls_key=nothing),
        "TIDEWAY_TLS_CLIENT_CA=": GatewaySettings(tls_cert=cert, tls_key=key, tls_client_ca=nothing),
    }.items():
        with pytest.raises(SettingsError, match=words):
            server_tls(gateway)
