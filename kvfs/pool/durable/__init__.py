"""What the device does not have yet, and how it gets there: identities, checkpoints, syncs."""
