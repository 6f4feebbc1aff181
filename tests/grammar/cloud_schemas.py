"""As `service_schemas`: of calendars, maps, clouds and databases."""

from __future__ import annotations

from typing import Any

from service_schemas import INT, B, S, arr, obj, one, pat

SELECTOR = {"type": "object", "patternProperties": {"^[a-z./]+$": {**S, "maxLength": 9}}, "additionalProperties": False}
CLOUDS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "Google event": (
        obj(
            "start end",
            **{
                key: {
                    "oneOf": [
                        obj("date", date={"type": "string", "format": "date"}),
                        obj("dateTime", dateTime={"type": "string", "format": "date-time"}, timeZone=S),
                    ]
                }
                for key in ("start", "end")
            },
        ),
        [{"start": {"date": "2024-01-02"}, "end": {"dateTime": "2024-01-02T10:00:00Z", "timeZone": "UTC"}}],
        [{"start": {"date": "2024-01-02"}, "end": {}}, {"start": {"date": "x"}, "end": {"date": "2024-01-02"}}],
    ),
    "Google sheet range": (
        obj(
            "range values",
            range=pat("^[A-Za-z0-9]+![A-Z]+[0-9]+(:[A-Z]+[0-9]+)?$"),
            values=arr(arr({"type": ["string", "number", "boolean", "null"]})),
        ),
        [{"range": "S1!A1:B2", "values": [["a", 1], [None, True]]}],
        [{"range": "A1", "values": []}, {"range": "S!A1", "values": [[[]]]}],
    ),
    "Gmail label": (
        obj("name", name=S, color=obj(textColor=pat("^#[0-9a-f]{6}$"), backgroundColor=pat("^#[0-9a-f]{6}$"))),
        [{"name": "n", "color": {"textColor": "#000000"}}],
        [{"name": "n", "color": {"textColor": "black"}}],
    ),
    "Maps route": (
        obj(
            "origin destination",
            **{
                key: {
                    "anyOf": [
                        obj("address", address=S),
                        obj(
                            "lat lng",
                            lat={"type": "number", "minimum": -90, "maximum": 90},
                            lng={"type": "number", "minimum": -180, "maximum": 180},
                        ),
                    ]
                }
                for key in ("origin", "destination")
            },
        ),
        [{"origin": {"address": "a"}, "destination": {"lat": 52.5, "lng": 13.4}}],
        [
            {"origin": {"lat": 91, "lng": 0}, "destination": {"address": "a"}},
            {"origin": {"lat": 1}, "destination": {"address": "a"}},
        ],
    ),
    "S3 put": (
        obj(
            "Bucket Key",
            Bucket=pat("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$"),
            Key={**S, "minLength": 1},
            ACL=one("private", "public-read"),
            Metadata={"type": "object", "propertyNames": {"pattern": "^[a-z-]+$"}, "additionalProperties": S},
        ),
        [{"Bucket": "my-bucket", "Key": "k", "Metadata": {"a-b": "c"}}],
        [{"Bucket": "B", "Key": "k"}, {"Bucket": "my-bucket", "Key": "k", "Metadata": {"A": "c"}}],
    ),
    "DynamoDB item": (
        obj(
            "Item",
            Item={
                "type": "object",
                "minProperties": 1,
                "additionalProperties": {
                    "oneOf": [
                        obj("S", S=S),
                        obj("N", N=pat(r"^-?\d+(\.\d+)?$")),
                        obj("BOOL", BOOL=B),
                        obj("NULL", NULL={"const": True}),
                    ]
                },
            },
        ),
        [{"Item": {"id": {"S": "x"}, "n": {"N": "1.5"}, "z": {"NULL": True}}}],
        [
            {"Item": {}},
            {"Item": {"n": {"N": "one"}}},
            {"Item": {"n": {"S": "x", "N": "1"}}},
            {"Item": {"z": {"NULL": False}}},
        ],
    ),
    "Kubernetes selector": (
        obj(
            matchLabels=SELECTOR,
            matchExpressions=arr(
                {
                    "oneOf": [
                        obj("key operator values", key=S, operator=one("In", "Gt"), values=arr(S, minItems=1)),
                        obj("key operator", key=S, operator=one("Exists", "DoesNotExist")),
                    ]
                }
            ),
        ),
        [
            {
                "matchLabels": {"app": "web"},
                "matchExpressions": [
                    {"key": "k", "operator": "In", "values": ["v"]},
                    {"key": "k", "operator": "Exists"},
                ],
            }
        ],
        [
            {"matchLabels": {"App": "x"}},
            {"matchExpressions": [{"key": "k", "operator": "In"}]},
            {"matchLabels": {"app": "much too long"}},
        ],
    ),
    "Docker port": (
        obj(
            "target",
            target={**INT, "minimum": 1, "maximum": 65535},
            published={"anyOf": [INT, pat("^[0-9]+(-[0-9]+)?$")]},
            protocol=one("tcp", "udp"),
        ),
        [{"target": 80, "published": "8000-9000"}, {"target": 80, "published": 8080}],
        [{"target": 0}, {"target": 80, "published": "a"}],
    ),
    "Terraform rule": (
        obj(
            "type cidr",
            type=one("ingress", "egress"),
            cidr=pat(r"^(\d{1,3}\.){3}\d{1,3}/\d{1,2}$"),
            protocol={"anyOf": [one("tcp", "udp", "-1"), INT]},
        ),
        [{"type": "ingress", "cidr": "10.0.0.0/8", "protocol": "-1"}],
        [{"type": "ingress", "cidr": "10.0.0.0"}, {"type": "in", "cidr": "10.0.0.0/8"}],
    ),
    "Elasticsearch query": (
        {
            **obj("query", query={"$ref": "#/$defs/q"}),
            "$defs": {
                "q": {
                    "oneOf": [
                        obj(
                            "match",
                            match={
                                "type": "object",
                                "minProperties": 1,
                                "maxProperties": 1,
                                "additionalProperties": {"type": ["string", "number"]},
                            },
                        ),
                        obj("bool", bool=obj(must=arr({"$ref": "#/$defs/q"}), must_not=arr({"$ref": "#/$defs/q"}))),
                    ]
                }
            },
        },
        [{"query": {"bool": {"must": [{"match": {"a": "b"}}]}}}],
        [{"query": {"match": {}}}, {"query": {"match": {"a": "b", "c": "d"}}}, {"query": {"bool": {"must": [{}]}}}],
    ),
    "MongoDB sort": (
        obj(
            "collection",
            collection=S,
            sort={"type": "object", "additionalProperties": one(1, -1)},
            limit={**INT, "exclusiveMinimum": 0},
        ),
        [{"collection": "c", "sort": {"a": -1}, "limit": 1}],
        [{"collection": "c", "sort": {"a": 0}}, {"collection": "c", "limit": 0}],
    ),
    "Spotify playlist": (
        obj(
            "uris",
            uris=arr(pat("^spotify:(track|episode):[A-Za-z0-9]{22}$"), minItems=1, maxItems=2),
            position={**INT, "minimum": 0},
        ),
        [{"uris": ["spotify:track:" + "a" * 22]}],
        [{"uris": []}, {"uris": ["spotify:album:" + "a" * 22]}],
    ),
    "OpenWeather": (
        obj(
            "units",
            q=S,
            lat={"type": "number"},
            lon={"type": "number"},
            units=one("standard", "metric", "imperial"),
            rules={
                "anyOf": [{"required": ["q"]}, {"required": ["lat", "lon"]}],
                "dependentRequired": {"lat": ["lon"], "lon": ["lat"]},
            },
        ),
        [{"q": "Berlin", "units": "metric"}, {"lat": 1.5, "lon": 2, "units": "metric"}],
        [{"units": "metric"}, {"q": "B", "lat": 1, "units": "metric"}],
    ),
    "Home Assistant service": (
        obj(
            "domain service",
            domain=pat("^[a-z_]+$"),
            service=S,
            target=obj(entity_id={"anyOf": [pat(r"^[a-z_]+\.[a-z0-9_]+$"), arr(pat(r"^[a-z_]+\.[a-z0-9_]+$"))]}),
        ),
        [{"domain": "light", "service": "on", "target": {"entity_id": ["light.a", "light.b"]}}],
        [{"domain": "light", "service": "on", "target": {"entity_id": "light"}}, {"domain": "Light", "service": "on"}],
    ),
}
