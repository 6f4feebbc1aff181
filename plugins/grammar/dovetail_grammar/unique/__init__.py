"""`uniqueItems`, which no grammar can say: enforced while text is generated, over a library's grammar.

`locations` tells where a schema asks for it, `scan` follows the text there, `matcher` takes the tokens out of a mask
that would end an item equal to an earlier one, or leave no way but that. `tags` finds the JSON in structural grammars,
`values` tells where what the first items are could leave nothing for others. `SchemaBackend` puts them around a
library.
"""
