"""Admission: checks API keys, their limits, and the gateway's own bound on requests in flight.

Decisions take the time as an argument (seconds on any monotonic clock).
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import logging
import os
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from services.gateway.http.errors import ApiError, invalid
from services.gateway.metrics import GatewayMetrics
from shared.messages.requests import Priority, RequestClass, TenantWeight
from shared.messages.tenants import KeyUses
from shared.runtime.settings import GatewaySettings, SettingsError

WINDOW_S = 60.0
RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)
"""OpenAI's names. Requests are those in flight, so there is no time at which they reset."""

WORKING_FOR: ContextVar[str] = ContextVar("working_for", default="")
"""Id of the tenant for whom the current task works."""


class TokenWindow:
    """Tokens of the last minute, counted in buckets of a second: those used here, and by other gateways as far as known."""

    def __init__(self) -> None:
        self._buckets: deque[list[float]] = deque()
        self._total = 0
        self._others: list[tuple[float, int]] = []
        """By the second."""

    def add(self, num_tokens: int, now: float) -> None:
        self._expire(now)
        second = float(int(now))
        if self._buckets and self._buckets[-1][0] == second:
            self._buckets[-1][1] += num_tokens
        else:
            self._buckets.append([second, num_tokens])
        self._total += num_tokens

    def take_back(self, num_tokens: int, added_at: float) -> None:
        """Takes back what `add` returned at that time, if it is still in the window."""
        second = float(int(added_at))
        for bucket in self._buckets:
            if bucket[0] == second:
                bucket[1] -= num_tokens
                self._total -= num_tokens

    def own(self, now: float) -> list[tuple[float, int]]:
        """Tokens used here, by the second."""
        self._expire(now)
        return [(second, int(num_tokens)) for second, num_tokens in self._buckets if num_tokens]

    def set_others(self, buckets: list[tuple[float, int]]) -> None:
        """Tokens used elsewhere, by the second on this clock, in place of those known before."""
        self._others = sorted(buckets)

    def total(self, now: float) -> int:
        self._expire(now)
        return self._total + sum(num_tokens for second, num_tokens in self._others if second > now - WINDOW_S)

    def seconds_until_below(self, limit: int, now: float) -> float:
        """How long until no more than `limit` tokens are left in the window, if none are added."""
        total, wait_s = self.total(now), 0.0
        others = (bucket for bucket in self._others if bucket[0] > now - WINDOW_S)
        for second, num_tokens in heapq.merge(self.own(now), others):
            if total <= limit:
                break
            total -= int(num_tokens)
            wait_s = second + WINDOW_S - now
        return max(0.0, wait_s)

    def _expire(self, now: float) -> None:
        while self._buckets and self._buckets[0][0] <= now - WINDOW_S:
            self._total -= int(self._buckets.popleft()[1])


_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ANY_TENANT = "*"
NAMED = "@"
"""Before the name of a tenant that has one, in the ids under which its files are stored."""
MAX_PROXIED = 4096
"""Tenants of proxies whose use of tokens is remembered."""


class TenantPolicy:
    """Weights of tenants, and who of them shares cached prefixes, from the settings."""

    def __init__(self, settings: GatewaySettings | None = None) -> None:
        """Raises `SettingsError`."""
        settings = settings or GatewaySettings()
        self.header, self.trusts_header = settings.tenant_header.lower(), settings.trust_tenant_header
        self._weights: dict[str, float] = {}
        for entry in filter(None, map(str.strip, settings.tenant_weights.split(","))):
            name, _, text = entry.partition("=")
            try:
                self._weights[checked_tenant(name.strip())] = msgspec.convert(text, TenantWeight, strict=False)
            except (ValueError, msgspec.ValidationError):
                raise SettingsError(
                    f"TIDEWAY_TENANT_WEIGHTS: {entry!r}: expected tenant=weight with a weight from 0.001 to 1000"
                ) from None
        self._sharing = set(filter(None, map(str.strip, settings.shared_prefixes.split(","))))

    @property
    def weighted(self) -> set[str]:
        """Tenants with a weight of their own."""
        return set(self._weights)

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def salt(self, tenant: str, chosen: str = "") -> str:
        """Salt of the cached prefixes of its requests; `chosen`: what the client wants them salted with besides."""
        salt = "" if self._sharing & {ANY_TENANT, tenant} else tenant
        if not chosen:
            return salt
        # As long whatever the client sends, and no tenant's: their names have no colon.
        return ":" + hashlib.blake2b(f"{salt}:{chosen}".encode(), digest_size=24).hexdigest()


def checked_tenant(name: str) -> str:
    """Raises `ValueError`."""
    if not _TENANT.fullmatch(name):
        raise ValueError("a tenant's name has 1 to 64 letters, digits, dots, dashes and underscores, no sign first")
    return name


def name_of(tenant: str) -> str:
    """The part of a tenant's id that is shown and travels with its requests."""
    if tenant.startswith(NAMED):
        return tenant.removeprefix(NAMED)
    return f"key-{tenant[:8]}" if tenant else ""


class Key:
    """An API key's limits (None: none) and use."""

    def __init__(
        self,
        max_in_flight: int | None = None,
        tokens_per_minute: int | None = None,
        may_be_high: bool = True,
        tenant_name: str = "",
    ) -> None:
        self.tenant_name = tenant_name
        """Tenant as configured. Empty: the key's own; `ANY_TENANT`: the one that a header names."""
        self.tenant = ""
        """Whose files and batches this key sees; empty where no keys are configured."""
        self.use_id = ""
        """Under which gateways tell each other its use."""
        self.max_in_flight = max_in_flight
        self.tokens_per_minute = tokens_per_minute
        self.may_be_high = may_be_high
        """Whether its requests may ask for high priority."""
        self.num_in_flight = dict.fromkeys(RequestClass, 0)
        """Calls of each class here; the limit is for each."""
        self.num_in_flight_elsewhere = dict.fromkeys(RequestClass, 0)
        """Requests in flight at other gateways, as far as known."""
        self.window = TokenWindow()

    @property
    def has_limits(self) -> bool:
        return self.max_in_flight is not None or self.tokens_per_minute is not None

    def is_used(self, now: float) -> bool:
        """Whether it has anything in flight here, or had tokens in the last minute."""
        return any(self.num_in_flight.values()) or bool(self.window.own(now))

    def enter(self, request_class: RequestClass) -> None:
        """A call is in flight from now on. Raises `ApiError` 429 where it would be one too many."""
        num_in_flight = self.num_in_flight[request_class] + self.num_in_flight_elsewhere[request_class]
        if self.max_in_flight is not None and num_in_flight >= self.max_in_flight:
            raise _too_many(
                f"The limit of this API key is {self.max_in_flight} requests in flight.", "rate_limit_exceeded", 1.0
            )
        self.num_in_flight[request_class] += 1

    def leave(self, request_class: RequestClass) -> None:
        self.num_in_flight[request_class] -= 1

    def charge_prompt(self, num_tokens: int, now: float) -> None:
        """Raises `ApiError` 429 where the tokens per minute are used up, or the prompt would exceed them."""
        limit = self.tokens_per_minute
        if limit is None:
            return
        if num_tokens > limit:
            raise invalid(
                "prompt", f"The prompt has {num_tokens} tokens; this API key may use {limit} tokens per minute at most."
            )
        used = self.window.total(now)
        if used + num_tokens > limit:
            raise _too_many(
                f"The limit of this API key is {limit} tokens per minute: {used} were used, the prompt has {num_tokens}.",
                "rate_limit_exceeded",
                max(1.0, self.window.seconds_until_below(max(0, limit - num_tokens), now)),
            )
        self.window.add(num_tokens, now)

    def fitted_output(self, num_prompt_tokens: int, num_sequences: int, max_tokens: int, fixed_by: str) -> int:
        """The most tokens that each output of one request may have: `max_tokens`, or what the tokens per minute leave.
        `fixed_by`: the field with which the client fixed how many there are, or what; empty: it did not. Raises `ApiError`
        400 where these exceed the tokens per minute by themselves."""
        limit = self.tokens_per_minute
        if limit is None or num_prompt_tokens + num_sequences * max_tokens <= limit:
            return max_tokens
        if not fixed_by:
            return max(1, (limit - num_prompt_tokens) // num_sequences)
        outputs = (
            f"an output of up to {max_tokens}"
            if num_sequences == 1
            else f"{num_sequences} outputs of up to {max_tokens}"
        )
        raise invalid(
            fixed_by,
            f"The request has {num_prompt_tokens} tokens of prompts and {outputs}; this API key may use {limit} tokens per "
            "minute at most.",
        )

    def charge_output(self, num_tokens: int, now: float) -> None:
        if self.tokens_per_minute is not None:
            self.window.add(num_tokens, now)

    def rate_limits(self, request_class: RequestClass, now: float) -> dict[str, str]:
        """`RATE_LIMIT_HEADERS`, of the limits that the key has."""
        found = {}
        if self.max_in_flight is not None:
            found["x-ratelimit-limit-requests"] = str(self.max_in_flight)
            remaining = self.max_in_flight - self.num_in_flight[request_class]
            remaining -= self.num_in_flight_elsewhere[request_class]
            found["x-ratelimit-remaining-requests"] = str(max(0, remaining))
        if (limit := self.tokens_per_minute) is not None:
            found["x-ratelimit-limit-tokens"] = str(limit)
            found["x-ratelimit-remaining-tokens"] = str(max(0, limit - self.window.total(now)))
            found["x-ratelimit-reset-tokens"] = f"{self.window.seconds_until_below(0, now):.3g}s"
        return found


def named_tenants(keys: Mapping[str, Key]) -> list[str]:
    """Names of the tenants of keys, but for those that proxies name."""
    return [
        key.tenant_name or name_of(_digest(text).hex()) for text, key in keys.items() if key.tenant_name != ANY_TENANT
    ]


class Claim(ABC):
    """What a call asks of its key's limits: `take` raises `ApiError` 429, `give_back` undoes it."""

    @abstractmethod
    def take(self, now: float) -> None: ...

    @abstractmethod
    def give_back(self) -> None: ...


class InFlight(Claim):
    """One call of a class."""

    def __init__(self, key: Key, request_class: RequestClass) -> None:
        self._key, self._class = key, request_class

    def take(self, now: float) -> None:
        self._key.enter(self._class)

    def give_back(self) -> None:
        self._key.leave(self._class)


class PromptTokens(Claim):
    """Tokens of a prompt."""

    def __init__(self, key: Key, num_tokens: int) -> None:
        self._key, self._num_tokens = key, num_tokens
        self._taken_at = 0.0

    def take(self, now: float) -> None:
        self._key.charge_prompt(self._num_tokens, now)
        self._taken_at = now

    def give_back(self) -> None:
        self._key.window.take_back(self._num_tokens, self._taken_at)


class Uses(Protocol):
    """Counts of the use of keys (`LocalUses`, or key_uses.py over all gateways)."""

    async def claim(self, key: Key, claim: Claim, now: float) -> None:
        """Takes it. Raises `ApiError` 429 where the key's limits leave no room."""

    def note(self, key: Key, *, soon: bool = False) -> None:
        """The key's use here has changed otherwise. `soon`: others may wait for what was given back."""

    async def all(self) -> dict[str, KeyUses]:
        """Uses of keys with limits that are in use, by `Key.use_id`. Raises `BusError`."""


class LocalUses:
    """Keys whose limits hold in this process alone."""

    async def claim(self, key: Key, claim: Claim, now: float) -> None:
        claim.take(now)

    def note(self, key: Key, *, soon: bool = False) -> None:
        pass

    async def all(self) -> dict[str, KeyUses]:
        return {}


class PromptCharge:
    """The prompt of one batch line, which counts once against the tokens per minute of its key, however often the line is
    tried."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._num_tokens = 0
        """0: not known before it was tokenised."""
        self._is_charged = False

    async def charge(self, key: Key, num_tokens: int, now: float) -> None:
        """Charges the prompt as `Admission.charge_prompt` does."""
        self._num_tokens = num_tokens
        if not self._is_charged:
            await self._admission.charge_prompt(key, num_tokens, now)
            self._is_charged = True

    async def wait_s(self, key: Key, now: float) -> float:
        """How long it is of no use to try the line. 0: now; a prompt whose length is known is charged then."""
        limit, num_tokens = key.tokens_per_minute, max(1, self._num_tokens)
        if limit is None or self._is_charged or num_tokens > limit:
            return 0.0
        wait_s = key.window.seconds_until_below(limit - num_tokens, now)
        if wait_s or not self._num_tokens:
            return wait_s
        try:
            await self.charge(key, num_tokens, now)
        except ApiError as error:  # other gateways used more than was known
            return error.retry_after_s or 1.0
        return 0.0


class AdminRole(StrEnum):
    READ = "read"
    """What is there, and nothing else."""
    OPERATE = "operate"


@dataclass(frozen=True)
class AdminKey:
    name: str
    """Who acts, in the audit log."""
    role: AdminRole


ANYBODY = AdminKey("anybody", AdminRole.OPERATE)


def _too_many(message: str, code: str, retry_after_s: float) -> ApiError:
    return ApiError(429, message, type="rate_limit_error", code=code, retry_after_s=retry_after_s)


class Ticket:
    """The right of one call to be in flight."""

    def __init__(self, admission: Admission, key: Key, num_sequences: int, request_class: RequestClass) -> None:
        self._admission = admission
        self._key = key
        self._num_sequences = num_sequences
        self._class = request_class
        self._released = False

    def release(self) -> None:
        """May be called twice."""
        if not self._released:
            self._released = True
            self._key.leave(self._class)
            self._admission.uses.note(self._key, soon=True)
            self._admission.num_in_flight[self._class] -= self._num_sequences


class Admission:
    def __init__(
        self,
        keys: dict[str, Key],
        admin_keys: dict[str, AdminKey],
        max_in_flight: int,
        tenants: TenantPolicy | None = None,
        uses: Uses | None = None,
    ) -> None:
        """`max_in_flight`: sequences over all calls of a class, so that work that may wait turns nobody away who may
        not. `uses`: where those of keys are counted; None: here."""
        self.uses = uses or LocalUses()
        self.tenants = tenants or TenantPolicy()
        self._keys: dict[bytes, Key] = {}
        self._by_digest: dict[bytes, Key] = {}
        self._by_tenant: dict[str, Key] = {}
        """Those that were taken away too: their batches go on within their limits."""
        self._of_proxies: dict[str, Key] = {}
        """By proxy and tenant, the last used last."""
        self._admin_keys: dict[bytes, AdminKey] = {}
        self.set_keys(keys)
        self.set_admin_keys(admin_keys)
        self._anybody = Key()
        self.max_in_flight = max_in_flight
        self.num_in_flight = dict.fromkeys(RequestClass, 0)

    def set_keys(self, keys: dict[str, Key]) -> None:
        """Replaces the keys. For keys that stay, calls in flight and used tokens continue to count."""
        self._keys = {}
        for text, limits in keys.items():
            digest = _digest(text)
            has_name = limits.tenant_name not in ("", ANY_TENANT)
            tenant = NAMED + limits.tenant_name if has_name else digest.hex()[:32]
            key = self._keys[digest] = self._by_digest.setdefault(digest, limits)
            self._by_tenant[tenant] = key
            key.max_in_flight, key.tokens_per_minute = limits.max_in_flight, limits.tokens_per_minute
            key.may_be_high, key.tenant, key.tenant_name = limits.may_be_high, tenant, limits.tenant_name
            key.use_id = digest.hex()[:32]

    def set_admin_keys(self, admin_keys: dict[str, AdminKey]) -> None:
        """In place of those there were."""
        self._admin_keys = {_digest(text): admin for text, admin in admin_keys.items()}

    @property
    def has_admin_keys(self) -> bool:
        return bool(self._admin_keys)

    def key_of(self, tenant: str) -> Key:
        """The key of a tenant; one without limits where this process has never had it."""
        found = self._by_tenant.get(tenant)
        if found is None:
            found = Key()
            found.tenant = tenant
        return found

    def limited_keys(self) -> dict[str, KeyUses]:
        """Those that are configured with limits, by `Key.use_id`, as if nobody used them; those of proxies, who have the
        limits for each of their tenants, are left out."""
        return {
            key.use_id: KeyUses(name_of(key.tenant), {}, key.max_in_flight, key.tokens_per_minute)
            for key in self._keys.values()
            if key.has_limits and key.tenant_name != ANY_TENANT
        }

    def tenant_names(self) -> set[str]:
        """Tenants of keys, and those with a weight of their own."""
        keys = (key for key in self._keys.values() if key.tenant_name != ANY_TENANT)
        return {name_of(key.tenant) for key in keys} | self.tenants.weighted

    @property
    def is_open(self) -> bool:
        return not self._keys

    def authenticate(self, headers: Mapping[str, str]) -> Key:
        """The key in an Authorization header, for which this task works from then on (`WORKING_FOR`); of a trusted proxy's,
        the tenant that it names, each of which has the key's limits for itself. Raises `ApiError` 401, 403 where somebody
        else names a tenant, 400 where it is no name."""
        key = self._key_of(headers)
        WORKING_FOR.set(key.tenant)
        return key

    def _key_of(self, headers: Mapping[str, str]) -> Key:
        key = self._anybody
        if self._keys:
            found = self._keys.get(_digest(_bearer(headers.get("authorization"))))
            if found is None:
                raise _unauthorized("API key")
            key = found
        name = headers.get(self.tenants.header)
        if name is None:
            return key
        is_trusted = key.tenant_name == ANY_TENANT if self._keys else self.tenants.trusts_header
        if not is_trusted:
            message = f"The header {self.tenants.header} is for trusted proxies: this API key may name no tenant."
            raise ApiError(403, message, param=self.tenants.header, code="tenant_not_allowed")
        try:
            return self._proxied(key, NAMED + checked_tenant(name))
        except ValueError as error:
            raise invalid(self.tenants.header, f"The header {self.tenants.header}: {error}.") from None

    def _proxied(self, proxy: Key, tenant: str) -> Key:
        name = f"{proxy.tenant} {tenant}"
        key = self._of_proxies.pop(name, None) or Key()
        key.max_in_flight, key.tokens_per_minute = proxy.max_in_flight, proxy.tokens_per_minute
        key.may_be_high, key.tenant = proxy.may_be_high, tenant
        key.use_id = _digest(f"{proxy.use_id} {tenant}").hex()[:32]
        self._of_proxies[name] = key
        self._by_tenant.setdefault(tenant, key)
        if len(self._of_proxies) > MAX_PROXIED:
            idle = next((other for other, of in self._of_proxies.items() if not any(of.num_in_flight.values())), name)
            gone = self._of_proxies.pop(idle)
            if self._by_tenant.get(gone.tenant) is gone:
                del self._by_tenant[gone.tenant]
        return key

    def authenticate_admin(self, authorization: str | None) -> AdminKey:
        """Raises `ApiError` 401, or 403 where the admin API is closed."""
        if not self._admin_keys:
            if self._keys:
                raise ApiError(
                    403,
                    "The admin API is closed: API keys are configured, but no admin key (TIDEWAY_ADMIN_API_KEY).",
                    code="admin_closed",
                )
            return ANYBODY
        admin = self._admin_keys.get(_digest(_bearer(authorization)))
        if admin is None:
            raise _unauthorized("admin API key")
        return admin

    async def enter(
        self,
        key: Key,
        num_sequences: int,
        request_class: RequestClass,
        priority: Priority = Priority.NORMAL,
        now: float = 0.0,
    ) -> Ticket:
        """Raises `ApiError` 429, or 403 where the key is not for that priority."""
        if priority is Priority.HIGH and not key.may_be_high:
            raise ApiError(
                403, "This API key may not ask for high priority.", param="priority", code="priority_not_allowed"
            )
        num_in_flight = self.num_in_flight[request_class]
        if num_in_flight + num_sequences > self.max_in_flight:
            raise _too_many(
                f"The server has {num_in_flight} {request_class.value} sequences in flight; the limit is "
                f"{self.max_in_flight}.",
                "overloaded",
                1.0,
            )
        self.num_in_flight[request_class] += num_sequences
        try:
            await self.uses.claim(key, InFlight(key, request_class), now)
        except BaseException:
            self.num_in_flight[request_class] -= num_sequences
            raise
        return Ticket(self, key, num_sequences, request_class)

    async def charge_prompt(self, key: Key, num_tokens: int, now: float) -> PromptTokens | None:
        """What was charged; None: the key's tokens are not limited. Raises `ApiError` 429 where the tokens per minute are
        used up, or the prompt would exceed them."""
        if key.tokens_per_minute is None:
            return None
        charged = PromptTokens(key, num_tokens)
        await self.uses.claim(key, charged, now)
        return charged

    def give_back(self, key: Key, charged: PromptTokens) -> None:
        """Gives back the tokens of a prompt that is not computed."""
        charged.give_back()
        self.uses.note(key, soon=True)

    def charge_output(self, key: Key, num_tokens: int, now: float) -> None:
        if key.tokens_per_minute is not None:
            key.charge_output(num_tokens, now)
            self.uses.note(key)


def _digest(key: str) -> bytes:
    # Looking up digests takes no time that tells how much of a guess was right.
    return hashlib.sha256(key.encode()).digest()


def _bearer(authorization: str | None) -> str:
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _unauthorized(what: str) -> ApiError:
    return ApiError(401, f"Missing or incorrect {what} (Authorization: Bearer ...).", code="invalid_api_key")


def _parse_key(entry: str, source: str) -> tuple[str, Key]:
    key, *limits = entry.split(":")
    tenant = limits.pop() if len(limits) == 4 else ""
    priority = limits.pop() if len(limits) == 3 else ""
    try:
        numbers = [int(limit) if limit else None for limit in limits]
    except ValueError:
        numbers = [-1]
    is_wrong = len(numbers) > 2 or any(number is not None and number < 1 for number in numbers)
    is_wrong = is_wrong or (tenant not in ("", ANY_TENANT) and not _TENANT.fullmatch(tenant))
    if not key or is_wrong or priority not in ("", *Priority):
        # The entry itself is a secret and is not shown.
        raise SettingsError(
            f"{source}: expected key[:max_in_flight[:tokens_per_minute[:priority[:tenant]]]] with limits from 1, the "
            "priority high or normal, and as tenant a name of 1 to 64 letters, digits, dots, dashes and underscores, or * "
            "for a trusted proxy."
        )
    numbers += [None] * (2 - len(numbers))
    return key, Key(numbers[0], numbers[1], priority != Priority.NORMAL, tenant)


def read_admin_keys(settings: GatewaySettings) -> dict[str, AdminKey]:
    """Raises `SettingsError`."""
    admins = {settings.admin_api_key: AdminKey("admin", AdminRole.OPERATE)} if settings.admin_api_key else {}
    for entry, source in _lines(settings.admin_keys_file, "TIDEWAY_ADMIN_KEYS_FILE"):
        name, role, key = [*entry.split(":"), "", ""][:3]
        if entry.count(":") != 2 or not name or not key or role not in tuple(AdminRole):
            raise SettingsError(f"{source}: expected name:role:key with the role read or operate.")
        admins[key] = AdminKey(name, AdminRole(role))
    if settings.admin_keys_file and not admins:
        raise SettingsError(f"TIDEWAY_ADMIN_KEYS_FILE={settings.admin_keys_file!r} holds no key.")
    return admins


def _lines(file: str, variable: str) -> list[tuple[str, str]]:
    """Those of a file of keys, each with where it stands. Raises `SettingsError`."""
    if not file:
        return []
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{variable}={file!r} cannot be read: {error}") from None
    lines = [(line.partition("#")[0].strip(), f"{file}:{number}") for number, line in enumerate(text.splitlines(), 1)]
    return [(entry, source) for entry, source in lines if entry]


def read_keys(settings: GatewaySettings) -> dict[str, Key]:
    """Raises `SettingsError`."""
    entries = [(entry.strip(), "TIDEWAY_API_KEYS") for entry in settings.api_keys.split(",") if entry.strip()]
    entries += _lines(settings.api_keys_file, "TIDEWAY_API_KEYS_FILE")
    if settings.api_keys_file and not entries:
        # Else a secret that was not mounted would open the API to everybody.
        raise SettingsError(f"TIDEWAY_API_KEYS_FILE={settings.api_keys_file!r} holds no key.")
    return dict(_parse_key(entry, source) for entry, source in entries)


logger = logging.getLogger(__name__)

T = TypeVar("T")

FILES_INTERVAL_S = 1.0
"""Interval at which the files of keys are looked at."""


class KeyFiles:
    """Key files, read again when they change. A file that cannot be used is reported, and the previous keys stay."""

    def __init__(self, settings: GatewaySettings, admission: Admission, metrics: GatewayMetrics) -> None:
        """The keys in `admission` are those of the files now."""
        self._settings = settings
        self._admission = admission
        self._metrics = metrics
        self._seen = self._marks()

    async def watch_forever(self) -> None:
        while True:
            await asyncio.sleep(FILES_INTERVAL_S)
            marks, seen = await asyncio.to_thread(self._marks), self._seen
            self._seen = marks
            if marks[0] != seen[0]:
                await self._replace("API keys", read_keys, self._admission.set_keys)
            if marks[1] != seen[1]:
                await self._replace("admin keys", read_admin_keys, self._admission.set_admin_keys)

    def _marks(self) -> list[tuple[int, int, int] | None]:
        """What changes with a file; None: it is not there."""
        marks: list[tuple[int, int, int] | None] = []
        for name in (self._settings.api_keys_file, self._settings.admin_keys_file):
            try:
                found = os.stat(name)
            except OSError:
                marks.append(None)
            else:
                marks.append((found.st_ino, found.st_size, found.st_mtime_ns))
        return marks

    async def _replace(
        self, kind: str, read: Callable[[GatewaySettings], dict[str, T]], put: Callable[[dict[str, T]], None]
    ) -> None:
        try:
            keys = await asyncio.to_thread(read, self._settings)
        except SettingsError as error:
            logger.error("the %s stay as they were: %s", kind, error)
            self._metrics.key_reloads.labels("refused").inc()
            return
        put(keys)
        self._metrics.key_reloads.labels("read").inc()
        logger.info("the %s were read again: %d", kind, len(keys))
