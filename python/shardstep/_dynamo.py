"""What ``torch.compile`` must not see of us.

Dynamo skips this package's frames, and goes on into the user's code that they call: a wrapped module's forward is compiled
as if it were not wrapped, whichever of the wrap and ``torch.compile`` came first. And while it compiles something in a
wrapped module's forward, parameters of low precision show ``.grad`` None: Dynamo gives up on a parameter whose gradient is
of another dtype, for good when that happens in mid-window.
"""

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardstep._engine import Engine

#: Engines whose root's forward runs on this thread.
_running = threading.local()
_hidden: "list[Engine]" = []
_skipped = False


def skip_this_package() -> None:
    """Before the first wrapped module is called. torch.optim has imported Dynamo by then."""
    global _skipped
    if not _skipped:
        _skipped = True
        import torch._dynamo

        torch._dynamo.trace_rules.add(__package__)


def running() -> "list[Engine]":
    """The engines whose root's forward runs on this thread."""
    try:
        return _running.engines
    except AttributeError:
        _running.engines = []
        return _running.engines


def hide_gradients_from_compilation() -> None:
    """To be called before every forward of low precision: ``torch._dynamo.reset()`` drops the callbacks."""
    from torch._dynamo.callback import callback_handler

    if _hide not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_hide)
    if _show not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(_show)


def _hide(_: Any) -> None:
    for engine in running():
        engine.core.hide_low_gradients(True)
        _hidden.append(engine)


def _show(_: Any) -> None:
    while _hidden:
        engine = _hidden.pop()
        if not engine.closed:
            engine.core.hide_low_gradients(False)
