"""What an answer must match, from the fields of a body that say so."""

import json

from chairlift.params import Grammar
from chairlift.server.protocol import Formatted, JsonObjectFormat, JsonSchemaFormat, Sampling
from chairlift.text.schemas import closed


def grammar_of(body: Sampling) -> Grammar | None:
    """The grammar of `response_format`, `regex`, `grammar` or `choice`; a body has one at most. Whether its source is
    a good one is found out when the request is submitted."""
    if body.regex is not None:
        return Grammar("regex", body.regex)
    if body.grammar is not None:
        return Grammar("lark", body.grammar)
    if body.choice is not None:
        return Grammar("choice", tuple(body.choice))
    match body.response_format if isinstance(body, Formatted) else None:
        case JsonObjectFormat():
            return Grammar("json_object")
        case JsonSchemaFormat(json_schema=schema):
            return schema_grammar(schema.schema_)
    return None


def schema_grammar(schema: object) -> Grammar:
    """JSON of this schema, without properties that it does not name; None: any JSON object."""
    if schema is None:
        return Grammar("json_object")
    if isinstance(schema, dict):
        schema = closed(schema)
    return Grammar("json_schema", json.dumps({} if schema is True else schema))  # llguidance wants an object
