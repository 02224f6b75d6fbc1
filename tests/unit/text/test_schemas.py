"""Closed schemas: what they refuse, and what they leave as it is."""

import json
from typing import Any

import pytest

from chairlift.text.schemas import closed

STRING = {"type": "string"}
CAT = {"type": "object", "properties": {"name": STRING}, "required": ["name"]}
CLOSED_CAT = CAT | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (CAT, CLOSED_CAT),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({"type": "array", "items": CAT}, {"type": "array", "items": CLOSED_CAT}),
        ({"anyOf": [CAT, {"type": "null"}]}, {"anyOf": [CLOSED_CAT, {"type": "null"}]}),
        ({"oneOf": [CAT, STRING]}, {"oneOf": [CLOSED_CAT, STRING]}),
        ({"type": "object", "additionalProperties": CAT}, {"type": "object", "additionalProperties": CLOSED_CAT}),
        (
            {"$ref": "#/$defs/cat", "description": "it", "$defs": {"cat": CAT}},
            {"$ref": "#/$defs/cat", "description": "it", "$defs": {"cat": CLOSED_CAT}},
        ),
        ({"allOf": [{"$ref": "#/definitions/c"}], "definitions": {"c": CAT}}, None),
        # A property may be called as a keyword is.
        (
            {"properties": {"allOf": STRING, "not": CAT}},
            {"properties": {"allOf": STRING, "not": CLOSED_CAT}, "additionalProperties": False},
        ),
    ],
)
def test_named_properties_are_all_there_are(given: dict[str, Any], wanted: dict[str, Any] | None) -> None:
    before = json.dumps(given)
    if wanted is None:
        assert closed(given)["definitions"]["c"] == CLOSED_CAT
    else:
        assert closed(given) == wanted
    assert json.dumps(given) == before, "the schema that was given has changed"


@pytest.mark.parametrize(
    "given",
    [
        {"type": "object"},
        STRING,
        {},
        CAT | {"additionalProperties": True},
        CAT | {"additionalProperties": STRING},
        CAT | {"patternProperties": {"^x": STRING}},
        CAT | {"minProperties": 3},
        CAT | {"required": ["name", "age"]},
        CAT | {"required": "name"},
        {"properties": [1]},
        {"items": {"properties": 1}, "anyOf": 3},
    ],
)
def test_what_is_open_on_purpose_stays_open(given: dict[str, Any]) -> None:
    assert closed(given) == given


@pytest.mark.parametrize(
    "given",
    [
        {"allOf": [CAT, {"type": "object", "properties": {"age": STRING}}]},
        CAT | {"anyOf": [{"properties": {"age": STRING}}]},
        {"$ref": "#/$defs/cat", "properties": {"age": STRING}, "$defs": {"cat": CAT}},
        {"type": "array", "items": CAT | {"not": {"properties": {"age": STRING}}}},
        CAT | {"if": {"properties": {"age": STRING}}},
        CAT | {"unevaluatedProperties": False},
    ],
)
def test_objects_in_parts_are_left_alone(given: dict[str, Any]) -> None:
    assert closed(given) == given


def test_no_nesting_is_too_deep() -> None:
    schema: dict[str, Any] = CAT
    for _ in range(300):
        schema = {"type": "object", "properties": {"a": schema}}
    deepest = closed(schema)
    while "a" in deepest["properties"]:
        assert deepest["additionalProperties"] is False
        deepest = deepest["properties"]["a"]
    assert deepest == CLOSED_CAT
