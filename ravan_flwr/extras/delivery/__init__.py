"""Deliver a run's result to its devices (`deliver=true`), when the run has ended or later.

The server sends the state with a description, the parcel (server.py, parcel.py). A device checks
both (client.py), and writes an export of the model into a folder of its own (device_result.py).
"""
