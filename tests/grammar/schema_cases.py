"""Instances for every keyword of JSON Schema, drafts 2020-12 and 7: (schema, valid, invalid), checked by jsonschema.

Texts are JSON as `json.dumps` writes them, and some in other spellings.
"""

from __future__ import annotations

from typing import Any

DRAFT7 = "http://json-schema.org/draft-07/schema#"

Case = tuple[Any, list[str], list[str]]

TYPES: list[Case] = [
    ({"type": "integer"}, ["0", "-12", "7"], ["1.5", '"1"', "null", "[]", "{}", "true"]),
    ({"type": "number"}, ["0", "-1.5", "2e3", "1E-2", "-0"], ['"1"', "null"]),
    ({"type": "string"}, ['""', '"a"', '"é\\n\\""', '"日本"'], ["1", "null"]),
    ({"type": "boolean"}, ["true", "false"], ["0", '"true"', "null"]),
    ({"type": "null"}, ["null"], ["0", '""', "false"]),
    ({"type": "array"}, ["[]", '[1, "a", null]'], ["{}", "1"]),
    ({"type": "object"}, ["{}", '{"a": 1}'], ["[]", "1"]),
    ({"type": ["integer", "null"]}, ["1", "null"], ['"a"', "[]"]),
    ({}, ["1", "null", '{"a": [1]}', '"x"'], []),
    (True, ["1", "[]"], []),
]

VALUES: list[Case] = [
    ({"const": 3}, ["3"], ["4", '"3"']),
    ({"const": {"a": [1, None]}}, ['{"a": [1, null]}'], ['{"a": [1]}', "{}"]),
    ({"const": 'say "é\\/" 😀'}, ['"say \\"é\\\\/\\" 😀"'], ['"say"']),
    ({"enum": [1, "a", None, True, [1]]}, ["1", '"a"', "null", "true", "[1]"], ["2", '"b"', "false", "[]"]),
    (
        {"enum": ["a\nb", "tab\t", 'q"q', "b\\s", "é", "😀", ""]},
        ['"a\\nb"', '"q\\"q"', '"é"', '"😀"', '""'],
        ['"x"', '"a"'],
    ),
    ({"type": "string", "enum": ["a", "b"]}, ['"a"'], ['"c"', "1"]),
    ({"type": "integer", "enum": [1, "a"]}, ["1"], ['"a"', "2"]),
]

NUMBERS: list[Case] = [
    ({"type": "integer", "minimum": 3, "maximum": 12}, ["3", "12", "7"], ["2", "13", "-3"]),
    ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6}, ["4", "5"], ["3", "6"]),
    ({"type": "integer", "minimum": -5, "maximum": -2}, ["-5", "-2"], ["-6", "-1", "0"]),
    ({"type": "number", "minimum": -1.5, "maximum": 2.25}, ["-1.5", "2.25", "0", "1.99"], ["-1.6", "2.3", "10"]),
    ({"type": "number", "exclusiveMinimum": 0}, ["0.1", "5"], ["0", "-1"]),
    ({"type": "number", "exclusiveMaximum": 1}, ["0.9", "-3"], ["1", "2"]),
    ({"const": 2**53 + 1}, [f"{2**53 + 1}"], [f"{2**53}", f"{2**53 + 2}"]),
    ({"type": "integer", "minimum": 2**53 + 1}, [f"{2**53 + 2}"], [f"{2**53}"]),
    ({"type": "integer", "maximum": -(2**53) - 1}, [f"{-(2**53) - 2}"], [f"{-(2**53)}"]),
    ({"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}, ["1.2", "1.5"], ["1", "1.0", "1.6"]),
    ({"minimum": -1.5, "type": "number", "anyOf": [{"exclusiveMaximum": -1}]}, ["-1.2"], ["-1", "-1.0", "-2"]),
    ({"type": "integer", "multipleOf": 3}, ["0", "3", "-6", "300"], ["1", "4", "-5"]),
    ({"type": "number", "multipleOf": 0.5}, ["0.5", "2", "-1.5"], ["0.3", "1.25"]),
    ({"type": "integer", "minimum": 9007199254740990, "maximum": 9007199254740992}, ["9007199254740991"], ["1"]),
    ({"minimum": 5}, ["6", '"x"', "null"], ["4"]),
]

STRINGS: list[Case] = [
    (
        {"type": "string", "minLength": 2, "maxLength": 3},
        ['"ab"', '"éa"', '"日本語"', '"a\\nb"'],
        ['"a"', '"abcd"', '""'],
    ),
    ({"type": "string", "maxLength": 0}, ['""'], ['"a"']),
    (
        {"type": "string", "minLength": 3000, "maxLength": 3001},
        ['"' + "x" * 3000 + '"'],
        ['"x"', '"' + "x" * 3002 + '"'],
    ),
    ({"type": "string", "pattern": "^[a-c]+$"}, ['"abc"'], ['"abd"', '""']),
    ({"type": "string", "pattern": "b"}, ['"abc"'], ['"ac"']),
    ({"type": "string", "pattern": "^a|b$"}, ['"ax"', '"xb"'], ['"xa"']),
    ({"type": "string", "pattern": "^\\d{3}-\\w$"}, ['"123-x"'], ['"12-x"', '"123-"']),
    ({"type": "string", "pattern": '^[^"]*$'}, ['"a"'], ['"\\""']),
    ({"type": "string", "pattern": "^[^\\\\]*$"}, ['"a"'], ['"\\\\"']),
    ({"type": "string", "pattern": "^a*$", "minLength": 2}, ['"aa"'], ['"a"', '"ab"']),
    ({"type": "string", "pattern": "^(?!foo)[a-z]+$"}, ['"bar"'], ['"foo"']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], []),
    ({"type": "string", "format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], []),
    ({"type": "string", "format": "ipv4"}, ['"127.0.0.1"'], []),
    ({"type": "string", "format": "made-up"}, ['"x"'], ["1"]),
    ({"type": "string", "contentMediaType": "application/json", "contentEncoding": "base64"}, ['"e30="'], ["1"]),
]

ARRAYS: list[Case] = [
    ({"type": "array", "items": {"type": "integer"}}, ["[]", "[1, 2]"], ['["a"]', "[1, null]"]),
    (
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        ["[1]", "[1, 2]"],
        ["[]", "[1, 2, 3]"],
    ),
    (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
        ['[1, "a"]', "[1]"],
        ['["a"]', "[1, 2]"],
    ),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, ["[1]", "[]"], ["[1, 2]"]),
    (
        {"$schema": DRAFT7, "type": "array", "items": [{"type": "integer"}], "additionalItems": {"type": "string"}},
        ['[1, "a"]'],
        ["[1, 2]"],
    ),
    ({"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}}, ["[1, 2]"], ["[1, 1]"]),
    ({"type": "array", "contains": {"const": 1}, "items": {"enum": [1, 2]}}, ["[2, 1]"], ["[2]", "[]"]),
    (
        {"type": "array", "contains": {"const": 1}, "minContains": 2, "maxContains": 3},
        ["[1, 1]"],
        ["[1]", "[1, 1, 1, 1]"],
    ),
    ({"type": "array", "prefixItems": [{"type": "integer"}], "unevaluatedItems": False}, ["[1]"], ["[1, 2]"]),
    ({"items": {"type": "integer"}}, ["[1]", "3"], ['["a"]']),
]

OBJECTS: list[Case] = [
    (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        ['{"a": 1}', '{"a": 1, "b": "x"}'],
        ["{}", '{"a": "x"}'],
    ),
    (
        {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
        ['{"a": 1}', "{}"],
        ['{"b": 1}', '{"a": 1, "b": 2}'],
    ),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, ['{"z": 1}', "{}"], ['{"z": "x"}']),
    (
        {
            "type": "object",
            "properties": {"b": {"type": "integer"}, "a": {"type": "null"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        ['{"b": 1, "a": null}'],
        ['{"a": null}', '{"b": 1}'],
    ),
    ({"type": "object", "required": ["z"]}, ['{"z": 1}'], ["{}", '{"a": 1}']),
    (
        {"type": "object", "patternProperties": {"^n": {"type": "integer"}}, "additionalProperties": False},
        ['{"n1": 1}'],
        ['{"n1": "x"}', '{"x": 1}'],
    ),
    ({"type": "object", "minProperties": 1}, ['{"a": 1}'], ["{}"]),
    ({"type": "object", "minProperties": 2}, ['{"a": 1, "b": 2}'], ["{}", '{"a": 1}', '{"a": 1, "a": 1}']),
    ({"type": "object", "maxProperties": 1}, ['{"a": 1}', "{}"], ['{"a": 1, "b": 2}']),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, ['{"ab": 1}'], ['{"b": 1}']),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, ['{"a": 1, "b": 1}', "{}"], ['{"a": 1}']),
    ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, ['{"a": 1, "b": 1}'], ['{"a": 1}']),
    ({"$schema": DRAFT7, "type": "object", "dependencies": {"a": ["b"]}}, ['{"a": 1, "b": 1}'], ['{"a": 1}']),
    ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, ['{"a": 1}'], ['{"b": 1}']),
    ({"properties": {"a": {"type": "integer"}}}, ["1", '{"a": 1}'], ['{"a": "x"}']),
    (
        {"type": "object", "properties": {'é"\n': {"const": 1}}, "required": ['é"\n'], "additionalProperties": False},
        ['{"é\\"\\n": 1}'],
        ["{}"],
    ),
    ({"type": "object", "properties": {"a": False}}, ["{}"], ['{"a": 1}']),
    (
        {
            "type": "object",
            "properties": {"a.b*(c": {"const": 1}},
            "required": ["a.b*(c"],
            "additionalProperties": False,
        },
        ['{"a.b*(c": 1}'],
        ["{}", '{"axb*(c": 1}'],
    ),
    (
        {"$schema": DRAFT7, "type": "object", "dependencies": {"a": {"required": ["b"]}}},
        ['{"a": 1, "b": 1}'],
        ['{"a": 1}'],
    ),
]

LOGIC: list[Case] = [
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["1", "null"], ['"x"']),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}], "minimum": 5}, ["6", '"x"'], ["4"]),
    (
        {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object", "properties": {"a": {}, "b": {}}},
        ['{"a": 1}', '{"b": 1}'],
        ["{}", '{"c": 1}'],
    ),
    (
        {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 4}, {"type": "null"}]},
        ['"ab"', '"abcd"', '"abcdef"', '""', "null"],
        ['"abc"', "1"],
    ),
    (
        {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}, {"enum": ["x", 1]}]},
        ['""', '"abcdef"', "1"],
        ["2", "null"],
    ),
    (
        {
            "anyOf": [
                {"type": "string", "maxLength": 2, "title": "t"},
                {"type": "string", "maxLength": 3, "minLength": 2},
            ]
        },
        ['""', '"abc"'],
        ['"abcd"'],
    ),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"x"'], ["null"]),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ["1.5"], ["1", '"x"']),
    ({"oneOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 5}]}, ["1", "6"], ["3"]),
    ({"allOf": [{"type": "integer"}, {"minimum": 5}, {"maximum": 8}]}, ["5", "8"], ["4", "9", '"x"']),
    (
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"required": ["b"]},
            ]
        },
        ['{"a": 1, "b": 2}'],
        ['{"a": 1}', '{"b": 1}'],
    ),
    ({"not": {"type": "integer"}}, ['"x"', "null"], ["1"]),
    ({"type": "integer", "not": {"const": 3}}, ["4"], ["3"]),
    (
        {"type": "integer", "if": {"minimum": 10}, "then": {"multipleOf": 10}, "else": {"minimum": 5}},
        ["20", "7"],
        ["12", "3"],
    ),
]

REFERENCES: list[Case] = [
    ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, ["1"], ['"x"']),
    ({"$ref": "#/$defs/n", "minimum": 5, "$defs": {"n": {"type": "integer"}}}, ["6"], ["4", '"x"']),
    ({"$schema": DRAFT7, "$ref": "#/definitions/n", "definitions": {"n": {"type": "integer"}}}, ["1"], ['"x"']),
    ({"$ref": "#named", "$defs": {"n": {"$anchor": "named", "type": "null"}}}, ["null"], ["1"]),
    (
        {
            "type": "object",
            "properties": {"next": {"$ref": "#"}, "v": {"type": "integer"}},
            "required": ["v"],
            "additionalProperties": False,
        },
        ['{"v": 1}', '{"next": {"v": 2}, "v": 1}'],
        ["{}", '{"next": {}, "v": 1}'],
    ),
    ({"$defs": {"a/b~c": {"type": "null"}}, "$ref": "#/$defs/a~1b~0c"}, ["null"], ["1"]),
    ({"$defs": {"unused": {"not": {}}, "n": {"type": "integer"}}, "$ref": "#/$defs/n"}, ["1"], ['"x"']),
    ({"$dynamicRef": "#x", "$defs": {"n": {"$dynamicAnchor": "x", "type": "integer"}}}, ["1"], ['"x"']),
]

ANNOTATIONS: list[Case] = [
    (
        {
            "title": "t",
            "description": "d",
            "default": 1,
            "examples": [1],
            "deprecated": True,
            "readOnly": True,
            "writeOnly": False,
            "$comment": "c",
            "contentSchema": {"type": "null"},
            "$vocabulary": {"https://json-schema.org/draft/2020-12/vocab/core": True},
            "type": "integer",
        },
        ["1"],
        ['"x"'],
    ),
    (
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.com/s", "type": "null"},
        ["null"],
        ["1"],
    ),
    ({"x-guidance": {"lenient": True, "coerce_one_of": True}, "type": "integer", "not": {"const": 1}}, ["2"], ["1"]),
]

CASES = TYPES + VALUES + NUMBERS + STRINGS + ARRAYS + OBJECTS + LOGIC + REFERENCES + ANNOTATIONS
