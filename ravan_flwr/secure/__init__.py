"""Secure aggregation: sum clients' updates without revealing any of them (Bonawitz et al., 2017).

Pure: no file here imports Flower, messages or models. docs/secure-aggregation.md describes what is
protected, and against which attackers. A round has five phases, each with a client half and a
server half:

    client (client.py)                     server (server.py)
    makes and signs keys     ----------->  makes the schedule: which client trains which part
    checks all signatures    <-----------  the schedule, and all clients' signed keys
    shares its secrets       ----------->  lists the clients that have shared
    trains, masks            <-----------  that list, and the shares for this client
    sends masked numbers     ----------->  sums them, still masked
    signs the list           <-----------  lists the clients that have sent numbers
    sends the signature      ----------->  collects signatures
    checks the signatures    <-----------  all signatures
    sends shares             ----------->  removes the remaining masks from the sum
"""

# The phases, in their order; messages have these names. This file imports nothing heavy.
TRAINED = "masked"  # the phase in which a client trains, and needs torch
PHASES = ("keys", "shares", TRAINED, "agree", "unmask")
LIGHT = tuple(phase for phase in PHASES if phase != TRAINED)

MOST_CLIENTS = 256  # of a round: a sum of 256 numbers of 16 bits has 24 bits
