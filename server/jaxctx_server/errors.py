"""Exit statuses of the process, and the error of a start that its user can correct."""

OK = 0  # drained and stopped
DEFECT = 1  # an error that should not have been possible; the log has a traceback
USAGE = 2  # a flag, variable, configuration file or keys file is wrong
MODEL = 3  # the model cannot be loaded, or does not fit
ADDRESS = 4  # an address cannot be listened on
CUT_OFF = 5  # stopped, and the drain's time was not enough for all that ran
CHECK = 6  # `check` found a kernel that differs, does not compile, crashes or never ends
NEVER_ENDS = 7  # a kernel that a start compared does not end, so the device cannot be used by this process any more
INTERRUPTED = 130  # stopped at once: a second Ctrl-C, or one while loading


class StartError(Exception):
    """A mistake that the user can correct. Shown as one line, without a traceback."""

    def __init__(self, message: str, exit_status: int = USAGE) -> None:
        super().__init__(message)
        self.exit_status = exit_status
