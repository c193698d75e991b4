"""A home's router that forwards ports on request (NAT-PMP, RFC 6886), to be run on it: `nat_pmp.py ADDRESS`.

ADDRESS is the one that it has outside. What it forwards is a rule of the router's nftables (nat_lab.py).
"""

import socket
import struct
import subprocess
import sys

PORT = 5351
OUTSIDE_ADDRESS, MAP_TCP = 0, 2
ANSWER = 128
NOT_SUPPORTED = 5


def main(outside: str) -> None:
    forwarded: set[tuple[str, int, int]] = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("0.0.0.0", PORT))
        print("ready", flush=True)
        while True:
            request, asker = server.recvfrom(64)
            _, kind = struct.unpack_from("!BB", request)
            if kind == OUTSIDE_ADDRESS:
                server.sendto(struct.pack("!BBHI4s", 0, ANSWER, 0, 1, socket.inet_aton(outside)), asker)
                continue
            inner, outer, lifetime_s = struct.unpack_from("!HHI", request, 4)
            mapping = (asker[0], inner, outer)
            if kind == MAP_TCP and lifetime_s and mapping not in forwarded:
                forwarded.add(mapping)
                rule = f"iifname wan tcp dport {outer} dnat to {asker[0]}:{inner}"
                subprocess.run(["nft", "add", "rule", "ip", "home", "into", *rule.split()], check=True)
            result = 0 if kind == MAP_TCP else NOT_SUPPORTED
            answer = struct.pack("!BBHIHHI", 0, ANSWER + kind, result, 1, inner, outer, lifetime_s)
            server.sendto(answer, asker)


if __name__ == "__main__":
    main(sys.argv[1])
