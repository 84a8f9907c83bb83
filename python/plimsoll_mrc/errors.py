"""The exceptions of plimsoll_mrc. Each mirrors an error type of the Rust crates, with the same text."""


class PlimsollError(Exception):
    """The base of all."""


class ReferencesError(PlimsollError, TypeError):
    """What was given is not page numbers: of another type, with nulls or masked values, or of more than one dimension."""


class OptionError(PlimsollError, ValueError):
    """There is no estimator, policy, trace format or option of this name, or the option does not accept the value."""


class CurveError(PlimsollError, ValueError):
    """Points or JSON that are not a curve, or curves of different page sizes to compare."""


class EmptyError(CurveError):
    """No reference was observed (or sampled), so there is no curve."""


class PartialError(PlimsollError, ValueError):
    """Bytes that are no partial state, or partial states that do not follow each other."""


class TraceError(PlimsollError):
    """A trace cannot be read further. The references before that were returned."""


class TraceOpenError(TraceError, OSError):
    """A trace file cannot be opened. `__cause__` is the system's error, such as FileNotFoundError."""


class PlanError(PlimsollError, ValueError):
    """The inputs of a plan are not valid. Nothing was decided."""


class InfeasibleError(PlanError):
    """Minimum sizes and bounds need more memory than there is.

    `needed_bytes` is the smallest total that suffices, `total_bytes` what was given, and `least_bytes` a dictionary of
    the smallest size of each VM.
    """

    needed_bytes: int
    total_bytes: int
    least_bytes: "dict[str, int]"
