"""What a check of a case says beside what is wrong."""


class Note(str):
    """A line that is printed, and no failure."""

    __slots__ = ()
