"""Files with bytes, from creation to publishing."""
