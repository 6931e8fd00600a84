"""Serve a run as a page while it goes on."""

PORT = 8642  # neither Flower's nor TensorBoard's
