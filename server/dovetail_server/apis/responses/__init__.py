"""The Responses API: items and conversations, what of a reply is streamed, and responses that are kept."""
