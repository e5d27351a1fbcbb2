"""Networks between hosts: subnets, interfaces, and this host's addresses."""

from __future__ import annotations

import fcntl
import ipaddress
import socket

from ..errors import LaunchError


def parse_subnet(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """Parse a network such as ``10.1.0.0/16``; return None for a text that may be an interface name.

    Raises:
        LaunchError: The text is neither.
    """
    if "/" not in text and "." not in text:
        return None
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        raise LaunchError(
            f"--network {text} is invalid; give a subnet such as 10.1.0.0/16, or an interface name"
        ) from error


def interface_of(network: str) -> str:
    """Return the name of this host's interface in a network such as ``10.1.0.0/16``; return a name unchanged.

    Raises:
        LaunchError: This host has no interface of the given name, or no address in the given network.
    """
    names = [name for _, name in socket.if_nameindex()]
    if network in names:
        return network
    wanted = parse_subnet(network)
    if wanted is None:
        raise LaunchError(
            f"--network {network} is invalid; give a subnet such as 10.1.0.0/16, or one of {', '.join(names)}"
        )
    addresses = {name: address for name in names if (address := _address_of(name)) is not None}
    for name, address in addresses.items():
        if address in wanted:
            return name
    available = ", ".join(f"{name} {address}" for name, address in addresses.items())
    raise LaunchError(f"--network {network}: this host has no address in it; its addresses are {available}")


def own_addresses() -> list[str]:
    """Return the IPv4 addresses of this host's interfaces, without loopback."""
    addresses = [address for _, name in socket.if_nameindex() if (address := _address_of(name)) is not None]
    return [str(address) for address in addresses if not address.is_loopback]


def _address_of(interface: str) -> ipaddress.IPv4Address | None:
    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), siocgifaddr, interface.encode()[:15].ljust(256, b"\0"))
        except OSError:
            return None  # the interface has no IPv4 address
    return ipaddress.IPv4Address(answer[20:24])


def address_in(network: str) -> str | None:
    """Return this host's IPv4 address in a network such as ``10.1.0.0/16``, or of an interface; None if it has none."""
    try:
        address = _address_of(interface_of(network))
    except LaunchError:
        return None
    return None if address is None else str(address)
