"""At a start, and after damage: believe, finish, rebuild, sweep, check."""
