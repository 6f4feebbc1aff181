"""What to write in place of a keyword that cannot be enforced."""

from __future__ import annotations

ADVICE = {
    "uniqueItems": "bound the list with maxItems, or list what is allowed as an enum of lists",
    "not": "say what is allowed instead: enum, pattern, or another type",
    "if": "write anyOf with one schema for each case",
    "then": "write anyOf with one schema for each case",
    "else": "write anyOf with one schema for each case",
    "oneOf": "write anyOf, or tell the options apart by a required property with a const in each",
    "contains": "put what must be there first, with prefixItems",
    "minContains": "put what must be there first, with prefixItems",
    "maxContains": "put what must be there first, with prefixItems",
    "propertyNames": "write patternProperties with additionalProperties: false",
    "dependentRequired": "write anyOf with one schema for each case",
    "dependentSchemas": "write anyOf with one schema for each case",
    "dependencies": "write anyOf with one schema for each case",
    "unevaluatedProperties": "list all properties, with additionalProperties: false",
    "unevaluatedItems": "write items: false behind prefixItems",
    "minProperties": "require properties by name",
    "maxProperties": "list the properties, with additionalProperties: false",
    "format": "write a pattern",
    "pattern": "write it without back-references and look-around over counts, or as an enum",
    "patternProperties": "write patterns that exclude each other, without look-around",
    "$ref": "put what it names under $defs; nothing is fetched",
    "multipleOf": "use a smaller divisor, or an enum",
    "enum": "list fewer values, or write a pattern",
    "properties": "declare fewer properties, or put them into objects of their own",
    "required": "require fewer properties, or put them into objects of their own",
    "anyOf": "write fewer alternatives, told apart by a const each",
    "allOf": "write the parts together as one schema",
    "minLength": "use a smaller bound",
    "maxLength": "use a smaller bound, or none",
    "minItems": "use a smaller bound",
    "maxItems": "use a smaller bound, or none",
}


def advice(place: str) -> str:
    """Return what to do about a keyword, named by its JSON pointer."""
    parts = place.rsplit("/", 2)
    keyword = next((part for part in reversed(parts) if part in ADVICE), "")
    return ADVICE.get(keyword, "write it in another way, or leave it out")


HINTS = {
    "look-around": "say what the text may be instead: alternatives, or classes such as [^x]",
    "backreferences": "write the texts out, as alternatives",
    "word boundary": "write what may stand there: a space, a comma, or nothing",
    "line anchor": "write the line breaks out: \\n",
    "matches no text": "look for an anchor or a look-around that what stands beside it contradicts",
    "anchor": "leave it out: the whole text is matched anyway",
    "unclosed": "close it, or write a backslash before it where the character is meant",
    "unopened": "write a backslash before it, where the character is meant",
    "class range": "write the smaller character first, or - at the end of the class",
    "repetition": "put what is repeated before it and the smaller number first, or write a backslash before it",
    "is not defined": "define it, or put it in quotes where its text is meant",
    "unknown name": "define it, or put it in quotes where its text is meant",
    "no rule `root`": "name the rule that everything begins with root",
    "no start rule": "name the rule that everything begins with start",
    "leads to a rule that never ends": "give each rule an alternative that does not lead back to it",
    "lexer error": "look for a quote, a slash or a bracket that is not closed",
    "cannot read": "look for a quote or a bracket that is not closed there",
}
"""What to do about a grammar that is no schema, by words of its refusal."""


def hint(message: str) -> str | None:
    """Return what to write instead, where a refusal of an expression or a grammar of rules says enough."""
    return next((said for words, said in HINTS.items() if words in message), None)
