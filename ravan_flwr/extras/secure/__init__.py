"""Secure aggregation: sum clients' updates without revealing any of them (Bonawitz et al., 2017).

docs/privacy.md describes what is protected, and against which attackers. A round has
five phases, each with a client half and a server half, which import neither Flower nor models:

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

The release (release.py), training (train.py), and the other answers of a client (phases.py) connect
them with a run: they turn changes into numbers (changes.py) and records into messages.
"""
