"""What talks to a running server, and who else uses its mount."""
