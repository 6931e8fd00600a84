"""Proxy process of a fork, see tests/fork_server.py: forwards signals, ends with its status."""

import marshal
import os
import struct
import sys
from _socket import AF_UNIX, SCM_RIGHTS, SOL_SOCKET, socket  # `socket` imports much beside it
from signal import SIG_DFL, SIG_IGN, getsignal, signal

FORWARDED = (1, 2, 3, 10, 12, 15, 64)  # HUP, INT, QUIT, USR1, USR2, TERM, RTMAX


def receive_number():
    number = server.recv(4)
    if not number:
        sys.exit("the fork server has ended; see its output")
    return struct.unpack("i", number)[0]


def is_inherited(file):
    """Return whether `pass_fds` passed it: files that Python itself opens are not inheritable."""
    try:
        return file > 2 and os.get_inheritable(file)
    except OSError:  # the descriptor of the folder itself is closed by now
        return False


files = [0, 1, 2, *filter(is_inherited, map(int, os.listdir("/proc/self/fd")))]
forwarded = [number for number in FORWARDED if getsignal(number) != SIG_IGN]
request = marshal.dumps(
    {
        "words": [sys.argv[0], *sys.argv[1:]],
        "files": files,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "parent": os.getppid(),
        "ignored": [number for number in FORWARDED if number not in forwarded],
    }
)
server = socket(AF_UNIX)
server.connect(os.path.dirname(sys.argv[0]) + "/socket")
rights = struct.pack(f"{len(files)}i", *files)
server.sendmsg([struct.pack("<I", len(request))], [(SOL_SOCKET, SCM_RIGHTS, rights)])
server.sendall(request)
for file in files[3:]:  # so that their readers see when the fork closes them
    os.close(file)
for number in forwarded:
    signal(number, lambda number, _: server.send(bytes([number])))
with open("/proc/self/comm", "w") as comm:
    comm.write(f"fork {receive_number()}")  # for `fork_of` and for `ps`
status = receive_number()
if status < 0:
    if -status in FORWARDED:
        signal(-status, SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
