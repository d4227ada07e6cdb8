"""Counts in words."""


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural unless it is one.

    >>> counted(1, "norm"), counted(0, "image"), counted(2, "activation")
    ('1 norm', '0 images', '2 activations')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
