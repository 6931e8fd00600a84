"""Optional parts of a run: masked aggregation, privacy of single examples, delivery to devices.

No file in `server/` imports a file of this folder. They are resolved by name: `RELEASES`
(server/releases.py) and `DELIVERY` (server_app.py).
"""
