"""JSON Schemas in a form of which the libraries enforce more.

What most of them cannot enforce (`not`, `if`, `oneOf`, `contains`, `dependent…`, counts of properties) is written in
terms of what they can, where both mean the same. Finished texts are validated by the schema as it was given, not by
this form.
"""
