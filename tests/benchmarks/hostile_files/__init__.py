"""Model files that a stranger may have made: generators by kind, and a runner that puts them through the readers.

A module of this package has `files(rng, count)`, which yields that many pairs of a kind and a path: a model folder, or
a GGUF file. It makes them with `tempfile`, whose folder the runner chooses, and removes, one after the other. It may
have `read(path)`, which does with a file what a start and a first request do in the server's process, raises what they
raise, and returns the processor time in seconds of the longest piece that would be a callback of the event loop.
It may have `start(path)`, which starts a server with a file; where it has none, that of `starts.py` does, with an
engine that computes nothing. Both return what became of it, as `apart` in the runner does.
"""
