"""Structured output: what a request's text must match, compiled where it can be killed, enforced token by token.

The way of a schema, each step in the module that takes it:

1. **Parse.** `spec.fields` reads every spelling (`response_format`, `guided_json`, `regex`, …) into one `GrammarSpec`;
   `spec.limits` bounds its size and depth, `spec.tool_route` does the same for tools and a tool parser's format.
2. **Normalise.** `spec.normal` writes any draft in the newest one's keywords, every reference local, and says `not`,
   `if`, `oneOf` and their like in keywords that backends enforce. Places in the schema as given are kept.
3. **Choose.** `spec.route` asks backends (`spec.negotiation`) what they enforce and orders the ways: in full,
   approximate with what is left out by name, any JSON. The ways travel to the engine in the request.
4. **Compile.** `compile.service` compiles the first way that works: threads where the cost is bounded, else a process
   that can be killed (`compile.compiling`). It tries the result out (`compile.trial`), keeps it (`compile.cache`), and
   leaves out keywords that fail (`spec.relax`).
5. **Mask.** `matching.constraint` follows one request, past its thinking (`matching.reasoning_gate`), and fills a row
   of bits for each step; `spec.unique` watches `uniqueItems` around any backend; `runtime` masks the logits.
6. **Validate.** `structured_outputs` reports what was enforced; where that was not all, `compile.validate` judges the
   finished text by the schema as given, in a process of its own.

Importing the package imports neither torch nor a backend.
"""
