"""The answers to the kernel's requests."""
