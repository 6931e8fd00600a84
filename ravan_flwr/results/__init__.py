"""Use the records of a run: load its model again, export it, and report on it."""
