"""No engine process outlives its launcher, and a signal during start-up ends all of them."""

import os
import signal
import sys
import threading
from multiprocessing import parent_process
from types import FrameType

import psutil

_following = False


def die_with_parent() -> None:
    """End this process when the one that started it is gone; calling it again changes nothing.

    vLLM's workers notice a dead engine core, but an engine core does not notice a launcher that
    was killed: it would keep its memory, and a GPU, for ever.
    """
    global _following
    parent = parent_process()
    if parent is None or _following:
        return
    _following = True

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="spin-die-with-parent", daemon=True).start()


def stop_on_signals_during_start() -> None:
    """Make SIGINT and SIGTERM end this process and its children at once, with status 0.

    Nothing is served yet, so there is nothing to drain. vLLM's server replaces these handlers by
    its own, which do drain, once it listens.
    """

    def stop(number: int, _: FrameType | None) -> None:
        for child in psutil.Process().children(recursive=True):
            child.kill()
        print(
            f"spin-server: stopped by {signal.Signals(number).name} before it was ready",
            file=sys.stderr,
            flush=True,
        )
        os._exit(0)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
