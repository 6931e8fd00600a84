"""End with 0 if the SuperLink or SuperNode at HEALTH_URL answers; HEALTH_CA vouches for it."""

import os
import ssl
import urllib.request

url = os.environ.get("HEALTH_URL", "http://127.0.0.1:9094/health")
context = ssl.create_default_context(cafile=os.environ.get("HEALTH_CA"))
urllib.request.urlopen(url, timeout=5, context=context).close()  # noqa: S310 (the operator's URL)
