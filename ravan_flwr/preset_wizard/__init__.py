"""Create a preset for the user's data and model."""
