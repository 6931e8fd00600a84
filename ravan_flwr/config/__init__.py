"""What a user sets, checked before anything is loaded."""
