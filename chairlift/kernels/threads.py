"""The threads that OpenMP keeps between parallel operators. Refuses to know what runs on them."""

import ctypes

OMP_PAUSE_SOFT = 1


def release_threads() -> None:
    """Give back the threads that OpenMP keeps for the calling thread; its next parallel operator gets new ones.

    GNU's OpenMP keeps a team for every thread that ever ran a parallel operator. As soon as all teams together have
    more threads than there are processors, they sleep between operators instead of waiting actively, and each operator
    of any thread has to wake some: 50 µs instead of 5, some hundred times in a step of PyTorch operators.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:
        pause(OMP_PAUSE_SOFT)
