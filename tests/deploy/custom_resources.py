"""Custom resources that the chart makes, as far as it uses their fields, in JSON schemas of this project's own.

After the definitions of cert-manager 1.17, External Secrets 0.16, Gateway API 1.2 and its inference extension 1.0, KEDA 2.17
and the Prometheus operator 0.82, which no package for Python has.
"""

from __future__ import annotations

from typing import Any

import jsonschema

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
NUMBER: Schema = {"type": "integer"}
LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
DURATION: Schema = {"type": "string", "pattern": r"^([0-9]+(ms|s|m|h))+$"}


def of(required: Schema, optional: Schema | None = None) -> Schema:
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


def many(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


_RELABELING = of({"targetLabel": TEXT}, {"sourceLabels": many(TEXT), "replacement": TEXT})
_RULE = of({"alert": TEXT, "expr": TEXT, "labels": LABELS, "annotations": LABELS}, {"for": DURATION})
_TRIGGER = of({"type": TEXT, "metadata": LABELS}, {"metricType": one_of("AverageValue", "Value", "Utilization")})

SCHEMAS: dict[str, tuple[str, Schema]] = {
    "Certificate": (
        "cert-manager.io/v1",
        of(
            {"secretName": TEXT, "issuerRef": of({"name": TEXT}, {"kind": TEXT, "group": TEXT})},
            {"dnsNames": many(TEXT), "usages": many(TEXT), "duration": DURATION},
        ),
    ),
    "ExternalSecret": (
        "external-secrets.io/v1",
        of(
            {
                "secretStoreRef": of({"name": TEXT}, {"kind": one_of("SecretStore", "ClusterSecretStore")}),
                "data": many(of({"secretKey": TEXT, "remoteRef": of({"key": TEXT}, {"property": TEXT})})),
            },
            {
                "refreshInterval": DURATION,
                "target": of({"name": TEXT}, {"creationPolicy": one_of("Owner", "Orphan", "Merge", "None")}),
            },
        ),
    ),
    "HTTPRoute": (
        "gateway.networking.k8s.io/v1",
        of(
            {
                "parentRefs": many(of({"name": TEXT}, {"namespace": TEXT, "sectionName": TEXT, "port": NUMBER})),
                "rules": many(
                    of(
                        {"backendRefs": many(of({"name": TEXT}, {"group": TEXT, "kind": TEXT, "port": NUMBER}))},
                        {
                            "matches": many(of({"path": of({"type": TEXT, "value": TEXT})})),
                            "timeouts": of({}, {"request": DURATION, "backendRequest": DURATION}),
                        },
                    )
                ),
            },
            {"hostnames": many(TEXT)},
        ),
    ),
    "InferencePool": (
        "inference.networking.k8s.io/v1",
        of(
            {
                "selector": of({"matchLabels": LABELS}),
                "targetPorts": many(of({"number": NUMBER})),
                "endpointPickerRef": of(
                    {"name": TEXT},
                    {"port": of({"number": NUMBER}), "failureMode": one_of("FailOpen", "FailClose"), "group": TEXT},
                ),
            }
        ),
    ),
    "PodMonitor": (
        "monitoring.coreos.com/v1",
        of(
            {
                "selector": of({"matchLabels": LABELS}),
                "podMetricsEndpoints": many(
                    of({"port": TEXT}, {"interval": DURATION, "relabelings": many(_RELABELING)})
                ),
            }
        ),
    ),
    "PrometheusRule": ("monitoring.coreos.com/v1", of({"groups": many(of({"name": TEXT, "rules": many(_RULE)}))})),
    "ScaledObject": (
        "keda.sh/v1alpha1",
        of(
            {"scaleTargetRef": of({"name": TEXT}, {"apiVersion": TEXT, "kind": TEXT}), "triggers": many(_TRIGGER)},
            {
                "minReplicaCount": NUMBER,
                "maxReplicaCount": NUMBER,
                "cooldownPeriod": NUMBER,
                "fallback": of(
                    {"failureThreshold": NUMBER, "replicas": NUMBER},
                    {
                        "behavior": one_of(
                            "static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"
                        )
                    },
                ),
                # Its behaviour is that of an HPA.
                "advanced": of({"horizontalPodAutoscalerConfig": of({"behavior": {"type": "object"}})}),
            },
        ),
    ),
}


def check(document: dict[str, Any]) -> None:
    """Raises `jsonschema.ValidationError`."""
    version, spec = SCHEMAS[document["kind"]]
    whole = of({"apiVersion": one_of(version), "kind": TEXT, "metadata": {"type": "object"}, "spec": spec})
    jsonschema.validate(document, whole)
