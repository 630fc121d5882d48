"""Makes published blocks durable behind the clients' backs."""
