"""KEDA's objects against its own definitions, without unknown fields, which a cluster would drop."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parent / "keda"


@cache
def schema_of(kind: str) -> dict[str, Any]:
    definition = yaml.safe_load((FOLDER / f"{kind.lower()}s.yaml").read_text())["spec"]
    assert definition["names"]["kind"] == kind
    [version] = definition["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    _close(schema)
    del schema["properties"]["metadata"]["additionalProperties"]
    return schema


def _close(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") == "object" and "additionalProperties" not in schema:
            schema["additionalProperties"] = schema.get(
                "x-kubernetes-preserve-unknown-fields", False
            )
        for each in schema.values():
            _close(each)


def check_keda(document: dict[str, Any]) -> None:
    """Raises: jsonschema.ValidationError."""
    validator = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    validator.validate(document, schema_of(document["kind"]))
