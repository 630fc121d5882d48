"""The control socket: status, eviction and pins of a running server."""
