"""Ways out over a network, and ways to see the host's."""

from __future__ import annotations

from .probe import Probe, probe

_NET = "network"

NETWORK: tuple[Probe, ...] = (
    probe(
        "tcp4",
        _NET,
        "connect to a TCP port of the host over IPv4",
        'leak(socket.create_connection(("127.0.0.1", A["tcp4"]), 2).recv(99))',
    ),
    probe(
        "tcp6",
        _NET,
        "connect to a TCP port of the host over IPv6",
        'leak(socket.create_connection(("::1", A["tcp6"]), 2).recv(99))',
        needs="IPv6 on the loopback interface",
    ),
    probe(
        "tcp-fast-open",
        _NET,
        "open TCP by sending, without connect()",
        """
s = socket.socket()
s.sendto(b"hello", 0x20000000, ("127.0.0.1", A["tcp4"]))  # MSG_FASTOPEN
leak(s.recv(99))
""",
    ),
    probe(
        "mptcp",
        _NET,
        "connect by Multipath TCP, which filters for TCP may not know",
        """
s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
s.settimeout(2)
s.connect(("127.0.0.1", A["tcp4"]))
leak(s.recv(99))
""",
        needs="Multipath TCP in the kernel",
    ),
    probe(
        "udp",
        _NET,
        "exchange UDP with a port of the host",
        """
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(2)
s.sendto(b"hello", ("127.0.0.1", A["udp"]))
leak(s.recv(999))
""",
    ),
    probe(
        "dns",
        _NET,
        "carry text out and in through a name server",
        r"""
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(2)
name = b"".join(bytes([len(x)]) + x for x in (b"stolen-text", b"example", b"")) 
s.sendto(struct.pack(">6H", 7, 256, 1, 0, 0, 0) + name + struct.pack(">2H", 16, 1),
         ("127.0.0.1", A["udp"]))
leak(s.recv(999))
""",
    ),
    probe(
        "raw-icmp",
        _NET,
        "ping through a raw socket",
        """
s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
s.settimeout(2)
s.sendto(struct.pack("!BBHHH", 8, 0, 0xf7fd, 1, 1), ("127.0.0.1", 0))
s.recv(99) and won()
""",
        needs="CAP_NET_RAW",
    ),
    probe(
        "packet",
        _NET,
        "listen to every packet of an interface",
        """
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
s.settimeout(2)
s.bind(("lo", 0))
t = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
t.sendto(b"hello", ("127.0.0.1", A["udp"]))
s.recv(99) and won()
""",
        needs="CAP_NET_RAW",
    ),
    probe(
        "netlink",
        _NET,
        "list the host's listening sockets through netlink",
        """
s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4)  # NETLINK_SOCK_DIAG
s.settimeout(2)
ask = struct.pack("=BBBxI48x", socket.AF_INET, socket.IPPROTO_TCP, 0, 1 << 10)
s.send(struct.pack("=IHHII", 16 + len(ask), 20, 0x301, 1, 0) + ask)
while True:
    got = s.recv(65536)
    if struct.pack("!H", A["tcp4"]) in got:
        won()
        break
    if struct.unpack_from("=IH", got)[1] in (2, 3):
        break
""",
        needs="CONFIG_INET_DIAG in the kernel",
    ),
    probe(
        "proc-net",
        _NET,
        "read the host's connections from /proc/net",
        '":%04X " % A["tcp4"] in open("/proc/self/net/tcp").read() and won()',
    ),
    probe(
        "unix-path",
        _NET,
        "connect to a socket in the host's file system (as a container daemon's)",
        """
s = socket.socket(socket.AF_UNIX)
s.settimeout(2)
s.connect(A["unix"])
leak(s.recv(99))
""",
    ),
    probe(
        "unix-abstract",
        _NET,
        "connect to an abstract socket of the host, which no file permission guards",
        r"""
s = socket.socket(socket.AF_UNIX)
s.settimeout(2)
s.connect("\0" + A["abstract"])
leak(s.recv(99))
""",
    ),
    probe(
        "unix-datagram",
        _NET,
        "send to an abstract datagram socket without connecting",
        r"""
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.settimeout(2)
s.bind("")
s.sendto(b"hello", "\0" + A["abstract"] + "d")
leak(s.recv(99))
""",
    ),
    probe(
        "vsock",
        _NET,
        "take an address towards the hypervisor",
        """
s = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
s.bind((socket.VMADDR_CID_ANY, socket.VMADDR_PORT_ANY))
won()
""",
        needs="AF_VSOCK in the kernel",
    ),
    probe(
        "http",
        _NET,
        "fetch a page with the standard library, past any proxy setting",
        """
import http.client
c = http.client.HTTPConnection("127.0.0.1", A["tcp4"], timeout=2)
c.connect()
leak(c.sock.recv(99))
""",
    ),
)
