"""The log of the server."""
