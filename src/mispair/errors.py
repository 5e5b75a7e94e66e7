"""What mispair says to people: errors that are sentences, not tracebacks."""


class MispairError(Exception):
    """Something the user can act on; the command line prints it as a sentence and exits with `code`.

    Attributes:
        silent: Whether another process prints it.
    """

    code = 2
    silent = False


class DataError(MispairError):
    """The data on disk is not what it should be: says what was found, what was expected and how to fix it."""


class ConfigError(MispairError):
    """A setting is unknown, out of range or contradicts another."""


class CollapseError(MispairError):
    """All similarities became equal: the network no longer tells any pair from any other."""

    code = 3


class NonFiniteError(MispairError):
    """A loss or a gradient is not a finite number; the update was not made."""

    code = 3


class StoppedError(MispairError):
    """Training was asked to stop by a signal and has saved its state."""

    def __init__(self, message: str, code: int = 143) -> None:
        super().__init__(message)
        self.code = code


class RankLostError(MispairError):
    """Another process of the training has ended."""

    code = 1
