"""The states of a block manager that a caller handles."""


class OutOfBlocks(RuntimeError):
    """The pool cannot give the blocks asked for, not even by evicting every cached one."""


class PinBudgetExceeded(RuntimeError):
    """The blocks to pin are more than the budget has left."""


class InvariantViolation(AssertionError):
    """The block manager's bookkeeping contradicts itself: a bug, or a state changed by hand."""
