"""Sum up what clients train so that nobody sees what one of them adds (Bonawitz et al., 2017).

Pure: no file here knows of Flower, of messages or of models. docs/secure-aggregation.md says who is
protected from whom. A round has five phases, and each client and the server hold one half:

    client (client.py)                     server (server.py)
    fresh keys, signed       ----------->  who is there
    checks all signatures    <-----------  the schedule: who trains which part; everyone's keys
    shares of its secrets    ----------->  who has shared
    trains, masks            <-----------  the shares that it holds for others
    the masked numbers       ----------->  the sum, still masked
    signs who has answered   <-----------  who has answered
    the signature            ----------->
    checks the signatures    <-----------  all signatures
    shares                   ----------->  takes off the masks that are left
"""

# The phases, in their order; messages have these names. This file imports nothing heavy.
TRAINED = "masked"  # the one in which a client trains, and needs torch
PHASES = ("keys", "shares", TRAINED, "agree", "unmask")
LIGHT = tuple(phase for phase in PHASES if phase != TRAINED)
