"""Parts of bodies and replies that all APIs share, as pydantic and msgspec have them."""
