"""Checks the Python interpreter that Triton embeds for packages that corrupt Triton's answers."""

import numpy as np


def check_interpreter() -> None:
    """Raise RuntimeError if a package of this interpreter would corrupt Triton's answers."""
    if int(np.__version__.split(".")[0]) >= 2:
        raise RuntimeError(
            f"numpy {np.__version__} corrupts tensors in Triton's Python backend; install"
            " 'numpy<2' into the environment whose python3 comes first on PATH"
        )
