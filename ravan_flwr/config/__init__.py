"""Check all that a user sets, before anything is loaded."""
