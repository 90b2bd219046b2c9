"""The few calls of the Kubernetes API that scaling needs, over HTTPS with the pod's own service account."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from shared.bus.interface import ServiceError
from shared.messages.requests import ErrorCode
from shared.runtime.settings import SettingsError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CALL_TIMEOUT_S = 4.0
"""Time limit of one call, from connecting to the last byte."""
MAX_MESSAGE_CHARACTERS = 300


class ApiServer:
    def __init__(self, url: str, namespace: str, token_file: Path, verify: ssl.SSLContext | bool = True) -> None:
        """The token is read again for each call: the kubelet renews it."""
        self.namespace = namespace
        self._token_file = token_file
        self._client = httpx.AsyncClient(base_url=url, verify=verify, timeout=CALL_TIMEOUT_S, trust_env=False)

    @classmethod
    def in_cluster(cls, folder: Path = SERVICE_ACCOUNT, environment: Mapping[str, str] | None = None) -> ApiServer:
        """The API server as a pod finds it. `SettingsError` outside of one."""
        environment = os.environ if environment is None else environment
        host = environment.get("KUBERNETES_SERVICE_HOST", "")
        port = environment.get("KUBERNETES_SERVICE_PORT", "443")
        try:
            namespace = (folder / "namespace").read_text().strip()
            (folder / "token").read_text()
            verify = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        except (OSError, ssl.SSLError) as error:
            raise SettingsError(
                f"TIDEWAY_SCALING_BACKEND=kubernetes needs the pod's service account in {folder}: {error}"
            ) from None
        if not host:
            raise SettingsError("TIDEWAY_SCALING_BACKEND=kubernetes needs KUBERNETES_SERVICE_HOST, which a pod has")
        host = f"[{host}]" if ":" in host else host
        return cls(f"https://{host}:{port}", namespace, folder / "token", verify)

    async def get(self, path: str) -> dict[str, Any]:
        """`path` below the server's root. `ServiceError`: GONE (404), CONFLICT (409), UNAVAILABLE, DEADLINE."""
        return await self._call("GET", path)

    async def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Patches by a JSON merge patch."""
        return await self._call("PATCH", path, body)

    async def close(self) -> None:
        await self._client.aclose()

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._token()}", "Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                response = await self._client.request(method, path, json=body, headers=headers)
        except (TimeoutError, httpx.TimeoutException):
            message = f"the API server did not answer {method} {path} within {CALL_TIMEOUT_S:g} s"
            raise ServiceError.of(ErrorCode.DEADLINE, message) from None
        except httpx.HTTPError as error:
            raise ServiceError.of(ErrorCode.UNAVAILABLE, f"the API server cannot be reached: {error}") from None
        return _answer(method, path, response)

    def _token(self) -> str:
        try:
            return self._token_file.read_text().strip()
        except OSError as error:
            raise ServiceError.of(ErrorCode.UNAVAILABLE, f"the service account's token is gone: {error}") from None


def _answer(method: str, path: str, response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        message = f"{method} {path}: HTTP {response.status_code} without a JSON object"
        raise ServiceError.of(ErrorCode.UNAVAILABLE, message)
    if response.is_success:
        return body
    said = str(body.get("message", ""))[:MAX_MESSAGE_CHARACTERS]
    message = f"the API server refused {method} {path} with {response.status_code}: {said}"
    match response.status_code:
        case 401 | 403:
            raise ServiceError.of(ErrorCode.UNAVAILABLE, f"{message} (the Role of placement's service account?)")
        case 404:
            raise ServiceError.of(ErrorCode.GONE, message)
        case 409:
            raise ServiceError.of(ErrorCode.CONFLICT, message)
        case 400 | 422:
            raise ServiceError.of(ErrorCode.BAD_REQUEST, message)
    raise ServiceError.of(ErrorCode.UNAVAILABLE, message, retry_after_s=1.0)
