"""A finished run: reopened, exported, reported."""
