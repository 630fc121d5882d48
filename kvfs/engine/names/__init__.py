"""The tree: every change of it is one transaction."""
