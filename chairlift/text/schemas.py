"""JSON schemas as answers keep to them: an object holds what its schema names, and nothing else.

JSON Schema allows any further property unless told otherwise, and a small model that may go on inventing properties
does not end. Whatever a closed schema accepts is valid for the schema as it was given, too. Refuses to know tools,
grammars and HTTP.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # keywords that hold schemas by name
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "contains")
# What a schema may be put together from; each part sees all properties, so that a closed one would refuse the others'.
_PARTS = frozenset({"properties", "anyOf", "oneOf", "allOf", "$ref"})
_ENTANGLED = frozenset({"not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"})
# Who says one of these has thought of properties without a name.
_OPEN = frozenset({"additionalProperties", "patternProperties", "propertyNames", "minProperties", "dependentRequired"})


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with `additionalProperties: false` in every object that names properties and says nothing of others.

    One that puts objects together from parts (`allOf` of several, `properties` beside `anyOf` and the like) comes back
    as it is.
    """
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    schemas = list(_schemas(copy))
    if not any(_is_composed(each) for each in schemas):
        for each in schemas:
            if _may_be_closed(each):
                each["additionalProperties"] = False
    return copy


def _schemas(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and all within it, however deep."""
    waiting: list[Any] = [root]
    while waiting:
        schema = waiting.pop()
        if not isinstance(schema, dict):
            continue
        yield schema
        for key in _NAMED:
            if isinstance(named := schema.get(key), dict):
                waiting += named.values()
        for key in _LISTED:
            if isinstance(listed := schema.get(key), list):
                waiting += listed
        waiting += [schema.get(key) for key in _SINGLE]


def _is_composed(schema: dict[str, Any]) -> bool:
    parts = schema.get("allOf")
    several = isinstance(parts, list) and len(parts) > 1
    return several or len(_PARTS & schema.keys()) > 1 or not _ENTANGLED.isdisjoint(schema)


def _may_be_closed(schema: dict[str, Any]) -> bool:
    named, required = schema.get("properties"), schema.get("required", [])
    return (
        isinstance(named, dict)
        and _OPEN.isdisjoint(schema)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in named for name in required)
    )
