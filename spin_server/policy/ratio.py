"""Shares between 0 and 1, kept exactly.

A budget is ceil((1 - sparsity) * blocks), and binary floating point gets that wrong by one
block: 1 - 0.7 in float64 is a little over 0.3, so ten blocks would keep four instead of
three. A ratio is therefore a whole number of billionths, which an int32 tensor holds.
"""

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from spin_server.errors import InputError

BILLION = 1_000_000_000
DECIMALS = 9
# Digits and exponents are bounded: the exact value of 1e-999999999 would take all memory.
_NUMBER = re.compile(r"[+-]?(\d{1,64}(\.\d{0,64})?|\.\d{1,64})([eE][+-]?\d{1,3})?", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Ratio:
    """A share in 0..1.

    Args:
        billionths: 0 to 1,000,000,000.
    """

    billionths: int

    @classmethod
    def parse(cls, name: str, value: str | float | Decimal) -> "Ratio":
        """Read a decimal number exactly; a float means its shortest decimal form.

        Args:
            name: what the value is, for the error.
            value: 0 to 1, with at most 9 decimals.

        Raises:
            InputError: not a number, outside 0..1, or with more than 9 decimals.
        """
        text = str(value).strip()
        if not _NUMBER.fullmatch(text):
            raise InputError(name, "a number from 0 to 1", repr(value))
        number = Fraction(Decimal(text))  # exact, however many digits there are
        if not 0 <= number <= 1:
            raise InputError(name, "a number from 0 to 1", value)
        scaled = number * BILLION
        if scaled.denominator != 1:
            raise InputError(name, f"at most {DECIMALS} decimals", value)
        return cls(scaled.numerator)

    def __float__(self) -> float:
        return self.billionths / BILLION

    def __str__(self) -> str:
        return str(float(self))
