"""JSON Schema and structural grammars: reading, walking and naming their places, whatever compiles them."""
