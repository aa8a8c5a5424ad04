"""The exceptions that shardstep raises. All are :class:`Error`, which is a ``RuntimeError`` as torch's own are."""


class Error(RuntimeError):
    """Base of all errors of shardstep.

    ``rank`` is the peer concerned and ``bucket`` the gradient bucket, or None.
    """

    rank: int | None = None
    bucket: int | None = None


class UsageError(Error):
    """The API was used in a way that cannot work. The message says which parameter or call, and what to do."""


class MismatchError(Error):
    """Ranks disagree (models, layouts, calls) in a way that has no right answer. Raised alike on every rank."""


class PeerLostError(Error):
    """A peer process has died. ``rank`` says which."""


class TimeoutError(Error, TimeoutError):  # noqa: A001 - also the built-in one
    """A peer did not arrive within ``timeout`` seconds. The message says which rank, bucket and phase."""


class TransportError(Error):
    """The transport itself failed."""


class AbortedError(Error):
    """A peer aborted the accumulation window, or could not go on. ``rank`` says which."""


class CheckpointError(Error):
    """A checkpoint could not be written, or cannot be read: it is damaged, incomplete, or of another model. Raised alike on
    every rank; the message says which file or parameter, and on which rank."""


class RankFailedError(Error):
    """A rank that :func:`shardstep.launch` started has raised or died. ``rank`` is the first that did.

    ``tracebacks`` has the traceback of every rank that failed, as text, by rank.
    """

    tracebacks: dict[int, str]
