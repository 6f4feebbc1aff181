"""OpenAI's API: requests as pydantic models with every field bounded, replies as msgspec structs."""
