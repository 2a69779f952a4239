"""Which cached prefixes a request may find: its own tenant's, in its policy's class."""

import hashlib
import hmac
import secrets
from collections import Counter
from collections.abc import Mapping

from spin_server.policy.policy import DEFAULT, Policy


class PrefixSalts:
    """Makes the salt of every request's prefixes.

    A tenant has one salt for the class `sparse`. The one for `exact` is used up as soon as a row of
    his begins to skip blocks: a request that is running then goes on under it, and what it decodes
    from then on must not be found by an exact one, ever.

    Args:
        launch: policies that the server starts with, by row.
    """

    def __init__(self, launch: Mapping[int, Policy]) -> None:
        self._secret = secrets.token_bytes(32)
        self._exact = {row for row, policy in launch.items() if policy.keeps_all}
        self._owners: dict[int, str] = {0: DEFAULT}  # of rows, also former ones
        self._epochs: Counter[str] = Counter()
        self._lives: Counter[str] = Counter()

    def name_rows(self, owners: Mapping[int, str]) -> None:
        """Say whose rows are; a row that is nobody's now keeps its last owner's name."""
        self._owners.update(owners)

    def forget(self, tenant: str) -> None:
        """Let a tenant that is made anew under a name find nothing of the one that is gone."""
        self._lives[tenant] += 1

    def before_write(self, rows: Mapping[int, Policy]) -> None:
        """Note which rows may skip blocks from now on."""
        for row in self._exact & rows.keys():
            if not rows[row].keeps_all:
                self._exact.discard(row)
                self._epochs[self._owners.get(row, "")] += 1

    def after_write(self, rows: Mapping[int, Policy]) -> None:
        """Note which rows skip none any more, now that every worker knows."""
        self._exact |= {row for row, policy in rows.items() if policy.keeps_all}

    def salt(self, tenant: str | None, row: int, since: str = "") -> str:
        """Make the salt of a request.

        Args:
            tenant: whose it is; None: nobody's.
            row: that it runs with.
            since: when the tenant was made: what it computed is not its namesake's.
        """
        owner = tenant or DEFAULT
        kind = f"exact {self._epochs[owner]}" if row in self._exact else "sparse"
        text = f"{owner}\0{since}\0{self._lives[owner]}\0{kind}".encode()
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()
