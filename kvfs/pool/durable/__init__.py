"""What the device does not have yet, and how it gets there: identities, the index's log, syncs."""
