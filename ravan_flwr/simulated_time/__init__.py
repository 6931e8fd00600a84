"""Simulated seconds: how fast clients compute and send, and when their replies arrive."""
