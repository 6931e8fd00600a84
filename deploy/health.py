"""End with 0 if the SuperLink or SuperNode at HEALTH_URL answers; HEALTH_CA vouches for it.

It compares the clocks as well: a SuperLink takes what a SuperNode signed up to 5 s in its future
and 305 s in its past for genuine, and refuses everything else as it refuses a wrong key.

With HEALTH_SUPERLINK=HOST:PORT it asks for more: that the SuperNode has a connection to the server.
A SuperNode of Flower 1.41 gives up for good when the server's certificate has expired, and still
answers. It is ended here, so that what started it starts it again; but only while the server
answers with a certificate that is valid. With HEALTH_EVERY=SECONDS it is repeated.
"""

import http.client
import os
import ssl
import sys
import time
import urllib.request
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

AHEAD, BEHIND = 5, 305  # seconds, of Flower 1.41
WITHOUT = 45.0  # seconds without a connection: a SuperNode tries again after 20 at most


def main() -> None:
    """Check once, or every HEALTH_EVERY seconds."""
    every = float(os.environ.get("HEALTH_EVERY", "0"))
    while True:
        problem = health()
        if not every:
            sys.exit(problem)
        if problem:
            sys.stderr.write(f"{problem}\n")
        time.sleep(every)


def health() -> str | None:
    """Say what is wrong, in a line; None if nothing is."""
    url = os.environ.get("HEALTH_URL", "http://127.0.0.1:9094/health")
    server = os.environ.get("HEALTH_SUPERLINK")
    problem = asked(url)
    if server is None or problem is not None:
        return problem
    there = f"https://{server}/health"
    ends = time.monotonic() + WITHOUT
    while time.monotonic() < ends:
        if (problem := asked(there)) is not None or is_connected(url, server):
            return problem
        time.sleep(3)
    end_supernode(url)
    return f"{url}: its SuperNode had no connection to {server} for {WITHOUT:g} s and was ended"


def asked(url: str) -> str | None:
    """Ask for the page, and compare the clocks."""
    try:
        context = ssl.create_default_context(cafile=os.environ.get("HEALTH_CA"))
    except OSError as error:
        return f"HEALTH_CA={os.environ['HEALTH_CA']}: {error}; expected the path of ca.crt"
    try:
        with urllib.request.urlopen(url, timeout=5, context=context) as reply:  # noqa: S310 (the operator's)
            date = reply.headers["Date"]
    except (OSError, ValueError, http.client.HTTPException) as error:  # also a wrong certificate
        return f"{url}: {error}; expected an answer: see whether it runs there, and its log"
    ahead = time.time() - parsedate_to_datetime(date).timestamp() if date else 0.0
    if -BEHIND < ahead < AHEAD + 1:  # the header has whole seconds
        return None
    return (
        f"{url}: this machine's clock is {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}, "
        f"expected at most {AHEAD} s ahead and {BEHIND} s behind, or its SuperNode is refused; "
        "set it by NTP, such as `timedatectl set-ntp true`"
    )


def supernode(url: str):  # type: ignore[no-untyped-def] # noqa: ANN201 (psutil is imported late)
    """Find the process that listens there, with its connections; None if it is not this user's."""
    import psutil  # noqa: PLC0415 (a check of a server needs none)

    port = urlsplit(url).port
    for process in psutil.process_iter():
        try:
            found = process.net_connections("tcp")
        except psutil.Error:
            continue
        if any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in found):
            return process, found
    return None


def is_connected(url: str, server: str) -> bool:
    """Tell whether the SuperNode has a connection to the server's port, or makes one."""
    found = supernode(url)
    port = int(server.rpartition(":")[2])
    return found is not None and any(one.raddr and one.raddr.port == port for one in found[1])


def end_supernode(url: str) -> None:
    """End it as an administrator does; at once if it does not end in half a minute."""
    import psutil  # noqa: PLC0415

    if (found := supernode(url)) is None:
        return
    process = found[0]
    process.terminate()
    try:
        process.wait(30)
    except psutil.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    main()
