"""Between the kernel and the store: the only package that knows FUSE."""
