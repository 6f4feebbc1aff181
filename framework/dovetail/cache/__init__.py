"""The KV cache: page pool, page allocator, radix tree of prefixes."""
