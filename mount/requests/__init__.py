"""What each request is answered."""
