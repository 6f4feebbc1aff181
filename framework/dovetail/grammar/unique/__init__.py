"""`uniqueItems`, which no grammar can say: enforced while text is generated, over any backend's grammar.

`places` tells where a schema asks for it, `scan` follows the text there, `matcher` takes the tokens out of a mask that
would end an item equal to an earlier one, or leave no way but that. The API's process needs `places` alone.
"""
