"""What the machine tells: processes, mounts, the kernel's log, memory."""
