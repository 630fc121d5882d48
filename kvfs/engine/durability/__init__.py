"""Makes published blocks durable in the background."""
