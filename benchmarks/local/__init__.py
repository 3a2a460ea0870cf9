"""Local SGD beside synchronous training: loss by tokens, bytes, and seconds on a slow link.

``command`` is the command, what it compares and its report, ``worker`` what each rank does.
"""
