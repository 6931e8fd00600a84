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


def was_given(file):
    """Whether `pass_fds` gave it: what Python itself opens is not inheritable."""
    try:
        return file > 2 and os.get_inheritable(file)
    except OSError:  # the folder that lists them is closed by now
        return False


files = [0, 1, 2, *filter(was_given, map(int, os.listdir("/proc/self/fd")))]
handed_on = [number for number in HANDED_ON if getsignal(number) != SIG_IGN]
request = marshal.dumps(
    {
        "words": [sys.argv[0], *sys.argv[1:]],
        "files": files,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "parent": os.getppid(),
        "ignored": [number for number in HANDED_ON if number not in handed_on],
    }
)
server = socket(AF_UNIX)
server.connect(os.path.dirname(sys.argv[0]) + "/socket")
rights = struct.pack(f"{len(files)}i", *files)
server.sendmsg([struct.pack("<I", len(request))], [(SOL_SOCKET, SCM_RIGHTS, rights)])
server.sendall(request)
for file in files[3:]:  # whose other end is to see when the fork closes them
    os.close(file)
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
