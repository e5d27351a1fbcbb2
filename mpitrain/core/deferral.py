"""Whether this process imports the compiler of kernels when a kernel is first called, or before."""

is_deferred = False


def defer() -> None:
    """From now on, make kernels when they are first called: most processes that start others call none.

    Call before ``kernels`` is imported.
    """
    global is_deferred
    is_deferred = True
