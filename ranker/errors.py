"""The errors of the model plane. Each line says when it is raised."""


class RankerError(Exception):
    """The ranker cannot be used as configured; the message is one line that says why and what to change."""


class NodeUnfit(RankerError):  # noqa: N818 - a state of a machine
    """This machine cannot do what the ranker asks of it, another may: it gets no worker, the run goes on."""


class DeviceBroken(Exception):  # noqa: N818 - a state of the device, not a wrong use
    """The accelerator's context is not to be trusted any more: the process must end after its report."""


class NonFiniteScore(Exception):  # noqa: N818 - it reads as what a dead letter says
    """A pair's score is NaN or infinite: such a score sorts anywhere, so it is a failure instead."""


class DocumentTooLarge(ValueError):  # noqa: N818 - read by people in the dead letters
    """A document is larger than ranker.max_document_bytes."""
