"""Files on servers: addresses, byte ranges, and the node's cache."""
