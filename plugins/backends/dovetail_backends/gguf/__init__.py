"""GGUF files, the one-file format of llama.cpp: what is in one, and what it says in the words of `config.json`.

Imports neither torch nor numpy.
"""
