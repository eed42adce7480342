"""What is said of a file that does not hold weights one may read."""


class CheckpointError(ValueError):
    """The file is not a checkpoint, or not the one expected."""


class UnsafeCheckpointError(CheckpointError):
    """The file asks for more than tensors and plain containers; none of it was run."""
