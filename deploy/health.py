"""End with 0 if the SuperLink or SuperNode at HEALTH_URL answers; HEALTH_CA vouches for it.

It compares the clocks as well: a SuperLink takes what a SuperNode signed up to 5 s in its future
and 305 s in its past for genuine, and refuses everything else as it refuses a wrong key.
"""

import http.client
import os
import ssl
import sys
import time
import urllib.request
from email.utils import parsedate_to_datetime

AHEAD, BEHIND = 5, 305  # seconds, of Flower 1.41

url = os.environ.get("HEALTH_URL", "http://127.0.0.1:9094/health")
try:
    context = ssl.create_default_context(cafile=os.environ.get("HEALTH_CA"))
except OSError as error:
    sys.exit(f"HEALTH_CA={os.environ['HEALTH_CA']}: {error}; expected the path of ca.crt")
try:
    with urllib.request.urlopen(url, timeout=5, context=context) as reply:  # noqa: S310 (the operator's)
        date = reply.headers["Date"]
except (OSError, ValueError, http.client.HTTPException) as error:  # also a wrong certificate
    sys.exit(f"{url}: {error}; expected an answer: see whether it runs there, and its log")
here = time.time()
ahead = here - parsedate_to_datetime(date).timestamp() if date else 0.0
if not -BEHIND < ahead < AHEAD + 1:  # the header has whole seconds
    sys.exit(
        f"{url}: this machine's clock is {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}, "
        f"expected at most {AHEAD} s ahead and {BEHIND} s behind, or its SuperNode is refused; "
        "set it by NTP, such as `timedatectl set-ntp true`"
    )
