"""Values and rules: no machine, no clock, no I/O."""
