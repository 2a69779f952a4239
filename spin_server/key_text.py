"""What a key looks like, wherever text may hold one by mistake."""

import logging
import re

_KEY = re.compile(r"spin_[A-Za-z0-9_-]{16,}")


def blacked_out(text: str) -> str:
    """Take the keys out of a text."""
    return _KEY.sub("spin_…", text)


class BlackOut(logging.Filter):
    """Takes the keys out of a logger's records: a client may put his into an address."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record; let it pass."""
        if isinstance(record.args, tuple):
            record.args = tuple(
                blacked_out(arg) if isinstance(arg, str) else arg for arg in record.args
            )
        return True
