"""Stand for a process that a fork server makes, see tests/fork_server.py: end as that one ends."""

import marshal
import os
import struct
import sys
from _socket import AF_UNIX, SCM_RIGHTS, SOL_SOCKET, socket  # `socket` imports much beside it
from signal import SIG_DFL, SIG_IGN, getsignal, signal

HANDED_ON = (1, 2, 3, 10, 12, 15, 64)  # HUP, INT, QUIT, USR1, USR2, TERM, RTMAX


def received():
    number = server.recv(4)
    if not number:
        sys.exit("the fork server has ended; see its output")
    return struct.unpack("i", number)[0]


handed_on = [number for number in HANDED_ON if getsignal(number) != SIG_IGN]
request = marshal.dumps(
    {
        "words": [sys.argv[0], *sys.argv[1:]],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "parent": os.getppid(),
        "ignored": [number for number in HANDED_ON if number not in handed_on],
    }
)
server = socket(AF_UNIX)
server.connect(os.path.dirname(sys.argv[0]) + "/socket")
files = struct.pack("3i", 0, 1, 2)
server.sendmsg([struct.pack("<I", len(request))], [(SOL_SOCKET, SCM_RIGHTS, files)])
server.sendall(request)
for number in handed_on:
    signal(number, lambda number, _: server.send(bytes([number])))
with open("/proc/self/comm", "w") as comm:
    comm.write(f"fork {received()}")  # for `fork_of`, and to be seen in `ps`
status = received()
if status < 0:
    if -status in HANDED_ON:
        signal(-status, SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
