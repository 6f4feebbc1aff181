"""JSON Schemas of every draft in one form, in which backends enforce more of them.

`normalize` writes a schema in draft 2020-12's keywords, every reference local, without what says nothing; then what
most backends cannot enforce (`not`, `if`, `oneOf`, `dependent…`, counts of properties) in terms of what they can, where
both mean the same. Finished texts are judged by the schema as it was given, not by this form.
"""

from dovetail.grammar.spec.normal.document import Normal, normalize, plain

__all__ = ["Normal", "normalize", "plain"]
