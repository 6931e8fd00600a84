"""Optional parts of a run: masked aggregation, privacy of single examples, delivery to devices.

Nothing in `server/` imports a file of this folder; it finds them by name: `KINDS`
(server/kind.py) and `DELIVERY` (server_app.py).
"""
