"""Local SGD beside synchronous training: loss by tokens, bytes, and seconds on a slow link.

``command`` is the command and its report, ``job`` what it compares, ``worker`` what each rank does.
"""
