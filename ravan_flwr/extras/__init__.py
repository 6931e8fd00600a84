"""Optional parts of a run: masked aggregation, privacy of single examples, delivery to devices.

Nothing in `server/` imports a file of this folder; it finds them by name: `TRANSPORTS`
(server/transport.py), `RELEASES` (server/release.py) and `DELIVERY` (server_app.py).
"""
