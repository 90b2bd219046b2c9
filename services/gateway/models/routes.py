"""Routes as this gateway has them: a live view of their bucket, and which model answers a request. The choice itself is
`shared.policies.routing`'s."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from services.gateway.http.errors import ApiError
from services.gateway.models.catalog import CHANGE_S, Catalog
from shared.bus.interface import Bus, KeyValue, Watch
from shared.messages.catalogue import ROUTES
from shared.messages.channels import bucket_key
from shared.messages.routes import Route
from shared.policies.routing import Role, choose, key_of
from shared.runtime.tasks import true_within


class Routed(NamedTuple):
    """Who answers a request."""

    model: str
    route: Route | None = None
    """None: the request names a model."""
    role: Role = Role.ARM


class Routes:
    def __init__(self, bus: Bus, catalog: Catalog) -> None:
        self._bus = bus
        self._catalog = catalog
        self._stored: KeyValue[Route]
        self._watch: Watch[Route] | None = None
        self._changed = asyncio.Event()

    async def start(self) -> None:
        self._stored = await self._bus.key_value(ROUTES)
        self._watch = await self._stored.watch(lambda *_: self._changed.set())

    async def stop(self) -> None:
        if self._watch is not None:
            await self._watch.stop()

    def all(self) -> list[Route]:
        """By name."""
        return [] if self._watch is None else sorted(self._watch.entries.values(), key=lambda route: route.name)

    def get(self, name: str) -> Route | None:
        return None if self._watch is None else self._watch.entries.get(bucket_key(name))

    def resolve(self, name: str, tenant: str, user: str | None, request_id: str) -> Routed:
        """`name`: of a route or, where there is none, of a model; empty: the only model. `request_id`: whatever is drawn
        anew by each request. Raises `ApiError` 400 where `name` is empty and there are several models."""
        name = name or self._catalog.spec(None).name
        route = self.get(name)
        if route is None:
            return Routed(name)
        chosen = choose(route, key_of(route, tenant, user, request_id), self._catalog.is_available)
        return Routed(chosen.model, route, chosen.role)

    def model_of(self, name: str) -> str:
        """The model whose tokenizer and limits stand for the route's."""
        return self.resolve(name, "", None, "").model

    async def put(self, route: Route) -> None:
        """Returns when it holds here. Raises `ApiError` where a model is not there, `BusError`."""
        models = [("arms", arm.model) for arm in route.arms]
        models += [("mirrors", mirror.model) for mirror in route.mirrors]
        models += [("fallbacks", model) for model in route.fallbacks]
        for field, model in models:
            if not self._catalog.has(model):
                self._catalog.check_seen(f"Whether the model '{model[:200]}' exists is not known now", field)
                known = ", ".join(map(repr, self._catalog.names)) or "none"
                message = f"There is no model '{model[:200]}'; a route leads to models, and those there are: {known}."
                raise ApiError(400, message, param=field, code="model_not_found")
        await self._stored.put(bucket_key(route.name), route)
        await true_within(lambda: self.get(route.name) == route, self._changed, CHANGE_S)

    async def delete(self, name: str) -> None:
        """Deletes a route. Raises `ApiError` 404, `BusError`."""
        if await self._stored.get(bucket_key(name)) is None:
            raise ApiError(404, f"There is no route '{name[:200]}'.", param="name", code="route_not_found")
        await self._stored.delete(bucket_key(name))
        await true_within(lambda: self.get(name) is None, self._changed, CHANGE_S)
