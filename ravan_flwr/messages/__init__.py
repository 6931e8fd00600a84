"""Encode what travels between server and clients, and check what arrives."""
