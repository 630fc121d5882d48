"""Open files: handles, data paths, the bytes of READ and WRITE, waiting for room."""
