"""What an `--admin-store` and an `--admin-host` may name."""

import ipaddress
import re

from spin_server.errors import InputError

_LABEL = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
KUBERNETES = re.compile(rf"kubernetes://(?P<namespace>{_LABEL})/(?P<name>{_LABEL})")


def check_location(location: str) -> None:
    """Refuse what is neither a file nor a place on Kubernetes.

    Raises:
        InputError: the reason.
    """
    if not location or ("://" in location and not KUBERNETES.fullmatch(location)):
        raise InputError("--admin-store", "FILE or kubernetes://NAMESPACE/NAME", repr(location))


def is_file(location: str) -> bool:
    """Whether it names a file.

    Raises:
        InputError: it is neither a file nor a place on Kubernetes.
    """
    check_location(location)
    return KUBERNETES.fullmatch(location) is None


def is_loopback(host: str) -> bool:
    """Whether nobody on another machine can listen in, or connect."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
