"""Check every setting before anything is loaded."""
