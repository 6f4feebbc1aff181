"""Which tokens end a reply."""

from __future__ import annotations

from dovetail.checkpoint.tokenizer_files import TokenizerFiles


def end_ids(files: TokenizerFiles) -> tuple[int, ...]:
    """Return the ids that end a reply, without loading the tokenizer where its files say them.

    Args:
        files: The model's.

    Raises:
        ModelError: As `TokenizerFiles.end_ids` and `load_backend`.
    """

    def id_of(token: str) -> int | None:
        from dovetail.text.tokenizer.backend import FORMATS, load_backend

        if (found := files.listed_id(token)) is not None or files.folder is None:
            return found
        folder, stored = files.folder, files.stored
        is_known = stored is not None or any((folder / name).is_file() for name in FORMATS)
        return load_backend(folder, stored).token_to_id(token) if is_known else None

    return files.end_ids(id_of)
