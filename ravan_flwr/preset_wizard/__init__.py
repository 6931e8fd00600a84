"""Draft a preset: look at data and at a model, and write what follows from them."""
