"""`kv-events`: a hook plugin that tells routers what the prefix cache holds."""
