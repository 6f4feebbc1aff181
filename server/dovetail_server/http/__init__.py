"""The door: connections, keys, hosts, addresses, bodies' sizes, and errors."""
