"""Encode messages between server and clients, and check received messages."""
