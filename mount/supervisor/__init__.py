"""The process that starts a mount's server, holds its open files, and starts it again."""
