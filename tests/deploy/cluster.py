"""What a cluster would be given: the chart's documents, and what follows from them for pods."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from tests.deploy.chart import EXAMPLES, Document, render

CLUSTERS: dict[str, Mapping[str, Any]] = {"default": {}, **EXAMPLES}
FIELD_PATHS = {
    "metadata.name": "{pod}",
    "metadata.uid": "6f1c5d3a-0d52-4a4b-9a37-7a0f4f0f1c11",
    "spec.nodeName": "node-a",
}


class Cluster:
    def __init__(self, documents: list[Document]) -> None:
        self.documents = documents
        self.workloads = {
            d["metadata"]["name"]: d
            for d in documents
            if d["kind"] in ("Deployment", "StatefulSet", "Job", "CronJob", "Pod")
        }

    def of_kind(self, kind: str) -> list[Document]:
        return [d for d in self.documents if d["kind"] == kind]

    def find(self, kind: str, name: str) -> Document:
        (found,) = [d for d in self.of_kind(kind) if d["metadata"]["name"] == name]
        return found

    def template(self, name: str) -> Document:
        workload = self.workloads[name]
        if workload["kind"] == "Pod":
            return workload
        spec = workload["spec"]
        return (spec["jobTemplate"]["spec"] if "jobTemplate" in spec else spec)["template"]  # type: ignore[no-any-return]

    def pod(self, name: str) -> Document:
        return self.template(name)["spec"]  # type: ignore[no-any-return]

    def container(self, name: str) -> Document:
        (only,) = self.pod(name)["containers"]
        return only  # type: ignore[no-any-return]

    def component(self, name: str) -> str:
        return self.template(name)["metadata"]["labels"]["app.kubernetes.io/component"]  # type: ignore[no-any-return]

    def of_component(self, component: str) -> list[str]:
        return [name for name in self.workloads if self.component(name) == component]

    def secrets(self, name: str) -> dict[str, str]:
        """Variable to key of the secret."""
        return {
            variable["name"]: variable["valueFrom"]["secretKeyRef"]["key"]
            for variable in self.container(name)["env"]
            if "secretKeyRef" in variable.get("valueFrom", {})
        }

    def environment(self, name: str) -> dict[str, str]:
        """Environment that the kubelet would make for the workload's first pod, each secret's value being its key; fails
        for a reference to something that is not there."""
        values: dict[str, str] = {}
        for source in self.container(name).get("envFrom", ()):
            values |= self.find("ConfigMap", source["configMapRef"]["name"])["data"]
        for variable in self.container(name)["env"]:
            origin = variable.get("valueFrom", {})
            if "secretKeyRef" in origin:
                values[variable["name"]] = origin["secretKeyRef"]["key"]
            elif "fieldRef" in origin:
                values[variable["name"]] = FIELD_PATHS[origin["fieldRef"]["fieldPath"]].format(pod=f"{name}-0")
            else:
                values[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda m: values[m[1]], variable["value"])
        assert all(isinstance(value, str) for value in values.values())
        return values

    def reaches(self, source: str, target: str, port: int) -> bool:
        """Whether the policies for what comes in let a pod of the workload `source` (else a namespace) reach this port."""
        names = {named["name"]: named["containerPort"] for named in self.container(target).get("ports", ())}
        rules = [
            rule
            for policy in self.of_kind("NetworkPolicy")
            if "Ingress" in policy["spec"]["policyTypes"] and self._selects(policy["spec"]["podSelector"], target)
            for rule in policy["spec"].get("ingress", ())
        ]

        def is_from(peer: Document) -> bool:
            if "namespaceSelector" in peer:
                return peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] == source  # type: ignore[no-any-return]
            return source in self.workloads and self._selects(peer["podSelector"], source)

        return any(
            all_or_one(rule.get("from"), is_from)
            and all_or_one(
                rule.get("ports"),
                lambda p: (first := names.get(p["port"], p["port"])) <= port <= p.get("endPort", first),
            )
            for rule in rules
        )

    def _selects(self, selector: Document, workload: str) -> bool:
        labels = self.template(workload)["metadata"]["labels"]
        return labels.items() >= selector.get("matchLabels", {}).items() and all(  # type: ignore[no-any-return]
            labels.get(expression["key"]) in expression["values"] for expression in selector.get("matchExpressions", ())
        )


def all_or_one(items: list[Document] | None, holds: Callable[[Document], bool]) -> bool:
    """A rule without a list holds for all."""
    return items is None or any(map(holds, items))


@functools.cache
def cluster(name: str) -> Cluster:
    return Cluster(render(CLUSTERS[name]))
