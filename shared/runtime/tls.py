"""TLS from the settings: to NATS as a client, over HTTP as a server; and what needs none."""

from __future__ import annotations

import ipaddress
import ssl

from shared.runtime.settings import BusSettings, GatewaySettings, SettingsError


def client_tls(settings: BusSettings) -> ssl.SSLContext | None:
    """TLS for NATS; None where no setting asks for TLS (a URL `tls://` alone takes the system's CAs). Raises
    `SettingsError`."""
    if not (settings.nats_tls_ca or settings.nats_tls_cert or settings.nats_tls_key):
        return None
    context = ssl.create_default_context()
    if settings.nats_tls_ca:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _trust(context, settings.nats_tls_ca, "TIDEWAY_NATS_TLS_CA")
    _show(context, settings.nats_tls_cert, settings.nats_tls_key, "TIDEWAY_NATS_TLS")
    return context


def server_tls(settings: GatewaySettings) -> ssl.SSLContext | None:
    """TLS for HTTP; None where it is served without TLS. Raises `SettingsError`."""
    if not (settings.tls_cert or settings.tls_key or settings.tls_client_ca):
        return None
    if not settings.tls_cert:
        raise SettingsError("TIDEWAY_TLS_KEY and TIDEWAY_TLS_CLIENT_CA need TIDEWAY_TLS_CERT")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _show(context, settings.tls_cert, settings.tls_key, "TIDEWAY_TLS")
    if settings.tls_client_ca:
        _trust(context, settings.tls_client_ca, "TIDEWAY_TLS_CLIENT_CA")
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def own_server_tls(settings: GatewaySettings) -> ssl.SSLContext:
    """TLS for a look at the server with these settings from the same machine: whether it answers, whoever it is known as.
    Its own certificate is shown where clients must show one. Raises `SettingsError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _show(context, settings.tls_cert, settings.tls_key, "TIDEWAY_TLS")
    return context


def _trust(context: ssl.SSLContext, path: str, variable: str) -> None:
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise SettingsError(f"{variable}={path!r} cannot be read: {error}") from None


def _show(context: ssl.SSLContext, cert: str, key: str, variables: str) -> None:
    if not cert:
        if key:
            raise SettingsError(f"{variables}_KEY needs {variables}_CERT")
        return
    try:
        context.load_cert_chain(cert, key or None, password="")
    except OSError as error:
        files = f"{variables}_CERT={cert!r}" + (f", {variables}_KEY={key!r}" if key else "")
        raise SettingsError(f"{files}: no certificate with its key ({error})") from None


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
