"""Metrics for Prometheus: their table, their text, and who may fetch it."""
