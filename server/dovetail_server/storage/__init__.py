"""Where files and batches are kept: a database for what is known of them, a folder for their bytes.

Nothing here is imported until a request needs it: see `lazy.py`.
"""
