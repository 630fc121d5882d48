"""Files with bytes, from their creation to their publishing."""
