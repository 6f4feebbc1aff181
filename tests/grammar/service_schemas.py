"""Arguments as tools of well-known services take them, by their public references: what conforms, and what does not.

Each has unions, patterns and conditions where the service's own schema has them.
"""

from __future__ import annotations

from typing import Any

S: Any = {"type": "string"}
INT: Any = {"type": "integer"}
B: Any = {"type": "boolean"}


def obj(required: str = "", /, *, more: Any = False, rules: Any = None, **properties: Any) -> dict[str, Any]:
    """An object; `rules`: what else holds of it."""
    made = {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": more}
    return made | (rules or {})


def arr(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def one(*values: Any) -> dict[str, Any]:
    return {"enum": list(values)}


def pat(pattern: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern, **more}


def opt(schema: Any) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


SHA, SLUG, EMAIL = pat("^[0-9a-f]{7,40}$"), pat("^[a-z0-9-]{1,39}$"), {"type": "string", "format": "email"}
RICH = obj("type text", type=one("text"), text=obj("content", content=S, link=opt(obj("url", url=S))))
MONEY = obj("value currency_code", value=pat(r"^\d{1,5}\.\d{2}$"), currency_code=pat("^[A-Z]{3}$"))
SERVICES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "GitHub issue": (
        obj(
            "owner repo title",
            owner=SLUG,
            repo=S,
            title={"type": ["string", "integer"]},
            body=opt(S),
            labels=arr({"anyOf": [S, obj("name", name=S, color=opt(pat("^[0-9a-f]{6}$")))]}),
        ),
        [{"owner": "a-b", "repo": "r", "title": 5, "labels": ["x", {"name": "y", "color": "00ff00"}]}],
        [
            {"owner": "A", "repo": "r", "title": "t"},
            {"owner": "a", "repo": "r", "title": "t", "labels": [{"color": None}]},
        ],
    ),
    "GitHub merge": (
        obj("pull_number", pull_number={**INT, "minimum": 1}, sha=SHA, merge_method=one("merge", "squash", "rebase")),
        [{"pull_number": 7, "sha": "abcdef0", "merge_method": "squash"}],
        [{"pull_number": 0}, {"pull_number": 1, "sha": "xyz"}, {"pull_number": 1, "merge_method": "fast"}],
    ),
    "GitHub dispatch": (
        obj("ref", ref=S, inputs={"type": "object", "maxProperties": 2, "additionalProperties": S}),
        [{"ref": "main", "inputs": {"a": "1", "b": "2"}}],
        [{"ref": "m", "inputs": {"a": "1", "b": "2", "c": "3"}}],
    ),
    "GitLab branch": (
        obj("name", name=S, push_access_level=one(0, 30, 40, 60), unprotect=arr(obj("id", id=INT), minItems=1)),
        [{"name": "x", "push_access_level": 30, "unprotect": [{"id": 3}]}],
        [{"name": "x", "push_access_level": 20}, {"name": "x", "unprotect": []}],
    ),
    "Slack message": (
        obj(
            "channel",
            channel=pat("^[CDG][A-Z0-9]{8,}$"),
            text=S,
            thread_ts=pat(r"^\d{10}\.\d{6}$"),
            unfurl=B,
            rules={"minProperties": 2},
        ),
        [{"channel": "C12345678", "text": "hi", "thread_ts": "1234567890.123456"}],
        [{"channel": "general", "text": "x"}, {"channel": "C12345678"}],
    ),
    "Slack block": (
        obj(
            "type",
            type=one("section", "header"),
            text={
                "oneOf": [
                    obj("type text", type={"const": "mrkdwn"}, text=S, verbatim=B),
                    obj("type text", type={"const": "plain_text"}, text={**S, "maxLength": 8}, emoji=B),
                ]
            },
        ),
        [{"type": "section", "text": {"type": "mrkdwn", "text": "a long text", "verbatim": True}}],
        [
            {"type": "header", "text": {"type": "plain_text", "text": "a long text"}},
            {"type": "header", "text": {"type": "mrkdwn", "text": "a", "emoji": True}},
        ],
    ),
    "Discord message": (
        obj(
            content={**S, "maxLength": 12},
            embeds=arr(obj(title=S, color={**INT, "minimum": 0, "maximum": 16777215}), maxItems=2),
            rules={"anyOf": [{"required": ["content"]}, {"required": ["embeds"]}]},
        ),
        [{"content": "hi"}, {"embeds": [{"title": "t", "color": 255}]}],
        [{}, {"content": "much too long for it"}, {"embeds": [{"color": 16777216}]}],
    ),
    "Telegram message": (
        obj(
            "chat_id text",
            chat_id={"anyOf": [INT, pat("^@[A-Za-z0-9_]{5,}$")]},
            text={**S, "minLength": 1},
            parse_mode=one("HTML", "MarkdownV2"),
        ),
        [{"chat_id": -100, "text": "x"}, {"chat_id": "@channel", "text": "x", "parse_mode": "HTML"}],
        [{"chat_id": "@x", "text": "x"}, {"chat_id": 1, "text": ""}],
    ),
    "Twilio SMS": (
        obj(
            "To Body",
            To=pat(r"^\+[1-9]\d{1,14}$"),
            Body=S,
            From=pat(r"^\+[1-9]\d{1,14}$"),
            MessagingServiceSid=pat("^MG[0-9a-f]{32}$"),
            rules={"oneOf": [{"required": ["From"]}, {"required": ["MessagingServiceSid"]}]},
        ),
        [{"To": "+4930123", "Body": "x", "From": "+12"}],
        [{"To": "+4930123", "Body": "x"}, {"To": "030", "Body": "x", "From": "+12"}],
    ),
    "SendGrid mail": (
        obj(
            "to from",
            to=arr(obj("email", email=EMAIL, name=S), minItems=1),
            content=arr(obj("type value", type=one("text/plain", "text/html"), value={**S, "minLength": 1})),
            **{"from": obj("email", email=EMAIL)},
        ),
        [{"to": [{"email": "a@b.de"}], "content": [{"type": "text/plain", "value": "x"}], "from": {"email": "c@d.de"}}],
        [{"to": [], "from": {"email": "c@d.de"}}, {"to": [{"email": "no"}], "from": {"email": "c@d.de"}}],
    ),
    "Stripe charge": (
        obj(
            "amount currency",
            amount={**INT, "minimum": 1, "maximum": 99999999},
            currency=pat("^[a-z]{3}$"),
            capture_method=one("automatic", "manual"),
            metadata={"type": "object", "additionalProperties": S},
        ),
        [{"amount": 100, "currency": "eur", "metadata": {"k": "v"}}],
        [
            {"amount": 0, "currency": "eur"},
            {"amount": 1, "currency": "EUR"},
            {"amount": 1, "currency": "eur", "metadata": {"k": 1}},
        ],
    ),
    "Stripe line item": (
        obj(
            "quantity",
            quantity=INT,
            price=pat("^price_[A-Za-z0-9]+$"),
            price_data=obj("unit_amount", unit_amount=INT),
            rules={"oneOf": [{"required": ["price"]}, {"required": ["price_data"]}]},
        ),
        [{"quantity": 1, "price": "price_1"}, {"quantity": 1, "price_data": {"unit_amount": 5}}],
        [{"quantity": 1}, {"quantity": 1, "price": "p_1"}],
    ),
    "PayPal order": (
        obj(
            "intent purchase_units", intent=one("CAPTURE", "AUTHORIZE"), purchase_units=arr(obj("amount", amount=MONEY))
        ),
        [{"intent": "CAPTURE", "purchase_units": [{"amount": {"value": "10.00", "currency_code": "EUR"}}]}],
        [{"intent": "CAPTURE", "purchase_units": [{"amount": {"value": "10", "currency_code": "EUR"}}]}],
    ),
    "Shopify product": (
        obj(
            "title",
            title=S,
            status=one("active", "archived", "draft"),
            variants=arr(
                obj(price={"anyOf": [{"type": "number", "minimum": 0}, pat(r"^\d+\.\d{2}$")]}, sku=opt(S)), maxItems=3
            ),
            tags={"type": ["string", "array"], "items": S},
        ),
        [{"title": "t", "variants": [{"price": "9.99", "sku": None}, {"price": 3.5}], "tags": ["a"]}],
        [
            {"title": "t", "variants": [{"price": "free"}]},
            {"title": "t", "tags": [1]},
            {"title": "t", "status": "gone"},
        ],
    ),
    "Notion page": (
        obj(
            "parent properties",
            parent={"oneOf": [obj("page_id", page_id=S), obj("database_id", database_id=S)]},
            properties={"type": "object", "additionalProperties": obj("title", title=arr(RICH))},
        ),
        [
            {
                "parent": {"page_id": "p"},
                "properties": {"N": {"title": [{"type": "text", "text": {"content": "c", "link": None}}]}},
            }
        ],
        [{"parent": {}, "properties": {}}, {"parent": {"page_id": "p", "database_id": "d"}, "properties": {}}],
    ),
    "Linear issue": (
        obj(
            "teamId title",
            teamId={"type": "string", "format": "uuid"},
            title=S,
            priority={**INT, "minimum": 0, "maximum": 4},
            estimate=opt(INT),
            dueDate={"type": "string", "format": "date"},
        ),
        [{"teamId": "123e4567-e89b-12d3-a456-426614174000", "title": "t", "priority": 4, "dueDate": "2024-02-29"}],
        [
            {"teamId": "x", "title": "t"},
            {"teamId": "123e4567-e89b-12d3-a456-426614174000", "title": "t", "priority": 5},
        ],
    ),
    "Jira issue": (
        obj(
            "fields",
            fields=obj(
                "project summary",
                project={"anyOf": [obj("key", key=pat("^[A-Z][A-Z0-9]+$")), obj("id", id=S)]},
                summary={**S, "maxLength": 20},
                more={},
                rules={"patternProperties": {"^customfield_[0-9]+$": {"type": ["string", "number", "null"]}}},
            ),
        ),
        [{"fields": {"project": {"key": "AB"}, "summary": "s", "customfield_10": 5}}],
        [
            {"fields": {"project": {"key": "ab"}, "summary": "s"}},
            {"fields": {"project": {"id": "1"}, "summary": "s", "customfield_10": [1]}},
        ],
    ),
    "Trello card": (
        obj(
            "idList",
            idList=pat("^[0-9a-fA-F]{24}$"),
            pos={"oneOf": [one("top", "bottom"), {"type": "number", "minimum": 0}]},
        ),
        [{"idList": "a" * 24, "pos": "top"}, {"idList": "a" * 24, "pos": 1.5}],
        [{"idList": "a"}, {"idList": "a" * 24, "pos": -1}],
    ),
    "Asana task": (
        obj("name", name=S, due_on=opt({"type": "string", "format": "date"}), followers=arr(S, uniqueItems=True)),
        [{"name": "n", "due_on": None, "followers": ["a", "b"]}],
        [{"name": "n", "due_on": "soon"}, {"name": "n", "followers": ["a", "a"]}],
    ),
}
"""By what they are: a schema, values that conform, and values that do not."""
