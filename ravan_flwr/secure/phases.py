"""Name the phases of a secure round, in their order; messages have these names."""

TRAINED = "masked"  # the one in which a client trains, and needs torch
PHASES = ("keys", "shares", TRAINED, "agree", "unmask")
LIGHT = tuple(phase for phase in PHASES if phase != TRAINED)
