"""The one exception that train.py and the scripts print as a plain message, without a traceback."""


class UserError(RuntimeError):
    """Something the user can put right: a wrong value, a missing file, too little memory.

    The message is complete in itself: what was wrong, and what is accepted or what to do.
    """
