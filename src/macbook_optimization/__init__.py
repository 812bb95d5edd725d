"""Makes training fit this machine. Knows nothing about Tiny Recursive Models."""
