"""The server as a process: its logs, its limits, its service manager."""
