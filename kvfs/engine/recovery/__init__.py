"""At a start and after damage: trust the index, finish drafts, rebuild, sweep, check."""
