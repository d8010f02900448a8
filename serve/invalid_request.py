"""The error of a request that is at fault."""

from __future__ import annotations


class InvalidRequest(ValueError):
    """A request that cannot be served as it stands.

    Attributes:
        param: the field at fault, as the API names it.
    """

    def __init__(self, message: str, *, param: str):
        super().__init__(message)
        self.param = param
