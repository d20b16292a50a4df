"""What stands in a run's log when it ends as foretold: the product's own words, once, without Prefect's tracebacks.

Source: prefect 3.9. What a task raises is logged by `prefect.task_runs`, what a flow raises twice by `prefect.flow_runs` and, outside of a
run, by `prefect.engine`: each with its traceback, whatever it is.
"""

import logging

from prefect.exceptions import ParameterTypeError

_LOGGERS = ("prefect.task_runs", "prefect.flow_runs", "prefect.engine")


class _Foretold(logging.Filter):
    def __init__(self, errors: tuple[type[Exception], ...]) -> None:
        super().__init__()
        self._errors = errors
        self._told: BaseException | None = None

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if not isinstance(error, self._errors):
            return True
        if error is self._told:
            return False
        self._told = error
        record.exc_info, record.msg, record.args = None, str(error), ()
        return True


def leave_out_tracebacks(*foretold: type[Exception]) -> None:
    """Log these errors, and wrong parameters, once and by their words alone from now on.

    Args:
        *foretold: errors whose message says what, where and what to do.
    """
    once = _Foretold((*foretold, ParameterTypeError))
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(once)
