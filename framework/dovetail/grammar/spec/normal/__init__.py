"""JSON Schemas of every draft in one form: draft 2020-12's keywords, local references, nothing that says nothing."""

from dovetail.grammar.spec.normal.document import Normal, normalize, plain

__all__ = ["Normal", "normalize", "plain"]
