"""Exit statuses of the `spin-server` command."""

OK = 0
ENGINE_DIED = 1
BAD_INPUT = 2
START_FAILED = 3
