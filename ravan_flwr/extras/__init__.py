"""Optional parts of a run: masked aggregation, privacy of single examples, delivery to devices.

Only optional.py names them. The package works without this folder, except for runs whose settings
ask for one of its parts.
"""
