"""Objects against Kubernetes' OpenAPI, and those of the Prometheus operator against what is documented of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import kubernetes_validate
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from kubernetes_validate import utils
from referencing import Registry, Resource

from .chart import Object

OLDEST = "1.30"
"""What Chart.yaml asks for."""


def _object(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": required or [],
    }


_TEXT: dict[str, Any] = {"type": "string"}
_LABELS: dict[str, Any] = {"type": "object", "additionalProperties": _TEXT}
_DURATION: dict[str, Any] = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h|d|w|y))+$"}
_META = _object(
    {"name": _TEXT, "namespace": _TEXT, "labels": _LABELS, "annotations": _LABELS}, ["name", "namespace", "labels"]
)
_KEY = _object({"name": _TEXT, "key": _TEXT, "optional": {"type": "boolean"}}, ["key"])


def _custom(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    head = {"apiVersion": {"const": "monitoring.coreos.com/v1"}, "kind": {"const": kind}}
    return _object({**head, "metadata": _META, "spec": spec}, ["apiVersion", "kind", "metadata", "spec"])


OPERATOR = {
    "ServiceMonitor": _custom(
        "ServiceMonitor",
        _object(
            {
                "jobLabel": _TEXT,
                "selector": _object({"matchLabels": _LABELS}),
                "endpoints": {
                    "type": "array",
                    "minItems": 1,
                    "items": _object(
                        {
                            "port": _TEXT,
                            "path": _TEXT,
                            "scheme": {"enum": ["http", "https", "HTTP", "HTTPS"]},
                            "interval": _DURATION,
                            "scrapeTimeout": _DURATION,
                            "honorLabels": {"type": "boolean"},
                            "authorization": _object({"type": _TEXT, "credentials": _KEY}),
                        },
                        ["port"],
                    ),
                },
            },
            ["selector", "endpoints"],
        ),
    ),
    "PrometheusRule": _custom(
        "PrometheusRule",
        _object(
            {
                "groups": {
                    "type": "array",
                    "items": _object(
                        {
                            "name": {"type": "string", "minLength": 1},
                            "interval": _DURATION,
                            "rules": {
                                "type": "array",
                                "items": _object(
                                    {
                                        "alert": _TEXT,
                                        "record": _TEXT,
                                        "expr": {"type": ["string", "integer"]},
                                        "for": _DURATION,
                                        "keep_firing_for": _DURATION,
                                        "labels": _LABELS,
                                        "annotations": _LABELS,
                                    },
                                    ["expr"],
                                ),
                            },
                        },
                        ["name"],
                    ),
                }
            },
            ["groups"],
        ),
    ),
}
"""The fields that may be there, of those in the operator's API reference: no more than the chart could need."""


@cache
def _definitions(folder: str) -> Registry:
    contents = utils.schema_contents(f"kubernetes-json-schema/{folder}/_definitions.json", folder)
    return Resource.from_contents(contents) @ Registry()


@cache
def _validator(kind: str, api: str, version: str) -> Draft202012Validator:
    """As `kubernetes_validate.validate` makes it with ``strict=True``, but once for each kind."""
    folder = f"v{version}.0-local-strict"
    schema = utils.schema_contents(f"kubernetes-json-schema/{folder}/{kind.lower()}-{api}.json", folder)
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ _definitions(folder))


def faults(found: Object, version: str) -> list[str]:
    """What the schema of that version of Kubernetes says against an object; unknown fields are faults."""
    group, _, api = found["apiVersion"].rpartition("/")
    if group == "monitoring.coreos.com":
        validator = validator_for(OPERATOR[found["kind"]])(OPERATOR[found["kind"]])
    else:
        short = group.partition(".")[0]
        validator = _validator(found["kind"], f"{short}-{api}" if short else api, version)
    return [f"{'.'.join(map(str, error.path))}: {error.message[:300]}" for error in validator.iter_errors(found)]


def newest() -> str:
    return str(kubernetes_validate.latest_version()).rpartition(".")[0]
