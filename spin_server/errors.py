"""Every error that spin-server raises on purpose.

SpinError
├── InputError         a value, file or option that the caller can mend (also a ValueError)
├── UnsupportedError   a model, version or option that SPIN does not serve
└── StartupError       the machine or the engine is not ready to serve

Each message is one line: what was wrong, what was expected, what came.
"""


class SpinError(Exception):
    """Base of every deliberate error; the command line prints it as one line."""


class InputError(SpinError, ValueError):
    """A value, file or option that the caller can mend.

    Args:
        name: the option, key or file at fault.
        expected: what is accepted, in words.
        got: what came.
    """

    def __init__(self, name: str, expected: str, got: object) -> None:
        self.name = name
        self.expected = expected
        self.got = got
        super().__init__(f"{name}: expected {expected}, got {got}")


class UnsupportedError(SpinError):
    """A model, version or option that SPIN does not serve, with the reason."""


class StartupError(SpinError):
    """The machine or the engine is not ready to serve, with the reason and what would mend it."""
